"""Runs on disk: their folders read, two compared, groups sampled again, groups scored again."""

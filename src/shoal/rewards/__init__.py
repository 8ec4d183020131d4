"""Runs reward functions on completions: calls, worker processes, limits and scores."""

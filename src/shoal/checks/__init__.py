"""Checks of a job before it runs: its settings, devices, template, data and reward."""

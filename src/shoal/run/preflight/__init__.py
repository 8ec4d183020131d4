"""Checks of a job before it runs, and estimates of its cost: all for `shoal doctor`, the cheap ones
for each run."""

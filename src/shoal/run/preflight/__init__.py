"""Checks of a job before it runs, and what it will cost: all of them for `shoal doctor`, the cheap ones for each run."""

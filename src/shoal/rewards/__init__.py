"""Scores in: reward functions, the processes that call them, their limits."""

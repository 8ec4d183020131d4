"""Plays groups: a request becomes completions with rewards. Nothing here knows how they are learned
from."""

"""Runs on disk: the records that a run writes, one reader of them, two runs compared."""

"""Runs on disk: the records that a run writes, one module that reads them all, and the comparison
of two runs."""

"""Reports on a run while it goes: the recorder, sinks for metrics, the terminal. Imports nothing of
the trainer."""

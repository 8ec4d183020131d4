"""What is reported of a run while it goes: the recorder, sinks, the terminal. Imports no
trainer."""

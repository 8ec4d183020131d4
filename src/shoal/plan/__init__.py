"""The plan of a job: its own programs compiled for devices that may not be here, and what they will
cost."""

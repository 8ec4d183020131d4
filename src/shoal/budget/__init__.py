"""What a job takes of memory and time, the settings that follow from it, and advice."""

"""Where questions and rewards come from: one task a file, the reward convention in `reward.py`."""

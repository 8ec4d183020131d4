"""Other systems: their flags and files as keys of ours, their recipes, the entry points that their users type."""

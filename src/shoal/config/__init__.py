"""Settings: their schema, and how they are loaded (one chain of defaults, preset, file, command
line). No other system is known here; `words.py` has the interface to a package that knows them."""

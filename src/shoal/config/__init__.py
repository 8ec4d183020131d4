"""Settings: their schema, and how they are loaded (by one chain: defaults, preset, file, command
line). No other system is known here; `foreign.py` is the interface to the package that knows
them."""

"""The settings: what keys there are (schema), and how they are loaded (one chain of defaults, preset, file, command
line). It knows no other system; `translator.py` says how one that does is asked."""

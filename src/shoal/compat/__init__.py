"""Other systems: converts their flags and configuration files to keys of Shoal, and holds their
presets and rewards."""

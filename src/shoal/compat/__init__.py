"""Other systems: their flags and configuration files turned into native keys, their checkpoints,
their presets."""

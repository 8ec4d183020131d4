"""The model: its sizes, its parameters, the one `forward`, adapters."""

"""Settings: their keys and defaults (`schema`), how they are written (`arguments`) and put together (`compose`)."""

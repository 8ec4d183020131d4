"""The sections of the configuration: frozen dataclasses, a file for each noun."""

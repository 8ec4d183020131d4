"""The sections of the configuration: frozen dataclasses, grouped into files by topic. The string
under each field is its help text."""

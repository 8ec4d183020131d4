"""Moved to `shoal.run.derived`."""

from shoal.run.derived import step_seconds  # noqa: F401

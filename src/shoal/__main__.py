"""`shoal`, and `python -m shoal`."""

import sys

from shoal.run.interrupt import end_on_interrupt


def program() -> int:
    """Runs the command that was typed. Ctrl-C is one line from here on, also while the rest is imported."""
    end_on_interrupt()
    from shoal import cli

    return cli.program()


if __name__ == "__main__":
    sys.exit(program())

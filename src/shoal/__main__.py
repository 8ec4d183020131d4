"""`shoal`, and `python -m shoal`."""

import sys


def program() -> int:
    """Runs the command that was typed."""
    from shoal import cli

    return cli.program()


if __name__ == "__main__":
    sys.exit(program())

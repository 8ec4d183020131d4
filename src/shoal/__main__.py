"""`python -m shoal`: the same as `shoal`."""

import sys

from shoal.cli import program

sys.exit(program())

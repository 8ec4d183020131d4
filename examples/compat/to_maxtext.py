"""MaxText's conversion by its name: `python3 -m examples.compat.to_maxtext base.yml model_name=llama3.1-8b`."""

import sys

from shoal.cli import run_as

if __name__ == "__main__":
    sys.exit(run_as("to_maxtext"))

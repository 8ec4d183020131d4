"""TorchRL's asynchronous GRPO by its name: it trains on samples that are one version old (`train.max_staleness=1`).

Sampling and training overlap if each has devices of its own (`num_devices`, `devices`); else they take turns.
"""

import sys

from shoal.cli import run_as

if __name__ == "__main__":
    sys.exit(run_as("grpo-async"))

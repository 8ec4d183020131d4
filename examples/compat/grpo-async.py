"""TorchRL's asynchronous GRPO by its name: samples may be one version old (`train.max_staleness=1`)."""

import sys

from shoal.cli import door

if __name__ == "__main__":
    sys.exit(door("grpo-async"))

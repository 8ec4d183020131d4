"""TorchRL's synchronous GRPO by its name: `python grpo.py env.dataset=ifeval`. The preset is `grpo_gsm8k`."""

import sys

from shoal.cli import run_as

if __name__ == "__main__":
    sys.exit(run_as("grpo"))

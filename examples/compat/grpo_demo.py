"""MaxText's demo by its name: `python grpo_demo.py --model_name=llama3.1-8b --steps=100`. The preset is `grpo`."""

import sys

from shoal.cli import run_as

if __name__ == "__main__":
    sys.exit(run_as("grpo_demo"))

"""`shoal sft`: supervised fine-tuning, a training run whose groups are the data's own answers."""

from __future__ import annotations

from shoal.commands.train import train as sft

__all__ = ["sft"]

"""Remakes the golden logits beside it, with transformers: `python tests/model/golden/make.py`; with
names of families, those of these.

Each file holds, for a model that tests/support/tiny_models.py makes from a seed, token ids [T] and
the float32 logits [n, V] that transformers gives at some positions [n]. Tests compare Shoal with
them where torch is not installed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from tiny_models import FAMILIES, write_model

POSITIONS = np.array([0, 1, 15, 31, 32, 48, 63, 64, 80, 100, 118, 119])
SEED = 3


def tokens(vocab_size: int = 64, length: int = 120) -> np.ndarray:
    """int64[T]: longer than the length that scaled rotary embeddings are stretched from."""
    return np.random.RandomState(SEED).randint(0, vocab_size, length)


def main() -> None:
    import torch
    import transformers

    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, family, SEED)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        with torch.no_grad():
            logits = model(torch.tensor(tokens())[None]).logits[0].numpy()
        file = Path(__file__).parent / f"{family}.npz"
        np.savez_compressed(file, tokens=tokens(), positions=POSITIONS, logits=logits[POSITIONS])
        print(
            f"{file.name}: standard deviation {logits.std():.2f}, transformers "
            f"{transformers.__version__}"
        )


if __name__ == "__main__":
    main()

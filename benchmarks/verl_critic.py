"""Runs verl's own functions of a critic on random numbers, and writes inputs and results as JSON:
`tests/algorithm/verl_critic.json`, with which tests compare. The tests need no verl.

    pip download --no-deps verl==0.9.1 && unzip verl-0.9.1-py3-none-any.whl -d verl-0.9.1
    python benchmarks/verl_critic.py verl-0.9.1 tests/algorithm/verl_critic.json

The functions' sources are taken out of verl's files and run as they are, with torch in float64, so
that what verl imports besides (Ray, tensordict) need not be installed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch

GAMMA_AND_LAM = ((1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.97, 0.0))
CLIPS = (0.5, 0.2)


def functions(file: Path, names: set[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Returns the functions with these names in a file, compiled without their decorators."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            found.append(node)
    assert {node.name for node in found} == names, "this version of verl has other functions"
    exec(compile(ast.Module(found, []), str(file), "exec"), scope)
    return scope


def main(verl: Path, target: Path) -> None:
    (facts,) = verl.glob("verl-*.dist-info/METADATA")
    version = facts.read_text(encoding="utf-8").split("\nVersion: ")[1].split("\n")[0]
    tools = functions(
        verl / "verl" / "utils" / "torch_functional.py",
        {"masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"},
        {"torch": torch},
    )
    core = functions(
        verl / "verl" / "trainer" / "ppo" / "core_algos.py",
        {"compute_gae_advantage_return", "compute_value_loss", "agg_loss"},
        {"torch": torch, "Optional": Optional, "verl_F": SimpleNamespace(**tools)},
    )
    torch.manual_seed(0)
    shape = (6, 9)
    mask = torch.rand(shape, dtype=torch.float64) < 0.7
    mask[:, 0] = True
    mask[2, 5:] = False  # a short one
    values = torch.randn(shape, dtype=torch.float64)
    rewards = torch.zeros(shape, dtype=torch.float64)
    for row in range(len(rewards)):
        # A reward at the last token that was sampled, and one before.
        sampled = mask[row].nonzero().flatten()
        rewards[row, sampled[-1]] = torch.randn((), dtype=torch.float64)
        rewards[row, sampled[len(sampled) // 2]] += torch.randn((), dtype=torch.float64)
    predicted = values + 0.6 * torch.randn(shape, dtype=torch.float64)
    record: dict[str, Any] = {
        "verl": version,
        "torch": torch.__version__,
        "mask": mask.tolist(),
        "values": values.tolist(),
        "rewards": rewards.tolist(),
        "predicted": predicted.tolist(),
        "estimates": [],
        "losses": [],
    }
    for gamma, lam in GAMMA_AND_LAM:
        advantages, returns = core["compute_gae_advantage_return"](
            rewards, values, mask.double(), gamma, lam
        )
        record["estimates"].append(
            {
                "gamma": gamma,
                "lam": lam,
                "advantages": advantages.tolist(),
                "returns": returns.tolist(),
            }
        )
    returns = torch.tensor(record["estimates"][1]["returns"], dtype=torch.float64)
    for clip in CLIPS:
        moving = predicted.clone().requires_grad_()
        loss, clipped = core["compute_value_loss"](moving, returns, values, mask.double(), clip)
        loss.backward()
        assert moving.grad is not None
        record["losses"].append(
            {
                "clip": clip,
                "loss": float(loss.detach()),
                "clipped": float(clipped),
                "gradient": moving.grad.tolist(),
            }
        )
    target.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

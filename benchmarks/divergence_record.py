"""Records what TRL computes as the divergence of a student from its teacher, for
tests/algorithm/test_divergence.py.

    pip install trl==1.16.0    # with torch; in an environment of its own
    python benchmarks/divergence_record.py tests/algorithm/trl_divergence.json
    pip install trl==1.8.0     # which has MiniLLM
    python benchmarks/divergence_record.py tests/algorithm/trl_divergence.json

All on one batch. Of TRL 1.16:

`vocabulary`: the value at each token, and its gradient by the student's hidden states, of the
function that DistillationTrainer's loss applies to hidden states and heads. `buckets`: the same
divergence over the teacher's likeliest tokens and a bucket of all others, by the functions of
SDFTTrainer's loss, in float64. (SDFTTrainer itself takes the student's likeliest tokens.)

Of TRL 1.8, which keeps the rest of the record: `gold`, the values and gradients of GOLDTrainer's
loss for tokenizers that are equal. `minillm`, the two parts of MiniLLMTrainer's loss with its
default settings: the mean of its divergence over the vocabulary, with its gradient, and the
advantages of `labels`, tokens that stand for samples.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE, TOP_K = 5, 40, 6, 7
TEMPERATURE = 0.8


def main(target: str) -> None:
    torch.manual_seed(0)
    student = {
        "hidden": torch.randn(NUM_TOKENS, HIDDEN_SIZE),
        "head": torch.randn(VOCAB_SIZE, HIDDEN_SIZE),
    }
    teacher = {
        "hidden": torch.randn(NUM_TOKENS, HIDDEN_SIZE + 2),
        "head": torch.randn(VOCAB_SIZE, HIDDEN_SIZE + 2),
    }
    record: dict[str, Any] = {}
    if Path(target).exists():
        record = json.loads(Path(target).read_text())
    record["temperature"] = TEMPERATURE
    record["top_k"] = TOP_K
    for name, arrays in (("student", student), ("teacher", teacher)):
        record[name] = {key: array.tolist() for key, array in arrays.items()}
    versions = {"trl": version("trl"), "torch": torch.__version__}
    if version("trl").startswith("1.8."):
        record["versions of gold and minillm"] = versions
        record["gold"] = of_gold(student, teacher)
        record["minillm"] = of_minillm(student, teacher)
    else:
        record["versions"] = versions
        record["vocabulary"] = of_vocabulary(student, teacher)
        record["buckets"] = of_buckets(student, teacher)
    with open(target, "w") as file:
        json.dump(record, file)
        file.write("\n")


def logprobs_of(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """In float64."""
    scores = hidden.double() @ head.double().T / TEMPERATURE
    return scores.log_softmax(-1)


def of_vocabulary(
    student: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    cases = []
    for beta in BETAS:
        hidden = student["hidden"].clone().requires_grad_()
        values, _ = ChunkedDivergenceFunction.apply(
            hidden,
            student["head"],
            None,
            teacher["hidden"],
            teacher["head"],
            None,
            beta,
            TEMPERATURE,
        )
        cases.append({"beta": beta, **value_and_gradient(values, hidden)})
    return cases


def of_buckets(
    student: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    cases = []
    for beta in BETAS:
        hidden = student["hidden"].double().requires_grad_()
        logprobs = logprobs_of(hidden, student["head"])
        top = logprobs_of(**teacher).topk(TOP_K)
        values = compute_divergence(
            add_tail_bucket(logprobs.gather(-1, top.indices)), add_tail_bucket(top.values), beta
        )
        cases.append({"beta": beta, **value_and_gradient(values, hidden)})
    return cases


def of_gold(
    student: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    from trl.experimental.gold.gold_trainer import GOLDTrainer

    cases = []
    for beta in BETAS:
        hidden = student["hidden"].double().requires_grad_()
        by_token = GOLDTrainer.generalized_jsd_loss(
            student_logits=hidden @ student["head"].double().T,
            teacher_logits=teacher["hidden"].double() @ teacher["head"].double().T,
            beta=beta,
            temperature=TEMPERATURE,
            reduction="none",
        )
        cases.append({"beta": beta, **value_and_gradient(by_token.sum(-1), hidden)})
    return cases


def of_minillm(
    student: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor]
) -> dict[str, Any]:
    from trl.experimental.minillm.minillm_trainer import MiniLLMTrainer

    settings: Any = SimpleNamespace(gamma=0.0, length_normalization=True)  # MiniLLMConfig's
    hidden = student["hidden"].double().requires_grad_()
    logprobs = logprobs_of(hidden, student["head"])[None]
    their_logprobs = logprobs_of(**teacher)[None]
    mask = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    mean = MiniLLMTrainer._single_step_decomposition_loss(settings, logprobs, their_logprobs, mask)
    labels = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS))
    advantages = MiniLLMTrainer._compute_advantage(
        settings,
        logprobs.gather(-1, labels[..., None])[..., 0],
        their_logprobs.gather(-1, labels[..., None])[..., 0],
        mask,
    )
    return {
        **value_and_gradient(mean, hidden),
        "labels": labels[0].tolist(),
        "advantages": advantages[0].tolist(),
    }


def value_and_gradient(values: torch.Tensor, hidden: torch.Tensor) -> dict[str, Any]:
    """`values`, and the gradient of their sum by `hidden`."""
    values.sum().backward(retain_graph=True)
    assert hidden.grad is not None
    return {"values": values.tolist(), "gradient": hidden.grad.tolist()}


if __name__ == "__main__":
    main(sys.argv[1])

"""Records what TRL computes as the divergence of a student from its teacher, for
tests/algorithm/test_divergence.py.

    pip install trl==1.16.0    # with torch; in an environment of its own
    python benchmarks/divergence_record.py tests/algorithm/trl_divergence.json

`vocabulary`: the value at each token, and its gradient by the student's hidden states, of the
function that DistillationTrainer's loss applies to hidden states and heads. `buckets`: the same
divergence over the teacher's likeliest tokens and a bucket of all others, by the functions of
SDFTTrainer's loss, in float64. (SDFTTrainer itself takes the student's likeliest tokens.)
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import torch
from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE, TOP_K = 5, 40, 6, 7
TEMPERATURE = 0.8


def main(target: str) -> None:
    torch.manual_seed(0)
    student_hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE)
    student_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    teacher_hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE + 2)
    teacher_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE + 2)
    vocabulary: list[dict[str, Any]] = []
    buckets: list[dict[str, Any]] = []
    for beta in BETAS:
        hidden = student_hidden.clone().requires_grad_()
        values, _ = ChunkedDivergenceFunction.apply(
            hidden, student_head, None, teacher_hidden, teacher_head, None, beta, TEMPERATURE
        )
        values.sum().backward()
        assert hidden.grad is not None
        vocabulary.append(
            {"beta": beta, "values": values.tolist(), "gradient": hidden.grad.tolist()}
        )
        hidden = student_hidden.double().requires_grad_()
        scores = hidden @ student_head.double().T / TEMPERATURE
        their_scores = teacher_hidden.double() @ teacher_head.double().T / TEMPERATURE
        logprobs = scores.log_softmax(-1)
        their_logprobs = their_scores.log_softmax(-1)
        top = their_logprobs.topk(TOP_K)
        values = compute_divergence(
            add_tail_bucket(logprobs.gather(-1, top.indices)), add_tail_bucket(top.values), beta
        )
        values.sum().backward()
        assert hidden.grad is not None
        buckets.append({"beta": beta, "values": values.tolist(), "gradient": hidden.grad.tolist()})
    record = {
        "versions": {"trl": version("trl"), "torch": torch.__version__},
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "student": {"hidden": student_hidden.tolist(), "head": student_head.tolist()},
        "teacher": {"hidden": teacher_hidden.tolist(), "head": teacher_head.tolist()},
        "vocabulary": vocabulary,
        "buckets": buckets,
    }
    with open(target, "w") as file:
        json.dump(record, file)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])

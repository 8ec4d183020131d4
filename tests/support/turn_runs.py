"""Whole runs whose rollouts have turns: a tiny model that ends turns often, and an environment that
it plays with.

What a random model samples is no tool call: `calling` reads one from every turn whose ids have an
odd sum."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_models import CHATS, write_chat_tokenizer
from tiny_models import write_model
from tiny_runs import Workshop

from shoal.chat.tool_calls import ToolCall
from shoal.chat.turns import TurnFormat

BOARD = '''
class Board:
    """Deterministic: its words follow from its row and from what it was asked before."""

    def reset(self, answer: str, **columns) -> str | None:
        self.row, self.asked = int(answer), 0
        return f" {self.row % 2}" if self.row % 3 == 0 else None

    def look(self, number: int) -> str:
        """Looks.

        Args:
            number: Where.
        """
        self.asked += 1
        if number % 5 == 0:
            raise ValueError("nothing to see")
        return str((number + self.row) % 9) * (1 + number % 3)

    def respond(self, message: str) -> str | None:
        self.asked += 1
        return None if len(message) % 7 == 0 else f"no {self.asked}"

    def get_reward(self) -> float:
        return self.asked / 10


def own(completions, environments, **columns):
    """What the model said, and what the environment counted."""
    return [sum(len(message["content"]) % 5 for message in one if message["role"] == "assistant")
            + environment.asked
            for one, environment in zip(completions, environments)]
'''


class TurnWorkshop(Workshop):
    """Runs of at most six turns. `family`: the chat form; the model is the same tiny one."""

    def __init__(self, folder: Path, source: str = BOARD, family: str = "qwen3") -> None:
        self.folder, self.model, self.runs = folder, folder / "model", folder / "runs"
        self.model.mkdir()
        write_chat_tokenizer(self.model, family)
        tokenizer = tokenizers.Tokenizer.from_file(str(self.model / "tokenizer.json"))
        write_model(
            self.model, "qwen3", 0, vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1
        )
        ends = [tokenizer.token_to_id(text) for text in CHATS[family].eos]
        self.ends = [*ends, *range(100, 256, 4)]
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": self.ends}))
        self.data, self.acts = folder / "rows.jsonl", folder / "acts.py"
        self.data.write_text(
            "".join(
                json.dumps(
                    {
                        "prompt": [{"role": "user", "content": f"Row {10 + i}"}],
                        "answer": str(10 + i),
                    }
                )
                + "\n"
                for i in range(40)
            )
        )
        self.acts.write_text(source)

    def words(self, name: str, *changes: str) -> list[str]:
        return [
            "train",
            f"model={self.model}",
            "task=custom",
            f"task.path={self.data}",
            "task.num_eval_questions=4",
            f"environment={self.acts}:Board",
            f"reward={self.acts}:own",
            f"base_output_directory={self.runs}",
            f"run_name={name}",
            "steps=3",
            "train.max_staleness=1",
            "train.evaluate_every=-1",
            "train.pass_k=0",
            "environment.max_turns=6",
            "sampling.max_prompt_tokens=192",
            "sampling.max_completion_tokens=160",
            "sampling.temperature=3",
            "batch.prompts_per_step=2",
            "batch.group_size=4",
            "batch.micro_tokens=512",
            "algorithm.kl_coef=0",
            "optimizer.lr=1e-2",
            "optimizer.warmup_steps=0",
            "reward.workers=0",
            *changes,
        ]


def calling(patch: pytest.MonkeyPatch) -> None:
    """Tools are called, and left out of prompts, which they would make 20 times as long."""
    read = TurnFormat.read

    def calls(self: TurnFormat, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        message, _ = read(self, ids)
        called = [ToolCall("look", {"number": sum(ids)})] if sum(ids) % 2 else []
        return message, called

    patch.setattr(TurnFormat, "read", calls)

    def encode_prompt(self, prompt):
        return self._tokenizer.encode_prompt(prompt)

    patch.setattr(TurnFormat, "encode_prompt", encode_prompt)

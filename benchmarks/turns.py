"""How full are the sampler's places while tools take their time?

    python benchmarks/turns.py [--places 16] [--factor 4] [--turns 8] [--seconds 1.0] [--groups 24]
                               [--tokens 60]

Rollouts of `--turns` turns, `--factor` times as many in flight as there are places, whose tools
sleep for a lognormal time around `--seconds` (sigma 1). The engine, its host in a thread, the fleet
and the player are the program's own, on a random model; sessions are replaced by a clock. `full` is
the share of places that sample, over the seconds in which more rollouts are under way than there
are places; `twice` counts prompts that were computed a second time.
"""

from __future__ import annotations

import argparse
import heapq
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np

from shoal.chat.tool_calls import ToolCall
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import EnvironmentSection
from shoal.mesh import make_roles
from shoal.model.architecture import Architecture
from shoal.model.parameters import initialise
from shoal.model.transformer import Model
from shoal.protocols import GroupRequest
from shoal.records import Example, Purpose, RewardFunction, SamplingParams
from shoal.rewards.pool import RewardPool
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import GroupRewards, RolloutState
from shoal.rollout.turn_driver import TurnDriver
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.weights.store import MemoryStore
from shoal.workers.sessions import Reply

MODEL = Architecture(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1024,
    qk_norm=True,
)
GROUP = 4


class SleepingTools:
    """Sessions whose calls take a lognormal time and no work."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rng, self.due = (
            seconds,
            np.random.default_rng(0),
            list[tuple[float, int, Reply]](),
        )
        self.count = 0

    def kind_of(self, columns: Mapping[str, Any]) -> None:
        return None

    def _later(self, seconds: float, reply: Reply) -> None:
        self.count += 1
        heapq.heappush(self.due, (time.monotonic() + seconds, self.count, reply))

    def open(self, rollout: Hashable, columns: Mapping[str, Any]) -> None:
        self._later(0.0, Reply(rollout, "open"))

    def call(self, rollout: Hashable, name: str, arguments: Mapping[str, Any]) -> None:
        self._later(self.seconds * float(self.rng.lognormal()), Reply(rollout, "call", name, "42"))

    def end(self, rollout: Hashable) -> None:
        self._later(0.0, Reply(rollout, "end", value={"reward": None, "state": {}}))

    def collect(self, seconds: float = 0.0) -> list[Reply]:
        now, found = time.monotonic(), []
        while self.due and self.due[0][0] <= now:
            found.append(heapq.heappop(self.due)[2])
        return found


class Format:
    """Every turn calls the tool; its answer is 16 tokens."""

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        return {"role": "assistant", "content": ""}, [ToolCall("tool", {})]

    def encode_context(
        self, messages: Sequence[Any], calls: Sequence[ToolCall] = (), last: int | None = None
    ) -> list[int]:
        return [5] * 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, value in (
        ("places", 16),
        ("factor", 4),
        ("turns", 8),
        ("seconds", 1.0),
        ("groups", 24),
        ("tokens", 60),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    a = parser.parse_args()
    limit = a.turns * (4 * a.tokens + 16)
    model = Model(MODEL, make_roles(MeshSection(), jax.devices()[:1]).sampler)
    engine = Engine(
        model,
        slots=a.places,
        siblings_per_row=1,
        group_size=GROUP,
        max_prompt_tokens=64,
        max_completion_tokens=limit,
        eos_ids=range(0, MODEL.vocab_size, a.tokens),
    )
    prompts = []
    engine.programs["prefill"] = _counting(engine.programs["prefill"], engine.num_rows, prompts)
    woken, tools = threading.Event(), SleepingTools(a.seconds)
    player = TurnDriver(
        tools,
        lambda columns: Format(),
        EnvironmentSection(max_turns=a.turns),
        64,  # type: ignore[arg-type]
        most=a.factor * a.places,
    )
    host = ThreadHost(
        EngineHost(lambda purpose, size: engine, capacity=a.factor * a.places), woken.set, "sampler"
    )
    none = RewardFunction(
        "none", lambda completions, **_: [0.0] * len(completions), runs_in_process=True
    )
    task = Task("turns", rewards=(none,))
    rewards = GroupRewards(task, RewardPool(task.rewards, RewardSection(workers=0)), lambda ids: "")
    with closing(
        Fleet(
            MemoryStore(model),
            {"sampler": host},
            rewards,
            0,
            in_background=True,
            woken=woken,
            turn_driver=player,
        )
    ) as fleet:
        fleet.publish(0, initialise(MODEL, 0, make_roles(MeshSection(), jax.devices()[:1]).trainer))
        fleet.request(
            [
                GroupRequest(
                    Purpose.TRAIN,
                    0,
                    0,
                    Example(row, "q"),
                    np.arange(1, 40, dtype=np.int32),
                    GROUP,
                    SamplingParams(max_tokens=limit),
                )
                for row in range(a.groups)
            ]
        )
        while not player.rollouts:
            time.sleep(0.01)
        while host.progress().dispatches < 3:  # compiled
            time.sleep(0.1)
        first, began = host.progress(), time.monotonic()
        last, ended = first, began
        # Measured while there is more to sample than places.
        while _num_acting(player) + a.places < a.groups * GROUP and len(player.rollouts) > a.places:
            last, ended = host.progress(), time.monotonic()
            time.sleep(0.05)
        groups = fleet.take(Purpose.TRAIN, 0)
    if ended == began:
        raise SystemExit("all rollouts fitted the places at once: give more --groups")
    drawn = last.counters["active_slots"] - first.counters["active_slots"]
    places = last.counters["total_slots"] - first.counters["total_slots"]
    busy = (last.busy_seconds - first.busy_seconds) / (ended - began)
    tokens = sum(one.num_sampled for group in groups for one in group.completions)
    turns = np.mean([len(one.messages) / 2 for group in groups for one in group.completions])
    print(
        f"places {a.places}, rollouts in flight {a.factor * a.places}, turns {turns:.1f}, tokens a "
        f"turn "
        f"{tokens / (a.groups * GROUP * turns):.0f}, tools {a.seconds:g} s\n"
        f"full {busy * drawn / places:.0%} of {ended - began:.0f} s (busy {busy:.0%}, places that "
        f"sample then "
        f"{drawn / places:.0%}); twice {len(prompts) - a.groups}"
    )


def _num_acting(player: TurnDriver) -> int:
    """Returns the number of rollouts whose tools or environments are at work."""
    states = [rollout.state for rollout in list(player.rollouts.values())]
    return states.count(RolloutState.ACTING)


def _counting(program: Any, rows: int, prompts: list[int]) -> Any:
    def call(*args: Any, **arrays: Any) -> Any:
        prompts.extend(arrays["length"][arrays["new_rows"].rows < rows].tolist())
        return program(*args, **arrays)

    return call


if __name__ == "__main__":
    main()

"""Reads what tests cost from files that conftest.py writes (CPU_SECONDS), and keeps the fast tier
fast.

    python tests/support/cpu_seconds.py FILE

prints the seconds of each tier and the most expensive tests, and ends with exit 1 where a test of
the fast tier takes more than 5 s of CPU or was skipped: what README's command does not install is
for the other tiers.

The seconds of one test differ from run to run, by the load of the machine and by which test was the
first to need a program: a test that takes more is run once more, alone and with an empty
compilation cache, and the less of both counts. A fixture that the tests of a file share has a line
of its own and counts in its tier alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 5.0
"""CPU seconds, of the process and those that it starts and waits for, above which a test needs a
mark."""
NUM_SHOWN = 10


@dataclass(frozen=True)
class Cost:
    """What a test took."""

    cpu_seconds: float
    wall_seconds: float
    tier: str
    outcome: str
    test: str

    @property
    def is_fixture(self) -> bool:
        return ": fixture " in self.test


def read_costs(file: Path) -> list[Cost]:
    costs = []
    for line in file.read_text(encoding="utf-8").splitlines():
        user, system, wall, tier, outcome, test = line.split("\t", 5)
        costs.append(Cost(float(user) + float(system), float(wall), tier, outcome, test))
    return costs


def too_expensive(costs: Sequence[Cost]) -> list[Cost]:
    """Tests of the fast tier above the bound, by the least that each took."""
    least: dict[str, Cost] = {}
    for cost in costs:
        known = least.get(cost.test)
        if known is None or cost.cpu_seconds < known.cpu_seconds:
            least[cost.test] = cost
    result = []
    for cost in least.values():
        if cost.tier == "fast" and cost.cpu_seconds > MOST_SECONDS and not cost.is_fixture:
            result.append(cost)
    return result


def summary(costs: Sequence[Cost]) -> list[str]:
    """A line for each tier, and one for each of the most expensive tests."""
    lines = []
    for tier in ("fast", "slow", "system"):
        own = [cost for cost in costs if cost.tier == tier]
        cpu_seconds = sum(cost.cpu_seconds for cost in own)
        wall_seconds = sum(cost.wall_seconds for cost in own)
        num_tests = sum(not cost.is_fixture for cost in own)
        lines.append(
            f"{tier:6}  {num_tests:5} tests  {cpu_seconds:6.0f} s of CPU  {wall_seconds:6.0f} s "
            "one by one"
        )
    dearest = sorted(costs, key=lambda cost: cost.cpu_seconds, reverse=True)
    lines += [
        f"{cost.cpu_seconds:6.1f} s  {cost.tier:6}  {cost.test}" for cost in dearest[:NUM_SHOWN]
    ]
    return lines


def run_again(costs: Sequence[Cost], file: Path) -> None:
    """Appends to the file what the tests take alone, from an empty compilation cache."""
    with tempfile.TemporaryDirectory() as cache:
        for cost in costs:
            environment = os.environ | {"CPU_SECONDS": str(file), "TEST_COMPILATION_CACHE": cache}
            subprocess.run(
                [sys.executable, "-m", "pytest", "-n", "0", cost.test], env=environment, check=True
            )


def main(file: Path) -> int:
    costs = read_costs(file)
    print(*summary(costs), sep="\n")
    wrong = []
    for cost in costs:
        if cost.tier == "fast" and cost.outcome == "skipped":
            wrong.append(
                f"{cost.test} was skipped: what it needs is for the tier `slow` or `system` "
                "(CONTRIBUTING.md)"
            )
    doubtful = too_expensive(costs)
    if doubtful:
        run_again(doubtful, file)
        for cost in too_expensive(read_costs(file)):
            wrong.append(
                f"{cost.test} takes {cost.cpu_seconds:.1f} s of CPU: above {MOST_SECONDS:g} s a "
                "test needs the mark `slow` or `system` (CONTRIBUTING.md)"
            )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

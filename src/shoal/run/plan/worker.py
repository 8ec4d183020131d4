"""A process that compiles for devices that are not here: a request a line comes in, an answer a line goes out.

    {"config": {...}, "topology": "v5p-8", "program": "decode", "layers": 2}  ->  {"found": {...}} or {"error": "..."}

Its own process, because a compiler's settings stand in the environment, and JAX takes one backend for good.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.config.values import build, convert_value
from shoal.types import ShoalError
from shoal.workers.process import KILL_WITH_PARENT, limit_memory, prctl

if TYPE_CHECKING:
    from shoal.run.plan.job import Job


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one program, or of the job where the request names none."""
    from shoal.run.plan.analysis import analyse

    job = _job(json.dumps(request["config"]), request["topology"], request["layers"])
    return analyse(job, request["program"]) if request["program"] else job.describe()


@lru_cache(4)
def _job(config: str, topology: str, layers: int) -> Job:
    from shoal.run.plan.job import Job

    keys = keys_of(Config)
    values = {name: convert_value(keys[name], value) for name, value in json.loads(config).items()}
    return Job(build(Config, values), topology, layers)


def main() -> None:
    prctl(KILL_WITH_PARENT, signal.SIGKILL)
    limit_memory(0)  # no limit, but the first to go where memory ends
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        try:
            found: dict[str, Any] = {"found": answer(json.loads(line))}
        except ShoalError as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"fault": f"{type(error).__name__}: {str(error)[:2000]}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main()

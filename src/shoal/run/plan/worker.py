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
    from shoal.run.plan.job import PlannedJob


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one program; the job's where the request names none; advice where it brings all figures."""
    from shoal.run.advice import advise
    from shoal.run.figures import Figures
    from shoal.run.plan.analysis import analyse
    from shoal.run.plan.job import PlannedJob

    config, topology = json.dumps(request["config"]), request["topology"]
    if "figures" in request:
        return advise(Figures(_config(config), **request["figures"]), 
                      lambda other: PlannedJob(other, topology).describe())
    job = _job(config, topology, request["layers"])
    return analyse(job, request["program"]) if request["program"] else job.describe()


def _config(text: str) -> Config:
    keys = keys_of(Config)
    return build(Config, {name: convert_value(keys[name], value) for name, value in json.loads(text).items()})


@lru_cache(4)
def _job(config: str, topology: str, layers: int) -> PlannedJob:
    from shoal.run.plan.job import PlannedJob

    return PlannedJob(_config(config), topology, layers)


def reply(line: str) -> dict[str, Any]:
    """The answer to a line, or what is wrong with it. SystemExit where this process has no memory for it."""
    try:
        return {"found": answer(json.loads(line))}
    except ShoalError as error:
        return {"error": str(error)}
    except MemoryError:
        raise SystemExit("out of memory") from None
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {str(error)[:2000]}"}


def main() -> None:
    prctl(KILL_WITH_PARENT, signal.SIGKILL)
    limit_memory(0)  # no limit, but the first to go where memory ends
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        out.write(json.dumps(reply(line)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()

"""The hosts of a run or a command: which engines sample where."""

from __future__ import annotations

from collections.abc import Callable

from shoal.config.schema import Config
from shoal.mesh import Roles
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Model
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost
from shoal.rollout.judge import Judge
from shoal.rollout.publish import MemoryChannel
from shoal.run.engines import training_engine_maker
from shoal.sampler.engine import Engine
from shoal.types import Purpose, StopSignal

HERE = "here"
"""The host in the caller's thread."""


def local_fleet(model: Model, make_engine: Callable[[Purpose, int], Engine], judge: Judge, seed: int,
                on_progress: Callable[[str, int, int], None] | None = None, stop: StopSignal | None = None) -> Fleet:
    """One host, in the caller's thread. `model` is the sampler's, on all of its devices."""
    channel = MemoryChannel(model, {HERE: model.on(model.role.local)})
    return Fleet(channel, {HERE: EngineHost(make_engine)}, judge, seed, stop=stop or StopSignal(),
                 on_progress=on_progress)


def training_fleet(config: Config, model: Model, roles: Roles, tokenizer: Tokenizer, judge: Judge, stop: StopSignal,
                   on_progress: Callable[[str, int, int], None]) -> Fleet:
    """The hosts of a training run in this process."""
    make = training_engine_maker(config, model, roles, tokenizer)
    return local_fleet(model.on(roles.sampler), make, judge, config.seed, on_progress, stop)

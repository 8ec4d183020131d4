"""Each protocol of `types` has an implementation with exactly its members: same parameters, same kinds of defaults.

The assignments under TYPE_CHECKING are checked by pyright, the signatures here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from shoal import types
from shoal.config.algorithm_parts import ADVANTAGES, POLICY_LOSSES
from shoal.rollout.source import LocalSource
from shoal.sampler.engine import Engine
from shoal.trainer.step import ModelScorer, ParameterScorer

if TYPE_CHECKING:
    from typing import cast

    SAMPLER: types.Sampler = cast(Engine, None)
    SOURCE: types.RolloutSource = cast(LocalSource, None)
    SCORERS: tuple[types.Scorer, types.Scorer] = cast(tuple[ParameterScorer, ModelScorer], None)

PAIRS = [(types.Sampler, Engine), (types.RolloutSource, LocalSource), (types.Scorer, ParameterScorer),
         (types.Scorer, ModelScorer)]


def parameters(function: Callable) -> list[tuple[str, object]]:
    """Names in order, with their defaults."""
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("protocol", "implementation"), PAIRS)
def test_an_implementation_has_the_members_of_its_protocol(protocol, implementation):
    members = [name for name in vars(protocol) if not name.startswith("_")]
    assert members
    for name in members:
        assert parameters(getattr(implementation, name)) == parameters(getattr(protocol, name)), name


def test_every_protocol_has_an_implementation():
    classes = [value for value in vars(types).values() if inspect.isclass(value)]
    protocols = {one.__name__ for one in classes if getattr(one, "_is_protocol", False)} - {"Protocol"}
    assert protocols == {protocol.__name__ for protocol, _ in PAIRS}


@pytest.mark.parametrize("functions", [POLICY_LOSSES, ADVANTAGES])
def test_the_functions_of_a_registry_share_their_first_parameters(functions):
    """Losses have one signature; advantages share two arrays and take settings by name."""
    first = [[name for name, _ in parameters(part.load())] for part in functions.values()]
    if functions is POLICY_LOSSES:
        assert all(names[:5] == first[0][:5] for names in first)
    assert {tuple(names[:2]) for names in first} == {tuple(first[0][:2])}

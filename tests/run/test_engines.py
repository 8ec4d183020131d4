"""How many completions a run samples at once, in which rows, within which memory; and by how many engines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pods import tpu
from small import PLAINEST, roles

from shoal.config.schema import BatchSection, Config, MeshSection, ModelSection, SamplingSection
from shoal.mesh import make_roles
from shoal.model.names import model_named
from shoal.model.transformer import Model
from shoal.run.engines import choose_places, places_text, sampling_engine_maker, training_places
from shoal.run.sampler_size import run_roles
from shoal.types import Purpose, ShoalError

TOKENIZER: Any = SimpleNamespace(eos_ids=(0,), decode=None)


def sampling(prompt: int = 64, completion: int = 512, **changes: int) -> SamplingSection:
    return SamplingSection(max_prompt_tokens=prompt, max_completion_tokens=completion, **changes)


@pytest.mark.parametrize(("section", "slots", "completions", "places"), [
    (sampling(), 64, 64, (64, 8)),  # nothing waits
    (sampling(), 64, 65, (64, 1)),
    (sampling(256, 64), 64, 512, (64, 4)),  # of each row's 512 keys half are the prompt's
    (sampling(2048, 128), 64, 512, (64, 8)),
    (sampling(siblings_per_row=2), 64, 64, (64, 2)),
    (sampling(siblings_per_row=16), 64, 640, (64, 8)),
    (sampling(cache_tokens=4160 * 3), 64, 64, (21, 1)),  # three rows of 64 + 8 x 512 keys would hold 24 of 64
    (sampling(cache_tokens=4160 * 8), 64, 64, (64, 8)),
    (sampling(cache_tokens=576), 64, 64, (1, 1)),
    (sampling(cache_tokens=1100, siblings_per_row=2), 64, 64, (2, 2)),
])
def test_places_are_as_many_as_asked_or_as_the_caches_hold(section, slots, completions, places):
    assert choose_places(section, roles().sampler, slots, 8, completions)[:2] == places


def test_caches_are_counted_by_device_and_divided_by_replica():
    where = make_roles(MeshSection(2, 2, 2)).sampler  # 8 devices, 4 replicas of 2
    assert choose_places(sampling(cache_tokens=600), where, 64, 8, 512)[:2] == (8, 1)  # 4800 tokens, 576 a row
    assert choose_places(sampling(cache_tokens=288), where, 64, 8, 512)[:2] == (4, 1)
    with pytest.raises(ShoalError, match="use at least 288"):
        choose_places(sampling(cache_tokens=287), where, 64, 8, 512)


@pytest.mark.parametrize(("siblings", "least", "what"), [
    (0, 576, "a completion"), (1, 576, "a completion"), (4, 2112, "4 completions")])
def test_caches_too_small_for_one_row_name_the_least(siblings, least, what):
    section = sampling(siblings_per_row=siblings, cache_tokens=least - 1)
    with pytest.raises(ShoalError, match=rf"sampling.cache_tokens={least - 1} has no room for a prompt and {what} of "
                                         rf"the longest; use at least {least}, or lower"):
        choose_places(section, roles().sampler, 64, 8, 64)
    assert choose_places(replace(section, cache_tokens=least), roles().sampler, 64, 8, 64).slots == (siblings or 1)


def test_one_engine_serves_all_sizes_that_fill_its_rows():
    def made(**changes: int) -> list[int]:
        make = sampling_engine_maker(Model(PLAINEST, roles().sampler), TOKENIZER, sampling(**changes), 64, 8)
        engines = [make(Purpose.TRAIN, 8), make(Purpose.EVALUATE, 1), make(Purpose.EVALUATE, 4),
                   make(Purpose.EVALUATE, 16)]
        assert all(engine.num_rows * engine.siblings == 64 for engine in engines)
        return [engines.index(engine) for engine in engines]

    assert made() == [0, 0, 0, 0]
    assert made(siblings_per_row=4) == [0, 1, 0, 0]
    assert made(siblings_per_row=8) == [0, 1, 2, 0]


def test_every_engine_stays_within_the_caches():
    """Greedy answers have rows of their own, each with a prompt's keys: there is room for fewer."""
    caches = sampling(512, 512, cache_tokens=4608 * 2, siblings_per_row=8)
    make = sampling_engine_maker(Model(PLAINEST, roles().sampler), TOKENIZER, caches, 16, 8)
    training, greedy = make(Purpose.TRAIN, 8), make(Purpose.EVALUATE, 1)
    assert (training.num_rows, training.siblings) == (2, 8) and (greedy.num_rows, greedy.siblings) == (9, 1)


def test_on_an_accelerator_a_step_that_does_not_fit_is_sampled_in_parts():
    """8B on 8 chips of 31 GiB: 12 GB of masters and moments and 8 of weights leave some 8 of each."""
    config = Config(model=ModelSection(dtype="bfloat16"), mesh=MeshSection(fsdp=8),
                    sampling=sampling(256, 1024), batch=BatchSection(64, 8))
    a, devices = model_named("llama3.1-8b").architecture, tpu("v6e", 2, 4)
    made = run_roles(config, a, devices)
    places = training_places(config, made, a)
    assert places.siblings == 1 and 100 < places.slots < 512
    assert places_text(config, made, a) == f"{places.slots} completions at once, each in a row of its own"
    short = replace(config, sampling=sampling(64, 64))
    assert training_places(short, made, a)[:2] == (512, 8) and places_text(short, made, a) == ""

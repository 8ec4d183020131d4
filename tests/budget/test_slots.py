"""How many completions a run samples at once, in which rows, within which memory; and by how many
engines."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pods import tpu
from small import DELTA_NET, HYBRID, PLAINEST, QWEN3, SHARED_KEYS, WINDOWED, roles

from shoal.budget.auto import free_cache_bytes, run_roles
from shoal.budget.memory import (
    CacheBytes,
    activation_bytes,
    active_parameter_count,
    bytes_per_device,
    cache_bytes,
    input_bytes,
    param_shapes,
    parameter_count,
    sampler_items,
    update_bytes,
)
from shoal.budget.slots import (
    KVCacheBudget,
    SlotPlan,
    all_slots,
    engine_states,
    plan_slots,
    slots_text,
    training_slots,
)
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection, SamplerSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.sampling import EvaluationSection, SamplingSection
from shoal.config.stored import texts_of
from shoal.config.train import Config
from shoal.job.hosts import engine_maker, run_engines, sampling_engine_maker
from shoal.job.job import Job
from shoal.mesh import Role, make_roles
from shoal.model.architecture import Adapter, Architecture, DeltaNet, Experts, Layer
from shoal.model.layers import published_specs
from shoal.model.parameters import initialise, param_specs
from shoal.model.passes import PackedRows
from shoal.model.published import model_named
from shoal.model.transformer import Model, forward
from shoal.records import Purpose, ShoalError
from shoal.report.console import Console
from shoal.runs.reader import read_decisions
from shoal.runs.writer import RunWriter

MODEL = Model(PLAINEST, roles().sampler)
TOKEN = 2 * 4 * 4 * 8 * 4  # bytes of a token's keys and values: layers, heads, dimensions, float32
TOKENIZER: Any = SimpleNamespace(eos_ids=(0,), decode=None)


def sampling(prompt: int = 64, completion: int = 512, **changes: int) -> SamplingSection:
    return SamplingSection(max_prompt_tokens=prompt, max_completion_tokens=completion, **changes)


@pytest.mark.parametrize(
    ("section", "slots", "completions", "places"),
    [
        (sampling(), 64, 64, (64, 8)),  # nothing waits
        (sampling(), 64, 65, (64, 1)),
        (sampling(256, 64), 64, 512, (64, 4)),  # of each row's 512 keys half are the prompt's
        (sampling(2048, 128), 64, 512, (64, 8)),
    ],
)
def test_places_are_as_many_as_asked(section, slots, completions, places):
    assert plan_slots(section, MODEL, slots, 8, completions)[:2] == places


@pytest.mark.parametrize(
    ("tokens", "places"),
    [
        (4160 * 3, (21, 1)),  # three rows of 64 + 8 x 512 keys would hold 24 of 64
        (4160 * 8, (64, 8)),
        (576, (1, 1)),
        (1, (1, 1)),
    ],
)
def test_places_are_as_many_as_the_caches_hold(tokens, places):
    assert plan_slots(sampling(), MODEL, 64, 8, 64, tokens * TOKEN)[:2] == places


def test_caches_are_divided_by_replica():
    where = make_roles(MeshSection(2, 2, 2)).sampler  # 8 devices, 4 replicas of 2
    # 576 a row, on two devices
    row = 576 * TOKEN // 2
    assert plan_slots(sampling(), Model(PLAINEST, where), 64, 8, 512, 2 * row)[:2] == (8, 1)
    assert plan_slots(sampling(), Model(PLAINEST, where), 64, 8, 512, row)[:2] == (4, 1)


def test_one_engine_serves_all_sizes_that_fill_its_rows():
    def made(completion: int) -> list[int]:
        make = sampling_engine_maker(
            Model(PLAINEST, roles().sampler), TOKENIZER, sampling(256, completion), 64, 8
        )
        engines = [
            make(Purpose.TRAIN, 8),
            make(Purpose.EVALUATE, 1),
            make(Purpose.EVALUATE, 4),
            make(Purpose.EVALUATE, 16),
        ]
        for engine in engines:
            assert engine.num_rows * engine.siblings == 64
        return [engines.index(engine) for engine in engines]

    assert made(512) == [0, 0, 0, 0]
    assert made(64) == [0, 1, 0, 0]  # four siblings a row


def test_evaluations_that_alone_truncate_have_an_engine_of_their_own():
    places = plan_slots(sampling(256, 64), MODEL, 64, 8, 64, 0)
    model = Model(PLAINEST, roles().sampler)
    for truncates in (False, True):
        make = engine_maker(
            model, TOKENIZER, sampling(256, 64), places, 8, evaluation_truncated=truncates
        )
        training, answers = make(Purpose.TRAIN, 8), make(Purpose.EVALUATE, 8)
        assert (training is answers) == (not truncates)
        assert (training.truncated, answers.truncated) == (False, truncates)
        assert make(Purpose.EVALUATE, 8) is answers


def test_every_engine_stays_within_the_caches():
    """Greedy answers have rows of their own, each with a prompt's keys: there is room for fewer."""
    places = plan_slots(sampling(512, 512), MODEL, 16, 8, 16, 4608 * 2 * TOKEN)
    make = engine_maker(Model(PLAINEST, roles().sampler), TOKENIZER, sampling(512, 512), places, 8)
    training, greedy = make(Purpose.TRAIN, 8), make(Purpose.EVALUATE, 1)
    assert (training.num_rows, training.siblings) == (2, 8) and (
        greedy.num_rows,
        greedy.siblings,
    ) == (9, 1)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_the_shapes_of_engines_are_known_without_them(num_kv_heads):
    """Also where two devices share a key/value head: of 300 and 100 tokens each caches a half, in
    blocks of 64."""
    answers = {}
    if num_kv_heads == 1:
        answers = {"evaluation": EvaluationSection(3, 0.6, top_p=0.9)}
    config = Config(sampling=sampling(300, 100), batch=BatchSection(4, 6), **answers)
    made = make_roles(MeshSection(fsdp=4, tensor=2))
    a = replace(PLAINEST, num_kv_heads=num_kv_heads)
    model = Model(a, made.trainer)
    states = dict(engine_states(config, model, made, a))
    engines = dict(run_engines(config, model, made, TOKENIZER))
    assert states == {name: engine.state_shapes() for name, engine in engines.items()} and len(
        states
    ) == (2 if answers else 3)
    cache: Any = states["training"].caches[0]
    parts = model.key_parts
    assert parts == 3 - num_kv_heads
    num_rows, siblings = cache.of_slots[0].shape[:2]
    rows = num_rows // 4
    prompt = cache.prefix_v.shape[-2] * parts
    if parts > 1:
        own = cache.own_v.shape[-2] * parts
    else:  # one device has all positions of a head: a CPU has them in chunks
        own = sum(chunk.shape[-2] for chunk in cache.own_v)
    # of two devices
    token = TOKEN * num_kv_heads // PLAINEST.num_kv_heads // 2
    assert bytes_per_device(states["training"].caches) == rows * (prompt + siblings * own) * token


def test_on_an_accelerator_a_step_that_does_not_fit_is_sampled_in_parts():
    """8B on 8 chips of 31 GiB: 12 GB of masters and moments and 8 of weights leave some 8 of
    each."""
    config = Config(
        model=ModelSection(dtype="bfloat16"),
        mesh=MeshSection(fsdp=8),
        sampling=sampling(256, 1024),
        batch=BatchSection(64, 8),
    )
    a, devices = model_named("llama3.1-8b").architecture, tpu("v6e", 2, 4)
    made = run_roles(config, a, devices)
    places = training_slots(config, made, a)
    assert places.siblings == 1 and 100 < places.slots < 512
    assert (
        slots_text(config, made, a)
        == f"{places.slots} completions at once, each in a row of its own"
    )
    assert all_slots(config, made, a) == places.slots * len(made.hosts)
    # As many rollouts as one worker has places would leave the others idle.
    remote = replace(config, sampler=SamplerSection(kind="ray", workers=3))
    assert all_slots(remote, made, a) == 3 * training_slots(remote, made, a).slots
    half = replace(config, sampling=replace(config.sampling, memory_share=0.7))
    assert training_slots(half, made, a).slots < places.slots
    short = replace(config, sampling=sampling(64, 64))
    assert training_slots(short, made, a)[:2] == (512, 8) and slots_text(short, made, a) == ""


def test_places_by_the_mean_length_of_completions_share_a_pool():
    """8B on 8 v6e, completions of up to 16 thousand tokens: of a quarter of that in the mean."""
    config = Config(
        model=ModelSection(dtype="bfloat16"),
        mesh=MeshSection(fsdp=8, sampler_tensor=2),
        sampling=sampling(1024, 16384),
        batch=BatchSection(64, 8),
    )
    a, devices = model_named("llama3.1-8b").architecture, tpu("v6e", 2, 4)
    made = run_roles(config, a, devices)
    whole, shards = training_slots(config, made, a), made.hosts[0].row_shards
    by_mean = replace(config, sampling=replace(config.sampling, mean_completion_tokens=4096))
    many = training_slots(by_mean, made, a)
    assert 3 * whole.slots < many.slots < 4 * whole.slots and many.siblings == 1
    assert whole.room.pages(whole.slots, 1) == whole.slots // shards * 128  # nothing gives way
    pages = many.room.pages(many.slots, 1)
    assert many.slots // shards * 32 <= pages < many.slots // shards * 128
    model = Model(a, made.trainer, jnp.bfloat16)
    for some, places in ((config, whole), (by_mean, many)):
        caches = dict(engine_states(some, model, made, a))["training"].caches
        keys = places.slots // shards * 1024 + 128 * places.room.pages(places.slots, 1)
        # layers, heads on two devices, dimensions, bfloat16
        used = keys * 2 * 32 * (8 // 2) * 128 * 2
        assert bytes_per_device(caches) == used <= places.room.bytes < 1.4 * used


def test_a_row_has_room_for_its_limits_whatever_the_mean():
    """Of 40 pages rows of 8 siblings at 8 each would take 64."""
    by_pages = CacheBytes(row=10, slot=0, page=10)
    room = KVCacheBudget(128, 128, 1024, by_pages, 400, 1)
    assert room.slots(64, 8) == 0 and room.slots(64, 4) == 32 and room.pages(28, 4) == 33
    assert room._replace(bytes=0).pages(64, 8) == 64
    assert room._replace(of_caches=CacheBytes(10, 80)).pages(28, 4) == 0


@pytest.mark.parametrize("a", [HYBRID, WINDOWED, PLAINEST], ids=["hybrid", "windowed", "plain"])
@pytest.mark.parametrize(("kind", "mean"), [("v6e", 0), ("v6e", 128), ("h200", 0)])
def test_slots_of_any_kind_of_layers_fill_the_memory_and_no_more(a, kind, mean, monkeypatch):
    """One more row than there are would not fit. Of windows a slot holds as many keys, of a delta
    net a state, however long completions are."""
    devices = tpu(kind, 1, 1) if kind == "v6e" else jax.devices()[:1]
    memory = 40 << 20
    monkeypatch.setattr("shoal.budget.auto.device_memory", lambda device: memory)
    if kind == "h200":
        monkeypatch.setattr(Role, "platform", "gpu")
    a = replace(a, head_dim=64)  # heads that a kernel reads by pages
    config = Config(
        model=ModelSection(dtype="bfloat16"),
        mesh=MeshSection(),
        sampling=sampling(256, 1024, mean_completion_tokens=mean),
        batch=BatchSection(512, 4),
    )
    made = make_roles(MeshSection(), devices)
    places = training_slots(config, made, a)
    states = engine_states(config, Model(a, made.trainer, jnp.bfloat16), made, a)
    caches = bytes_per_device(dict(states)["training"].caches)
    free = free_cache_bytes(config, made, a)
    row = places.room.row_bytes(places.siblings)
    assert 1 < places.slots < 2048
    assert caches <= free < caches + row + places.room.of_caches.page


def test_a_slots_state_is_bounded_whatever_its_length():
    """Of four layers three have states; of five, windows of 16 keys."""
    short, long = (cache_bytes(Model(HYBRID, roles().sampler), 256, size) for size in (256, 1024))
    keys = 2 * 2 * 8 * 4  # keys and values: heads, dimensions, float32
    assert long.slot - short.slot == 768 * keys
    state = 4 * (4 * 8 * 8 + 3 * (2 * 16 + 32))
    assert short == CacheBytes(256 * keys + 3 * state, 256 * keys + 3 * state)
    windowed = cache_bytes(Model(WINDOWED, roles().sampler), 256, 1024)
    assert windowed == CacheBytes((256 + 4 * 64) * keys, (1024 + 4 * 192) * keys)
    # Of six layers two have windows and two have all keys, twice as wide; the others have no cache.
    shared = cache_bytes(Model(SHARED_KEYS, roles().sampler), 256, 1024)
    assert shared == CacheBytes((4 * 256 + 2 * 64) * keys, (4 * 1024 + 2 * 192) * keys)


def _mixer(head_dim: int, keys: int = 2) -> int:
    """Values of a token with `attention`: queries and output of four heads, keys and values, and
    the stream."""
    return 2 * 4 * head_dim + 2 * keys * head_dim + 32


def test_what_an_update_stores_is_counted_by_kind_of_layer():
    """By hand: products' outputs, and the mixer's as wide as the stream; of attention queries,
    keys, values and its output, of a delta net what follows it alone."""
    wide, inner, queries, keys = 32, 64, 4 * 8, 2 * 8
    mlp = 2 * inner + wide
    attention = 2 * queries + 2 * keys + wide  # queries beside their gates
    delta_net = (2 * 16 + 32) + 32 + 4 + 4 + wide
    dots = 4 * (wide + mlp) + attention + 3 * delta_net
    assert activation_bytes(HYBRID, 10, jnp.float32, "dots") == 10 * 4 * dots
    kept = (2 * queries + 2 * keys + wide) + 3 * wide
    assert activation_bytes(HYBRID, 10, jnp.bfloat16, "attention") == 10 * 2 * kept
    assert activation_bytes(HYBRID, 10, jnp.bfloat16, "full") == 0
    # Of six layers the last two have no keys; each has an embedding of its own, 4 wide.
    layers = (_mixer(8), _mixer(16)) * 2 + (_mixer(8, keys=0), _mixer(16, keys=0))
    assert activation_bytes(SHARED_KEYS, 10, jnp.float32, "attention") == 10 * 4 * sum(layers)
    assert activation_bytes(SHARED_KEYS, 10, jnp.float32, "full") == 10 * 4 * 2 * 2 * (8 + 16)
    assert input_bytes(SHARED_KEYS, 10, jnp.float32) == 10 * 4 * 6 * (wide + 4)
    # Two of six experts, whose outputs are summed; the router, and the expert of every token.
    moe = replace(
        QWEN3,
        pattern=(Layer(feed_forward="experts"),),
        experts=Experts(6, 2, intermediate_size=10, shared_size=12),
    )
    experts = 2 * 2 * 10 + 6 + (2 * 12 + wide) + 1
    dots = 4 * (wide + queries + 2 * keys + wide + experts)
    assert activation_bytes(moe, 10, jnp.float32, "dots") == 10 * 4 * dots
    # The largest layer is gathered whole: all experts of it.
    role = roles().trainer
    larger = replace(moe, experts=Experts(7, 2, intermediate_size=10, shared_size=12))
    more = update_bytes(larger, role, jnp.float32, 10)
    of_expert = 3 * wide * 10 + wide  # with its column of the router
    grown = 4 * (4 * of_expert) + of_expert * (2 * 4 + 4)
    assert more - update_bytes(moe, role, jnp.float32, 10) == grown


@pytest.mark.slow
def test_the_memory_of_a_delta_net_is_that_of_the_compiled_update():
    """It was counted as twice what a GPU needs. Here, on a CPU: an eighth of the widths of
    Qwen3.5's 4B, beside what layers store, from the difference of two lengths."""
    a = Architecture(
        64, 320, 1152, 2, 2, 1, 64, pattern=(DELTA_NET,), delta_net=DeltaNet(2, 4, 128, 128)
    )
    model = Model(a, roles().trainer, remat="full")
    parameters = jax.eval_shape(lambda: initialise(a, 0, model.role))

    def temporaries(size: int) -> int:
        numbers = jax.ShapeDtypeStruct((1, size), jnp.int32)

        def total(parameters: Any, tokens: jax.Array) -> jax.Array:
            rows = PackedRows.of(model, tokens, tokens, tokens, tokens)
            hidden, _ = forward(model, parameters, tokens, tokens, rows)
            return hidden.sum()

        compiled = jax.jit(jax.grad(total)).lower(parameters, numbers).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    grown = temporaries(1024) - temporaries(512)
    estimated = update_bytes(a, model.role, jnp.float32, 1024)
    estimated -= update_bytes(a, model.role, jnp.float32, 512)
    assert 0.6 * estimated < grown < 1.1 * estimated


def test_devices_that_share_experts_hold_and_compute_their_part():
    """They gather no experts but all tokens, and keep nothing of the products of experts."""
    wide, inner, tokens, itemsize = 32, 10, 100, 4
    moe = replace(QWEN3, pattern=(Layer(feed_forward="experts"),), experts=Experts(6, 2, inner))
    gathering, sharing = roles(fsdp=2).trainer, roles(expert=2).trainer
    held = [
        bytes_per_device(param_shapes(param_specs(moe), role, jnp.float32))
        for role in (gathering, sharing)
    ]
    assert held[0] == held[1]
    others = (6 // 2) * 3 * wide * inner * (2 * itemsize + 4)
    rows = 2 * (4 * wide + 6 * inner) * itemsize * tokens  # of two experts
    more_rows = 2 * (rows + 4 * wide * itemsize * tokens) - rows
    less = update_bytes(moe, gathering, jnp.float32, tokens)
    less -= update_bytes(moe, sharing, jnp.float32, tokens)
    assert less == others - more_rows
    kept = activation_bytes(moe, tokens, jnp.float32, "dots")
    kept -= activation_bytes(moe, tokens, jnp.float32, "dots", sharing.expert)
    assert kept == 4 * 2 * 2 * inner * itemsize * tokens


def test_the_parameters_of_a_token_are_those_of_its_experts():
    moe = replace(
        QWEN3, pattern=(Layer(feed_forward="experts"),), experts=Experts(6, 2, intermediate_size=10)
    )
    unused = 4 * (6 - 2) * 3 * 32 * 10
    assert parameter_count(moe) - active_parameter_count(moe) == unused
    assert active_parameter_count(HYBRID) == parameter_count(HYBRID)


def test_a_sampler_in_8_bits_is_counted_in_8_bits():
    """It was counted in the trainer's 16."""
    config = Config(
        model=ModelSection(dtype="bfloat16", lora=LoraSection(rank=2)),
        sampler=SamplerSection(quantise="int8"),
    )
    a = replace(QWEN3, adapter=Adapter(2, 4.0, ("q_proj",)))
    made = roles()
    items = {item.part: item.bytes for item in sampler_items(config, a, made, jnp.bfloat16)}
    sampled = Model(replace(a, quantised="int8"), made.sampler, jnp.bfloat16)
    kernels = 0
    for spec in jax.tree.leaves(published_specs(sampled)):
        size = math.prod(spec.shape) * jnp.dtype(spec.dtype or jnp.bfloat16).itemsize
        kernels += size * (spec.trained or bool(spec.dtype))
    assert items == {"the sampler's copy": kernels}


def test_a_mean_length_is_refused_where_caches_are_not_by_pages():
    with pytest.raises(
        ShoalError, match=r"only decoding by the kernel for TPUs has caches by pages \(CPU, "
    ):
        plan_slots(sampling(mean_completion_tokens=64), MODEL, 64, 8, 64)
    with pytest.raises(ShoalError, match="mean_completion_tokens"):
        sampling(mean_completion_tokens=513)


def test_a_mean_length_is_planned_for_a_window_that_no_sequence_exceeds(monkeypatch):
    monkeypatch.setattr(Role, "platform", "tpu")
    asked = sampling(mean_completion_tokens=64)
    longest = asked.max_prompt_tokens + asked.max_completion_tokens
    base = replace(MODEL.architecture, head_dim=64)

    def plan(window: int) -> SlotPlan:
        a = replace(base, pattern=(Layer(window=window),))
        return plan_slots(asked, replace(MODEL, architecture=a), 64, 8, 64)

    assert plan(longest) == plan(0)
    with pytest.raises(ShoalError, match="only decoding by the kernel for TPUs"):
        plan(longest - 1)


# ---- what the data needs

TOOL = '''\
def add(a: int) -> int:
    """Adds.

    Args:
        a: A number.
    """
    return a
'''


def job_of(
    tmp_path: Path, *words: str, lengths: Sequence[int] = (5, 9, 7, 70), resumed: Path | None = None
) -> Job:
    """A job of own data with prompts of so many words, each a token or two; the last row is held
    out."""
    rows = tmp_path / "rows.jsonl"
    prompts = []
    for length in lengths:
        prompts.append([{"role": "user", "content": " ".join(["one"] * length)}])
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config, _ = compose(
        "train",
        [
            "task=custom",
            f"task.path={rows}",
            "batch.prompts_per_step=2",
            "batch.group_size=4",
            "algorithm.kl_coef=0",
            "task.num_eval_questions=1",
            f"base_output_directory={tmp_path}",
            "reward=think_format_reward",
            *words,
        ],
    )
    console = Console() if resumed else Console(io.StringIO())
    return Job(config, console, resumed=resumed)


def test_slots_have_room_for_the_longest_prompt_of_own_data(tmp_path):
    """They had it for 1,024 tokens whatever the data held: 4.5 GiB of keys for prompts of 64
    tokens."""
    with job_of(tmp_path, "train.pass_k=0") as job:
        task = job.loaded_task
        longest = max(
            len(job.encode(example)) for example in (*task.train, *task.evaluations["held_out"])
        )
        sampling = job.sampling_settings
        assert job.config.sampling == sampling and sampling.max_prompt_tokens == 1024
        assert longest <= sampling.slot_prompt == sampling.prompt_slot_tokens < longest + 64
        engines = dict(run_engines(job.config, job.model, job.roles, job.tokenizer))
        assert {engine.max_prompt_tokens for engine in engines.values()} == {sampling.slot_prompt}
        # Of one question there is one answer; it had as many slots as training.
        assert sampling.evaluation_slots == 1
        assert engines["evaluation"].num_rows == 1 and engines["training"].num_rows == 2
        text = slots_text(job.config, job.roles, job.model_source.architecture)
        assert f"room for prompts of {sampling.slot_prompt} tokens" in text


@pytest.mark.parametrize(
    "words",
    [
        ("sampling.max_prompt_tokens=64",),  # no longer than that, and longer ones are dropped
        # what a turn adds is not known before
        ("model=tiny-tools", "environment.tools=[tools.py:add]"),
    ],
)
def test_slots_have_room_for_all_that_is_allowed_where_the_longest_prompt_is_not_less(
    tmp_path, words
):
    (tmp_path / "tools.py").write_text(TOOL)
    words = tuple(word.replace("tools.py", str(tmp_path / "tools.py")) for word in words)
    with job_of(tmp_path, *words, lengths=(5, 9, 70, 7)) as job:
        assert (
            job.sampling_settings.prompt_slot_tokens == 0
            and job.sampling_settings.slot_prompt == job.sampling_settings.max_prompt_tokens
        )


def test_a_generated_task_keeps_its_room():
    config, _ = compose("train", ["task=words", "task.num_eval_questions=2"])
    with Job(config, Console(io.StringIO())) as job:
        assert (
            job.sampling_settings.prompt_slot_tokens == 0
            and job.sampling_settings.evaluation_slots == 2 + 2 + 2 * 8
        )


def test_room_that_is_too_small_is_refused(tmp_path):
    with (
        job_of(tmp_path, "sampling.prompt_slot_tokens=8") as job,
        pytest.raises(
            ShoalError, match=r"prompt_slot_tokens=8: the longest prompt of the data has \d+ tokens"
        ),
    ):
        job.sampling_settings  # noqa: B018


def test_a_resumed_run_keeps_its_room_while_its_data_is_as_long(tmp_path, capsys):
    """Another room is another program, whose last bits may differ."""
    with job_of(tmp_path) as job:
        before = job.sampling_settings.prompt_slot_tokens
        with RunWriter.create(tmp_path, "first") as made:
            made.write_config(*texts_of(job.requested, job.decisions))
    decisions = read_decisions(made.path)
    assert decisions["sampling.prompt_slot_tokens"].value == before
    assert decisions["sampling.prompt_slot_tokens"].sources["longest prompt"] == before
    wider = replace(decisions["sampling.prompt_slot_tokens"], value=before + 64)
    with RunWriter(made.path) as folder:  # of another version
        kept = decisions | {"sampling.prompt_slot_tokens": wider}
        folder.write_config(*texts_of(job.requested, kept))
    with job_of(tmp_path, resumed=made.path) as job:
        assert job.sampling_settings.prompt_slot_tokens == before + 64
    with job_of(tmp_path, lengths=(5, 9, 300, 5), resumed=made.path) as job:
        assert before < job.sampling_settings.prompt_slot_tokens != before + 64
    said = " ".join(capsys.readouterr().out.split())
    assert f"longest prompt was {before}, and is " in said


def test_an_evaluation_has_no_more_slots_than_completions():
    batch = BatchSection(prompts_per_step=4, group_size=128)
    config = Config(sampling=sampling(512, 64, evaluation_slots=3), batch=batch)
    made = make_roles(MeshSection())
    model = Model(PLAINEST, made.trainer)
    engines = dict(run_engines(config, model, made, TOKENIZER))
    assert engines["training"].num_rows * engines["training"].siblings == 512
    assert engines["evaluation"].num_rows == 3
    states = dict(engine_states(config, model, made, PLAINEST))
    assert states == {name: engine.state_shapes() for name, engine in engines.items()}


def test_what_samples_nothing_has_no_caches():
    """Answers of data are learned, and no evaluation is wanted."""
    config, _ = compose("sft", ["train.evaluate_every=-1"])
    made = make_roles(MeshSection())
    assert not dict(engine_states(config, Model(PLAINEST, made.trainer), made, PLAINEST))

"""What metrics are called and mean: the page made from the table, names that stand for many,
clocks, MFU."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from scripts import load
from small import SHARED_KEYS

from shoal.commands.evaluate import read_in_any_form
from shoal.mesh import peak_flops
from shoal.model.architecture import Architecture, DeltaNet, Experts, Layer
from shoal.model.flops import Utilisation, forward_flops, model_flops
from shoal.model.parameters import ParamSpec, active_size, param_specs
from shoal.records import Completion, Example, Group, Purpose, SamplingParams, StopReason
from shoal.runs.metrics import (
    METRICS,
    RESERVED_FUNCTIONS,
    MetricSet,
    Reduction,
    is_clock,
    logged_name,
    metric,
)
from shoal.tasks.task import Task
from shoal.trainer.evaluation import Answers, score_answers, score_sampled

reference = load("docs/reference.py")

# ---- the page


def test_every_metric_stands_on_the_page_with_unit_reduction_and_meaning():
    lines = reference.metrics_page().splitlines()
    for name, row in METRICS.items():
        (line,) = [
            line
            for line in lines
            if line.startswith((f"| `{name}` |", f"| `{name}` ⏱ |")) and line.count("|") == 7
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:4] == [row.unit, row.reduction.value, row.meaning]
        assert ("⏱" in cells[0]) == is_clock(name)
    assert {*reference.TRL_TERMS, *reference.VERL_NAMES} <= set(METRICS)


def make_group(prompt: int, lengths: list[int], correct: bool = True) -> Group:
    completions = tuple(
        Completion(
            0,
            i,
            np.zeros(n, np.int32),
            np.zeros(n, np.float32),
            np.ones(n, bool),
            np.zeros(n, np.int32),
            StopReason.EOS,
        )
        for i, n in enumerate(lengths)
    )
    size = len(lengths)
    return Group(
        Purpose.EVALUATE,
        0,
        0,
        Example(0, "?"),
        np.zeros(prompt, np.int32),
        completions,
        ("!",) * size,
        np.ones(size),
        {"exact": np.ones(size)},
        np.ones(size, bool),
        np.array([correct] * size),
    )


def test_every_figure_of_an_evaluation_stands_on_the_page():
    group = replace(make_group(2, [3, 3]), extra={"acc": [1.0, 0.0]})

    def well_formed(text):
        return True

    def extract(text):
        return text

    def verdict(text, example):
        return {"correct": True}

    task = Task(
        "own",
        (),
        {},
        (),
        well_formed=well_formed,
        extract=extract,
        verdict=verdict,
    )
    figures = score_answers([group], task) | score_sampled([group], SamplingParams(), task)
    figures |= read_in_any_form(Answers(main=[group]), task)
    figures |= score_answers([replace(group, correct=None)], task)  # without verdicts
    names = set()
    for name in figures:
        general = name.replace("exact", "{function}").replace("@2", "@{k}")
        names.add(general.replace("logged/acc", "logged/{name}"))
    of_sources = []
    for source in ("one", "another"):
        example = replace(group.example, columns={"data_source": source})
        of_sources.append(replace(group, example=example))
    added = score_answers(of_sources, task).keys() - figures.keys()
    # the row of the accuracy names the other two
    assert {"accuracy/one", "mean_reward/one", "rewards/logged/acc/one"} < added
    names.add("accuracy/{source}")
    assert names == set(reference.EVALUATION)


# ---- names


def test_clocks_are_what_a_machine_decides():
    assert {name for name in METRICS if is_clock(name)} == {
        "time/step_seconds",
        "time/sample_seconds",
        "time/reward_seconds",
        "time/update_seconds",
        "cost/step",
        "cost/run",
        "throughput/sample_tokens_per_second",
        "throughput/train_tokens_per_second",
        "memory/peak_bytes",
        "compilations",
        "mfu",
        "sampler/places_drawing",
        "sampler/preempted_rows",
        "idle/trainer",
        "idle/sampler",
        "queue/waiting",
        "queue/running",
        "queue/sampled",
        "fleet/hosts",
        "fleet/lost",
        "fleet/tokens_lost",
        "fleet/asked_again",
        "fleet/duplicates",
        "fleet/refused",
        "publish/seconds",
        "publish/bytes",
        "publish/pause_seconds",
    }
    assert not is_clock("rewards/logged/time/x") and not is_clock("rewards/mfu")


@pytest.mark.parametrize(
    ("name", "unit", "reduction"),
    [
        ("rewards/exact", "reward", Reduction.MEAN),
        ("rewards/failed", "completions", Reduction.SUM),
        ("rewards/failed/exact", "completions", Reduction.SUM),
        ("rewards/logged/a/b", "as logged", Reduction.MEAN),
        ("rewards/failed_to_parse", "reward", Reduction.MEAN),
        ("rewards/logged", "reward", Reduction.MEAN),
    ],
)
def test_a_name_of_a_family_has_its_row(name, unit, reduction):
    assert dataclasses.astuple(metric(name))[:3] == (name, unit, reduction)


def test_families_lie_where_the_table_has_them():
    metrics = MetricSet()
    for name in (
        "lr",
        "rewards/logged/z",
        "rewards/failed/exact",
        "rewards/failed",
        "rewards/zeta",
        "rewards/alpha",
    ):
        metrics.add(name, 2)
        metrics.add(name, 2)
    assert list(metrics.result().items()) == [
        ("rewards/alpha", 2),
        ("rewards/zeta", 2),
        ("rewards/failed", 4),
        ("rewards/failed/exact", 4),
        ("rewards/logged/z", 2),
        ("lr", 2),
    ]
    for name in RESERVED_FUNCTIONS:
        assert metric(f"rewards/{name}/f").unit != "reward"


@pytest.mark.parametrize(
    ("name", "metric_name"),
    [
        ("length", "length"),
        ("acc@8", "acc@8"),
        ("a/b.c-d_e", "a/b.c-d_e"),
        ("länge (tokens)\n", "l_nge__tokens__"),
        ("", "unnamed"),
        ("/", "unnamed"),
        ("{name}", "_name_"),
        (3, "3"),
        (None, "None"),
        ("\0\ud800", "__"),
        ("x" * 300, "x" * 200),
    ],
)
def test_any_logged_name_becomes_one_that_every_sink_takes(name, metric_name):
    assert logged_name(name) == f"rewards/logged/{metric_name}"
    assert metric(logged_name(name)).unit == "as logged"


# ---- MFU

SMALL = Architecture(
    vocab_size=50,
    hidden_size=8,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
)


def counted(a: Architecture, prompt: int, completions: list[int]) -> int:
    """Token by token, from the parameters as declared: two operations an element of each
    product."""
    leaves = jax.tree.leaves(param_specs(a))
    blocks = sum(int(np.prod(leaf.shape)) for leaf in leaves if len(leaf.shape) == 3)
    # a query with a key, a weight with a value
    pair = 2 * 2 * a.num_layers * a.num_heads * a.head_dim
    total = sum(2 * blocks + pair * (i + 1) for i in range(prompt))
    for length in completions:
        total += sum(
            2 * blocks + 2 * a.hidden_size * a.vocab_size + pair * (prompt + i + 1)
            for i in range(length)
        )
    return total


def test_operations_equal_those_counted_token_by_token():
    for prompt, completions in ((1, []), (5, [1]), (7, [3, 0, 11]), (0, [4])):
        assert forward_flops(SMALL, prompt, completions) == counted(SMALL, prompt, completions)


KINDS = replace(
    SMALL,
    num_layers=7,
    pattern=(Layer(mixer="delta_net"), Layer(window=4, head_dim=10), Layer()),
    delta_net=DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_size=4),
)


def counted_by_kind(a: Architecture, prompt: int, completions: list[int]) -> float:
    """Token by token and layer by layer: of windows the keys in them; of a delta net the taps of
    its convolution, and for each head its state's product with the key, its change, and its
    product with the query, two operations an element each."""
    weights = a.hidden_size * a.num_layers * a.layer_embedding_size
    for spec in jax.tree.leaves(param_specs(a).blocks):
        if spec.is_product:
            weights += int(np.prod(spec.shape))

    def of_token(num_keys: int) -> float:
        total = 2.0 * weights
        for layer in a.layers_in_order:
            if layer.mixer == "delta_net":
                channels = 2 * (2 * 3) + 4 * 5
                total += 2 * channels * 4 + 3 * 2 * (4 * 3 * 5)
            else:
                keys = min(num_keys, layer.window or num_keys)
                total += 2 * 2 * a.num_heads * a.head_dim_of(layer) * keys
        return total

    total = sum(of_token(i + 1) for i in range(prompt))
    for length in completions:
        for i in range(length):
            total += of_token(prompt + i + 1) + 2 * a.hidden_size * a.vocab_size
    return total


def test_operations_of_several_kinds_of_layers_equal_those_counted_token_by_token():
    for a in (KINDS, SHARED_KEYS):
        for prompt, completions in ((1, []), (3, [1, 2]), (7, [3, 0, 11]), (0, [6])):
            counted = counted_by_kind(a, prompt, completions)
            assert forward_flops(a, prompt, completions) == counted


def test_of_experts_those_of_a_token_count():
    a = replace(SMALL, experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=5))
    of_experts = ParamSpec((3, 8, 8, 5), (None,) * 4, indices=("layer", "expert"))
    assert active_size(a, of_experts) == 3 * 2 * 8 * 5
    assert active_size(a, replace(of_experts, indices=("layer",))) == 3 * 8 * 8 * 5


def test_a_group_pays_for_its_prompt_once():
    saved = 2 * forward_flops(SMALL, 9, []) + forward_flops(SMALL, 9, [4, 4, 4])
    assert saved == 3 * forward_flops(SMALL, 9, [4])


def test_a_step_is_sampling_and_three_passes_an_epoch_and_scorings():
    one, other = (5, [2, 3]), (4, [6])
    f = forward_flops(SMALL, *one), forward_flops(SMALL, *other)
    assert model_flops(SMALL, [one, other], [one]) == pytest.approx(f[0] + f[1] + 3 * f[0])
    assert model_flops(SMALL, [one, other], [one], num_epochs=2, num_scorings=1) == pytest.approx(
        8 * f[0] + f[1]
    )


def test_training_a_large_model_on_short_text_is_six_operations_a_weight_and_token():
    # 8.03e9 weights, 0.53e9 of them the embedding
    llama = Architecture(128256, 4096, 14336, 32, 32, 8, 128)
    flops = model_flops(llama, [], [(1, [100])])
    assert flops / (6 * (8.03e9 - 0.53e9) * 100) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "dtype", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5e", "bfloat16", 197e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("TPU v4", "float32", None),
        ("TPU v4 lite", "bfloat16", None),
        ("cpu", "float32", None),
        ("NVIDIA L40S", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA A100X", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float16", 989e12),
        ("TPU v6 lite", "float16", None),
    ],
)
def test_peak_rates_of_devices(kind, dtype, rate):
    assert peak_flops(kind, dtype) == rate


def devices(*kinds: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(device_kind=kind) for kind in kinds]


def test_mfu_of_a_step():
    groups = [make_group(5, [2, 3]), make_group(4, [6, 1])]
    utilisation = Utilisation.on(devices("TPU v4", "TPU v4"), SMALL, jax.numpy.bfloat16)
    assert utilisation is not None and utilisation.peak == 550e12
    flops = model_flops(SMALL, [(5, [2, 3]), (4, [6, 1])], [(4, [1])])
    assert utilisation.mfu(groups, {(1, 1)}, 0.5) == pytest.approx(flops / (550e12 * 0.5))


def test_mfu_is_absent_where_a_peak_is_not_known():
    assert Utilisation.on(jax.devices(), SMALL, jax.numpy.float32) is None
    assert Utilisation.on(devices("TPU v4", "Fast Thing 1"), SMALL, jax.numpy.bfloat16) is None
    assert Utilisation.on([], SMALL, jax.numpy.bfloat16) is None

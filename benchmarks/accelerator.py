"""How much of a GPU or TPU do sampling, update and a whole GRPO step use? One command on one
device, under 9 minutes.

    python benchmarks/accelerator.py [--calibration FILE] [--minutes 9] [--models 1.5B,0.5B,7B]
                                     [--parts PARTS] [--tiny]

Measures what the device's memory and matrix units really give, what an operation takes that has
nothing to do, and, on several devices, how fast they gather an array; FILE is written for `shoal
plan calibration=FILE` (with `--parts ''` no more is done). Then, for random models of Qwen2.5's
sizes and against these rates, in bfloat16: prefill and decoding at 64, 256 and 1,024 places
(prompts of 256 tokens, groups of 8, 128 tokens each), one micro-batch of the update at 1k, 4k and
16k tokens, and whole GRPO steps of 32 x 8 completions of 256 tokens. Where vLLM or TRL are
installed in this environment, they do the same work beside it. A line is printed as soon as it is
measured. What does not fit the time is skipped, and said; a size that the memory cannot hold is a
line. Each part runs in a process of its own, so that it has the device's whole memory. `--tiny`:
everything on a CPU, with models of no size.

Shares: of decoding, the weights and live keys read once a token, over the measured bandwidth; of
the rest, the model's operations, with neither recomputation nor padding, over the measured matrix
rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from step import Shape, computed_tokens

if TYPE_CHECKING:
    from step import Trial

_QWEN = {
    "prompts": 32,
    "siblings": 8,
    "prompt": 256,
    "completion": 256,
    "micro_tokens": 16384,
    "qkv_bias": True,
}
MODELS: Mapping[str, Shape] = {
    "1.5B": Shape(1536, 28, 8960, 12, 2, 128, 151936, **_QWEN),
    "0.5B": Shape(896, 24, 4864, 14, 2, 64, 151936, **_QWEN),
    "7B": Shape(3584, 28, 18944, 28, 4, 128, 152064, tied=False, **_QWEN),
}
TINY = Shape(
    32,
    1,
    64,
    4,
    2,
    8,
    96,
    prompts=4,
    siblings=4,
    prompt=16,
    completion=8,
    micro_tokens=256,
    qkv_bias=True,
)

PARTS = ("decode", "update", "step", "vllm", "trl")
"""Of each model, in this order: each is a process."""
LEAST_SECONDS = 25
"""Less is not worth starting a part for."""


@dataclass(frozen=True)
class Plan:
    """What one part measures."""

    model: str
    shape: Shape
    places: Sequence[int]
    tokens: Sequence[int]  # of a micro-batch
    decoded: int  # tokens of each place
    dtype: str
    matrices: Sequence[int]  # their sizes
    read_bytes: int

    @staticmethod
    def of(model: str, tiny: bool) -> Plan:
        if tiny:
            return Plan(model, TINY, (4, 16), (128,), 8, "float32", (64, 256), 1 << 22)
        return Plan(
            model,
            MODELS[model],
            (256, 64, 1024),
            (16384, 4096, 1024),
            128,
            "bfloat16",
            (4096, 8192),
            1 << 31,
        )


# ---- the parts: each yields its lines


Line = tuple[str, str, str]
"""(what, how fast, of what it could be)"""


def rates(plan: Plan) -> dict[str, Any]:
    """The calibration: what the device really gives, each figure as [median, least, most]."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(plan.read_bytes // 2, jnp.bfloat16)
    read, copied = jax.jit(lambda x: x.sum(dtype=jnp.float32)), jax.jit(lambda x: x * 2)
    figures = {
        "hbm": max(spread(x.nbytes, lambda: read(x)), spread(2 * x.nbytes, lambda: copied(x)))
    }
    del x
    for dtype in ("bfloat16", "float32"):
        figures[dtype] = max(products(size, dtype) for size in plan.matrices)
    figures["launch"] = launches()
    if len(jax.devices()) > 1:
        figures["link"] = links(plan)
    return {
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "figures": figures,
    }


def products(size: int, dtype: str, times: int = 8) -> list[float]:
    """Operations a second of matrices of this size; of float32 in full, as a run computes them."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones((size, size), dtype) / size
    run = jax.jit(
        lambda a: jax.lax.fori_loop(0, times, lambda _, b: jnp.matmul(a, b, precision="highest"), a)
    )
    return spread(times * 2 * size**3, lambda: run(a))


def launches(number: int = 512) -> list[float]:
    """Seconds of an operation that has next to nothing to do, within a program."""
    import jax
    import jax.numpy as jnp

    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.eye(16, dtype=jnp.bfloat16)
    run = jax.jit(lambda x, w: reduce(lambda x, _: x @ w, range(number), x))
    return sorted_three(1 / rate for rate in spread(number, lambda: run(x, w)))


def links(plan: Plan) -> list[float]:
    """Bytes a second and way that a device receives where all devices gather an array; of a TPU
    over each link."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from shoal.mesh.accelerators import ACCELERATORS, accelerator_of
    from shoal.mesh.topology import Topology
    from shoal.plan.transfers import link_of

    mesh = jax.make_mesh((len(jax.devices()),), ("all",))
    size, kind, ways = mesh.size, accelerator_of(jax.devices()[0].device_kind), 1.0
    if kind and kind.is_tpu:
        coordinates = [device.coords for device in jax.devices()]
        shape = tuple(max(axis) - min(axis) + 1 for axis in zip(*coordinates, strict=True))
        name = next(name for name, one in ACCELERATORS.items() if one is kind)
        ways = link_of(Topology(name, shape[: kind.torus]), kind, mesh, range(size))[0] / kind.link
    x = jax.device_put(
        jnp.ones(plan.read_bytes // 8 // size * size, jnp.bfloat16),
        NamedSharding(mesh, PartitionSpec("all")),
    )
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return spread(x.nbytes * (size - 1) / size / ways, lambda: gathered(x))


def spread(work: float, call: Callable[[], Any], repeats: int = 9) -> list[float]:
    """[median, least, most] of the work that is done a second."""
    import jax

    return sorted_three(
        work / seconds for seconds in timed(lambda: jax.block_until_ready(call()), repeats)
    )


def sorted_three(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    return [found[len(found) // 2], found[0], found[-1]]


def seconds_of(call: Callable[[], Any], repeats: int = 5) -> float:
    import jax

    return fastest(lambda: jax.block_until_ready(call()), repeats)


def fastest(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of a few calls, after one that compiles."""
    return min(timed(call, repeats))


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of some calls, after one that compiles."""
    call()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


def decode(plan: Plan, measured: Mapping[str, float]) -> Iterator[Line]:
    """Prefill and decoding at several numbers of places, with no weights but those that are sampled
    from."""
    import jax

    from step import Trial

    trial = Trial(plan.shape, plan.dtype)
    weights = jax.tree.map(lambda leaf: leaf.astype(trial.model.dtype), trial.parameters)
    del trial
    for places in plan.places:
        yield from guarded(f"decode, {places} places", decode_at(plan, places, weights, measured))


def decode_at(
    plan: Plan, places: int, weights: Any, measured: Mapping[str, float]
) -> Iterator[Line]:
    import numpy as np

    from aot import decode_bytes
    from shoal.model.flops import forward_flops
    from step import Trial

    shape = replace(plan.shape, prompts=places // plan.shape.siblings, completion=plan.decoded)
    trial, steps = Trial(shape, plan.dtype), plan.decoded - 1
    trial.publish(0, weights)

    def seconds(tokens: int) -> float:
        lengths = np.full((shape.prompts, shape.siblings), tokens)
        return fastest(lambda: trial.sample(0, lengths), 3)

    first, whole = seconds(1), seconds(plan.decoded)
    operations = shape.prompts * forward_flops(trial.architecture, shape.prompt, [1])
    yield (
        f"prefill, {shape.prompts} prompts of {shape.prompt}",
        f"{1e3 * first:.1f} ms",
        share(operations / first, measured["bfloat16"]),
    )
    spent = whole - first
    read = decode_bytes(
        trial.architecture, shape.prompts, shape.siblings, shape.prompt, plan.decoded
    )
    yield (
        f"decode, {places} places",
        f"{places * steps / spent:,.0f} tokens/s, {1e3 * spent / steps:.2f} ms each",
        share(steps * read / spent, measured["hbm"]),
    )


def update(plan: Plan, measured: Mapping[str, float]) -> Iterator[Line]:
    """One micro-batch forward and backward, of several sizes, as the updater packs it."""
    from shoal.trainer.step import TrainState
    from step import Trial

    # moments would take memory for nothing
    weights = TrainState(Trial(plan.shape, plan.dtype).parameters, None, None)
    for tokens in plan.tokens:
        yield from guarded(f"update, {tokens:,} tokens", update_of(plan, tokens, weights, measured))


def update_of(
    plan: Plan, tokens: int, weights: Any, measured: Mapping[str, float]
) -> Iterator[Line]:
    from shoal.model.flops import forward_flops
    from step import Trial

    # of a prompt, and of each of 7 completions
    length = min(2 * plan.shape.completion, tokens // 8)
    trial = Trial(
        replace(
            plan.shape,
            prompts=tokens // (8 * length),
            siblings=7,
            prompt=length,
            completion=length,
            micro_tokens=tokens,
        ),
        plan.dtype,
    )
    batch, total = packed(trial), None

    def call() -> Any:
        nonlocal total
        total, logprobs = trial.learner.accumulate(total, weights, batch)
        return logprobs

    seconds = seconds_of(call, 3)
    operations = 3 * trial.shape.prompts * forward_flops(trial.architecture, length, [length] * 7)
    computed = computed_tokens(batch)
    yield (
        f"update, {computed:,} tokens",
        f"{computed / seconds:,.0f} tokens/s, {1e3 * seconds:.0f} ms",
        share(operations / seconds, measured["bfloat16"]),
    )


class Packed(Exception):
    """The first micro-batch that an update would compute."""


def packed(trial: Trial) -> Any:
    from shoal.trainer.step import TrainState

    def stop(total: Any, state: Any, batch: Any, targets: Any) -> Any:
        raise Packed(batch)

    original, trial.learner.accumulate = trial.learner.accumulate, stop
    try:
        trial.updater.update(TrainState(None, None, None), random_groups(trial.shape), 0)
    except Packed as found:
        return found.args[0]
    finally:
        trial.learner.accumulate = original
    raise AssertionError("an update without a micro-batch")


def random_groups(shape: Shape) -> list[Any]:
    """Groups of random tokens that are as long as they may be."""
    import numpy as np

    from shoal.records import Completion, Example, Group, Purpose, StopReason

    rng, groups, size = np.random.default_rng(0), [], shape.completion
    for row in range(shape.prompts):
        own = tuple(
            Completion(
                row,
                index,
                rng.integers(0, shape.vocabulary, size).astype(np.int32),
                np.full(size, -10.0, np.float32),
                np.ones(size, bool),
                np.zeros(size, np.int32),
                StopReason.LENGTH,
            )
            for index in range(shape.siblings)
        )
        prompt = rng.integers(0, shape.vocabulary, shape.prompt).astype(np.int32)
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, ""),
                prompt,
                own,
                ("",) * shape.siblings,
                rng.permutation(shape.siblings).astype(float),
                {},
                np.ones(shape.siblings, bool),
            )
        )
    return groups


def step(plan: Plan, measured: Mapping[str, float]) -> Iterator[Line]:
    """Whole GRPO steps: publication, sampling, update with AdamW."""
    import jax
    import numpy as np

    from shoal.model.flops import model_flops
    from step import Trial

    shape, times = plan.shape, []
    trial = Trial(shape, plan.dtype)
    state = trial.learner.init(trial.parameters)
    del trial.parameters  # cached; the state has its own
    for number in range(3):
        started = time.perf_counter()
        trial.publish(number, state.trainable)
        groups = trial.sample(number, shape.lengths(number))
        trial.engine.release_memory()
        sampled = time.perf_counter()
        state, _ = trial.updater.update(state, groups, number)
        jax.block_until_ready(state)
        times.append((sampled - started, time.perf_counter() - sampled))
    sampling, updating = np.array(times[1:]).min(0)
    lengths = [(shape.prompt, [shape.completion] * shape.siblings)] * shape.prompts
    operations = model_flops(trial.architecture, lengths, lengths)
    yield step_line(
        shape,
        sampling + updating,
        f"sampling {sampling:.2f} + update {updating:.2f}",
        share(operations / (sampling + updating), measured["bfloat16"]),
    )


def step_line(shape: Shape, seconds: float, parts: str, of: str) -> Line:
    tokens = shape.prompts * shape.siblings * shape.completion
    return (
        f"whole step, {shape.prompts} x {shape.siblings} x {shape.completion}",
        f"{seconds:.2f} s ({parts}), {tokens / seconds:,.0f} tokens/s",
        of,
    )


def share(rate: float, most: float) -> str:
    return f"{100 * rate / most:.1f}%"


def guarded(what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """The lines of one measurement; memory that ran out is a line."""
    try:
        yield from lines
    except Exception as error:
        if not any(
            text in str(error) for text in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
        ):
            raise
        yield what, "does not fit the memory", ""


# ---- the same work by others, where they are installed; they import nothing of Shoal


def hub_config(shape: Shape) -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def vllm(plan: Plan, measured: Mapping[str, float]) -> Iterator[Line]:
    """Decoding with random weights, at the same numbers of places."""
    import numpy as np
    from vllm import LLM, SamplingParams

    shape = plan.shape
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hub_config(shape)))
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=shape.prompt + plan.decoded,
            max_num_seqs=max(plan.places),
            gpu_memory_utilization=0.8,
        )
    for places in plan.places:
        rng = np.random.default_rng(0)

        def seconds(tokens: int, places: int = places, rng: Any = rng) -> float:
            def sample() -> None:  # other prompts each time: nothing is found in its cache
                ids = rng.integers(
                    0, shape.vocabulary, (places // shape.siblings, shape.prompt)
                ).tolist()
                params = SamplingParams(
                    n=shape.siblings,
                    max_tokens=tokens,
                    temperature=1.0,
                    ignore_eos=True,
                    detokenize=False,
                )
                engine.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)

            return fastest(sample, 3)

        spent, steps = seconds(plan.decoded) - seconds(1), plan.decoded - 1
        yield (
            f"decode, {places} places",
            f"{places * steps / spent:,.0f} tokens/s, {1e3 * spent / steps:.2f} ms each",
            "",
        )


def trl(plan: Plan, measured: Mapping[str, float]) -> Iterator[Line]:
    """Whole GRPO steps of TRL, with vLLM where that is installed."""
    import random

    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    shape, on_gpu, times = plan.shape, torch.cuda.is_available(), []
    words = Tokenizer(
        models.WordLevel(
            {f"t{number}": number for number in range(shape.vocabulary)}, unk_token="t0"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t0", pad_token="t1", padding_side="left"
    )
    config = hub_config(shape)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    rng = random.Random(0)
    rows = [
        " ".join(f"t{rng.randrange(2, shape.vocabulary)}" for _ in range(shape.prompt))
        for _ in range(3 * shape.prompts)
    ]
    with_vllm = on_gpu and importlib.util.find_spec("vllm") is not None
    number = shape.prompts * shape.siblings
    most = max(1, shape.micro_tokens // (shape.prompt + shape.completion))
    each = max(size for size in range(1, min(number, most) + 1) if number % size == 0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=each,
            gradient_accumulation_steps=number // each,
            num_generations=shape.siblings,
            max_completion_length=shape.completion,
            temperature=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=1e-6,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=on_gpu,
            use_vllm=with_vllm,
            model_init_kwargs={"dtype": "float32"},
            generation_kwargs={"ignore_eos": True}
            if with_vllm
            else {"min_new_tokens": shape.completion},
            **({"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} if with_vllm else {}),
        )

        class Times(TrainerCallback):
            def on_step_end(self, *args: Any, **more: Any) -> None:
                times.append(time.perf_counter())

        trainer = GRPOTrainer(
            model=f"{folder}/model",
            args=settings,
            callbacks=[Times()],
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            reward_funcs=lambda completions, **more: [rng.random() for _ in completions],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    yield step_line(
        shape,
        times[2] - times[1],
        "generating with " + ("vLLM" if with_vllm else "transformers"),
        "",
    )


# ---- one command


class Clock:
    """What remains of the time."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def run_part(
    part: str, options: argparse.Namespace, model: str, clock: Clock, measured: Any = None
) -> str:
    """Runs a part in a process of its own, which prints its lines; what else there is to say of
    it."""
    command = [
        sys.executable,
        __file__,
        "--part",
        part,
        "--models",
        model,
        *["--tiny"] * options.tiny,
        "--measured",
        json.dumps(measured),
    ]
    # vLLM in the same process: one of its own would outlive a part that is stopped, with the
    # device's memory.
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **os.environ,
    }
    with tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(
                command, env=environment, stderr=errors, timeout=max(1.0, clock.left), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return "stopped: the time is over"
        errors.seek(0)
        last = [line for line in errors.read().splitlines() if line.strip()][-1:]
    return f"failed ({code}): {''.join(last)[:300]}" if code else ""


def print_line(model: str, who: str, what: str, fast: str = "", of: str = "") -> None:
    print(f"{model:>5}  {who:<6} {what:<34} {fast:<48} {of:>7}".rstrip(), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--models", default=",".join(MODELS), help=f"which of {', '.join(MODELS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if unknown := {*options.models.split(",")} - MODELS.keys() - {"tiny"} | {
        *options.parts.split(",")
    } - {*PARTS, ""}:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.part:
        run_one(options)
        return
    clock, models = Clock(options.minutes), ["tiny"] if options.tiny else options.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        found = subprocess.run(
            [
                sys.executable,
                __file__,
                "--part",
                "rates",
                "--models",
                models[0],
                *["--tiny"] * options.tiny,
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        calibration = json.loads(found.stdout.splitlines()[-1])
        if options.calibration:
            options.calibration.write_text(json.dumps(calibration, indent=1) + "\n")
        measured = {name: middle for name, (middle, *_) in calibration["figures"].items()}
        print(
            f"{calibration['devices']} x {calibration['device']}: {measured['hbm'] / 1e9:,.0f} "
            f"GB/s, "
            f"{measured['bfloat16'] / 1e12:,.1f} bfloat16 TFLOP/s, {1e6 * measured['launch']:.1f} "
            f"us an operation, "
            f"{measured.get('link', 0) / 1e9:,.0f} GB/s a link, as measured\n",
            flush=True,
        )
        print_line("model", "by", "what", "how fast", "share")
        for model in models:
            for part in filter(None, options.parts.split(",")):
                who = part if part in ("vllm", "trl") else "shoal"
                if who != "shoal" and importlib.util.find_spec(who) is None:
                    print_line(model, who, "not installed")
                elif clock.left < LEAST_SECONDS:
                    print_line(model, who, part, f"skipped: {options.minutes:g} minutes are over")
                elif text := run_part(part, options, model, clock, measured):
                    print_line(model, who, part, text)
    print(f"\n{60 * options.minutes - clock.left:.0f} s")


def run_one(options: argparse.Namespace) -> None:
    """One part, in this process."""
    plan = Plan.of(options.models.split(",")[0], options.tiny)
    if options.part == "rates":
        print(json.dumps(rates(plan)))
        return
    who = options.part if options.part in ("vllm", "trl") else "shoal"
    run = {"decode": decode, "update": update, "step": step, "vllm": vllm, "trl": trl}[options.part]
    for line in guarded(options.part, run(plan, json.loads(options.measured))):
        print_line(plan.model, who, *line)


if __name__ == "__main__":
    main()

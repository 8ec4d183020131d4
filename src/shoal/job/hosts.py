"""The hosts of a run or a command: which engines sample where. In this process, or as workers in a
Ray cluster."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.budget.memory import sampled_architecture
from shoal.budget.slots import QUEUED, SlotPlan, all_slots, plan_slots, training_slots
from shoal.chat.tokenizer import Tokenizer
from shoal.config.derived import longest_sequence, max_support
from shoal.config.sections.devices import MeshSection, PublishSection, VllmSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.train import Config
from shoal.files import check_local, is_offline
from shoal.job.cache import cache_by_configuration
from shoal.job.environments import TurnFormats, make_player
from shoal.job.fingerprint import machine
from shoal.mesh import Roles, available_devices, make_roles
from shoal.model.architecture import Architecture
from shoal.model.transformer import Model
from shoal.records import HostLost, Params, Purpose, SamplingParams, ShoalError
from shoal.report.console import Console
from shoal.rollout import vllm
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import GroupRewards
from shoal.rollout.turn_driver import TurnDriver
from shoal.rollout.worker_facts import WorkerFingerprint, WorkerParity, fingerprint_of
from shoal.sampler.engine import Engine
from shoal.sampler.sample_tokens import SamplingArrays, sampling_logprobs
from shoal.stop import StopSignal
from shoal.trainer.batch import LearnerBatch, MicroBatch, Shape, unpack
from shoal.trainer.loss import next_token_logits
from shoal.trainer.schedule import schedule_of
from shoal.trainer.scorers import ModelScorer
from shoal.weights.sampler_copy import num_bytes
from shoal.weights.source import ModelSource, make_model, multiply_exactly
from shoal.weights.store import (
    KEY,
    FilePublisher,
    FolderPublisher,
    FolderVersion,
    MemoryPublisher,
    ProbeScores,
    Publisher,
    default_folder,
)

if TYPE_CHECKING:
    from shoal.rollout.ray_host import Cluster


HERE = "here"
"""The host in the caller's thread."""


PROBE_TOKENS, PROBE_STRIDE, PROBE_BEGINNINGS = 64, 7919, 4
"""Tokens of what a server and the trainer both score, the distance of their ids, and after how many
beginnings of it a server samples a token."""


GAP_TOLERANCES = 3
"""How many times the tolerance of a probe's log-probs those of a step's tokens may differ, in the
mean."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that servers of vLLM can have room for."""


def local_fleet(
    publisher: Publisher,
    make_engine: Callable[[Purpose, int], Engine],
    rewards: GroupRewards,
    seed: int,
    on_progress: Callable[[str, int, int], None] | None = None,
    stop: StopSignal | None = None,
    player: TurnDriver | None = None,
) -> Fleet:
    """One host, in the caller's thread."""
    return Fleet(
        publisher,
        {HERE: EngineHost(make_engine)},
        rewards,
        seed,
        stop=stop or StopSignal(),
        on_progress=on_progress,
        player=player,
    )


def training_fleet(
    config: Config,
    model: Model,
    roles: Roles,
    spec: ModelSource,
    rewards: GroupRewards,
    stop: StopSignal,
    console: Console,
    cluster: Cluster | None = None,
    turns: TurnFormats | None = None,
) -> Fleet:
    """The hosts of a training run: workers of a Ray cluster, or servers of vLLM; or in this process
    one in the caller's thread; or, on devices of their own, one in a thread of its own for each
    replica."""
    tokenizer = spec.tokenizer
    player = (
        make_player(turns, all_slots(config, roles, model.architecture), config.sampling)
        if turns
        else None
    )
    if config.sampler.kind == "vllm":
        return vllm_fleet(config, model, roles, spec, rewards, stop, console, player)
    publisher = make_publisher(
        config.publish, model.on(roles.sampler), cluster, roles.hosts != [roles.sampler]
    )
    if cluster is not None:
        return ray_fleet(
            config, publisher, tokenizer, rewards, stop, console.answered, cluster, player
        )
    if not roles.disaggregated:
        make = training_engine_maker(config, model, roles, tokenizer)
        return local_fleet(publisher, make, rewards, config.seed, console.answered, stop, player)
    slots, woken = training_slots(config, roles, model.architecture).slots, threading.Event()
    hosts = {
        f"sampler {number}": EngineHost(
            training_engine_maker(config, model, roles, tokenizer, host=number),
            capacity=QUEUED * slots,
            shares_memory=False,
        )
        for number in range(len(roles.hosts))
    }
    threads = {name: ThreadHost(host, woken.set, name) for name, host in hosts.items()}
    return Fleet(
        publisher,
        threads,
        rewards,
        config.seed,
        by_itself=True,
        on_note=console.warning,
        stop=stop,
        on_progress=console.answered,
        woken=woken,
        player=player,
    )


def make_publisher(
    section: PublishSection, model: Model, cluster: Cluster | None, in_parts: bool
) -> Publisher:
    """How hosts get the weights: as arrays, in this process; else as files, or, where a cluster may
    span machines that share no folder, as Ray's objects."""
    folder = check_local(section.folder, KEY)
    if cluster is None and section.channel != "files":
        return MemoryPublisher(model, in_parts)
    if (
        cluster is not None
        and section.channel != "files"
        and (section.channel == "ray" or (not section.folder and cluster.may_span_machines))
    ):
        from shoal.rollout.ray_host import ObjectPublisher

        return ObjectPublisher(model)
    size = num_bytes(model) + num_bytes(model, trained=False)
    publisher = FilePublisher(folder if folder != Path() else default_folder(size), model)
    if cluster is not None and cluster.connection.watcher is not None:
        cluster.connection.watcher.remove(publisher.folder)
    return publisher


# ---- workers in a Ray cluster

ENVIRONMENT = (
    "JAX_",
    "XLA_",
    "LIBTPU_",
    "NVIDIA_TF32_",
    "GLIBC_TUNABLES",
    "OMP_NUM_THREADS",
    "NPROC",
)
"""Beginnings of the environment's names that decide numbers, threads and memory: a worker has the
trainer's."""


SHARED_FACTS = ("python", "shoal", "jax", "jaxlib", "numpy")
"""What of `machine` a worker must share with the trainer, whose device may be another."""


def open_cluster(config: Config, console: Console, stack: ExitStack) -> Cluster | None:
    """The Ray cluster of a run; None where it samples in this process. It is joined before JAX
    looks for devices, as those of the trainer are Ray's to give."""
    sampler = config.sampler
    if sampler.kind != "ray":
        return None
    try:
        from shoal.rollout import ray_host
    except ImportError as error:  # of a broken installation, or of another version
        raise ShoalError(
            f"sampler.kind=ray: Ray cannot be imported ({error}); pip install '.[ray]' in the "
            f"clone of "
            "Shoal"
        ) from error

    if is_offline():
        ray_host.check_address(config.ray.address)
        return None
    devices, asked = sampler.devices_per_worker, sampler.asked
    joined = ray_host.connect(
        config.ray.address, round(sampler.workers * asked.get("CPU", devices))
    )
    kind = ray_host.accelerator()
    made = ray_host.Cluster(
        joined,
        sampler.workers,
        asked or {kind: devices},
        config.ray.wait_seconds,
        worker_environment(devices, kind),
        WorkerParity(config.train.versions == "fixed", console.warning),
        console.warning,
    )
    stack.callback(made.close)
    stack.callback(
        set_variables, {name: os.environ.get(name) for name in ray_host.VISIBLE.values()}
    )
    holder, made.trainer_devices = ray_host.hold_accelerators(
        kind,
        config.mesh.trainer,
        sampler.workers * made.resources.get(kind, 0),
        config.ray.wait_seconds,
    )
    stack.callback(lambda holder: None, holder)
    shown = f", dashboard http://{joined.dashboard}" if joined.dashboard else ""
    where = f"the Ray cluster {joined.address}" if joined.watcher is None else "Ray, started here"
    console.note(f"sampler: {sampler.workers} x {devices} {kind} in {where}{shown}")
    made.say_room()
    return made


def set_variables(values: Mapping[str, str | None]) -> None:
    """Sets variables of this process's environment, and removes those that are None."""
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def worker_environment(devices: int, kind: str) -> dict[str, str]:
    """The variables of this process that a worker on so many devices must share."""
    found = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    flag = "--xla_force_host_platform_device_count"
    if kind == "CPU" and devices > 1 and flag not in found.get("XLA_FLAGS", ""):
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {flag}={devices}".strip()
    return found


def trainer_mesh(config: Config, cluster: Cluster | None) -> Config:
    """The configuration with `mesh.trainer` for the devices that this process sees: all those that
    Ray holds for it."""
    if cluster is None or not cluster.trainer_devices:
        return config
    return replace(config, mesh=replace(config.mesh, trainer=str(cluster.trainer_devices)))


def ray_fleet(
    config: Config,
    publisher: Publisher,
    tokenizer: Tokenizer,
    rewards: GroupRewards,
    stop: StopSignal,
    on_progress: Callable[[str, int, int], None],
    cluster: Cluster,
    player: TurnDriver | None,
) -> Fleet:
    """Workers that join as the cluster has room for them."""
    model = publisher.model
    woken, facts = threading.Event(), machine()
    cluster.measure.facts = {name: facts[name] for name in SHARED_FACTS}
    cluster.wake = woken.set
    cluster.make = functools.partial(
        make_worker, config, model.architecture, model.dtype.name, tokenizer
    )
    hosts = {
        name: cluster.start(name)
        for name in (f"worker {number}" for number in range(config.sampler.workers))
    }
    if cluster.measure.strict and (proof := trainer_proof(config, model, tokenizer, cluster.say)):
        # Made while the workers start, which compile the same.
        cluster.measure.wanted = {"the trainer": proof, **cluster.measure.wanted}
    return Fleet(
        publisher,
        hosts,
        rewards,
        config.seed,
        by_itself=True,
        restart=cluster.start,
        restarts=config.sampler.restarts,
        stall_seconds=config.sampler.stall_seconds,
        on_note=cluster.say,
        stop=stop,
        on_progress=on_progress,
        woken=woken,
        player=player,
    )


def vllm_fleet(
    config: Config,
    model: Model,
    roles: Roles,
    spec: ModelSource,
    rewards: GroupRewards,
    stop: StopSignal,
    console: Console,
    player: TurnDriver | None,
) -> Fleet:
    """Servers of vLLM: those that are given, or one started here for each worker."""
    check_servers(config.vllm)
    folder, size = (
        check_local(config.publish.folder, KEY),
        num_bytes(model) + num_bytes(model, trained=False),
    )
    longest, woken = longest_sequence(config), threading.Event()
    ids, beginnings, score = trainer_probe(model, longest, config.sampling.params)
    publisher = FolderPublisher(
        folder if folder != Path() else default_folder(size),
        model,
        spec.folder,
        spec.config,
        score,
        sends_adapters(config.vllm, model),
        not config.vllm.urls,
    )
    sleeps = config.shares_gpu and model.role.platform != "cpu"
    settings = vllm.Settings(
        ids,
        config.vllm.tolerance or (1e-3 if model.dtype == np.float32 else 0.1),
        spec.tokenizer.eos_ids,
        longest,
        training_slots(config, roles, model.architecture).slots,
        max_support(config),
        sleeps,
        beginnings,
        config.sampling.params,
    )

    def open_server(name: str, version: FolderVersion) -> vllm.Server:
        if config.vllm.urls:
            return vllm.Server(name)
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            **os.environ,
            "PYTHONPATH": "",
            **publisher.watcher.environment,
        }
        log = Path(tempfile.gettempdir()) / f"shoal-{os.getpid()}-{name}.log"  # it outlives the run
        return vllm.Server.start(server_words(config, model, version), variables, log)

    def start(name: str) -> vllm.VllmHost:
        return vllm.VllmHost(name, functools.partial(open_server, name), settings, woken.set)

    # Truncation that the trainer does not repeat makes a difference of its own.
    is_compared = not config.sampling.params.truncated or config.algorithm.match_sampling_support
    names = config.vllm.urls or [f"vllm-{number}" for number in range(config.sampler.workers)]
    return Fleet(
        publisher,
        {name: start(name) for name in names},
        rewards,
        config.seed,
        by_itself=True,
        restart=start,
        logprob_tolerance=GAP_TOLERANCES * settings.tolerance if is_compared else 0.0,
        shares_memory=sleeps,
        restarts=config.sampler.restarts,
        stall_seconds=config.sampler.stall_seconds,
        on_note=console.warning,
        stop=stop,
        on_progress=console.answered,
        woken=woken,
        player=player,
    )


def check_servers(section: VllmSection) -> None:
    """ShoalError unless each server that is given answers, and the program that starts others is
    there."""
    deadline, faults = time.monotonic() + vllm.CONNECT_SECONDS, []
    for url in section.urls:
        try:
            vllm.Server(url).wait_until_ready(max(1.0, deadline - time.monotonic()))
        except HostLost as error:
            faults.append(str(error))
    if faults:
        raise ShoalError(
            f"vllm.urls: {'; '.join(faults)}; start them, or leave out those that are not there"
        )
    if section.python and not shutil.which(
        program := os.path.expanduser(shlex.split(section.python)[0])
    ):
        raise ShoalError(
            f"vllm.python={section.python}: there is no program {program}; make an environment "
            f"(python -m "
            "venv FOLDER; FOLDER/bin/pip install vllm) and give FOLDER/bin/python",
            "vllm.python",
        )


def sends_adapters(section: VllmSection, model: Model) -> bool:
    """True if the servers read the run's adapter alone: those that run already if all have vLLM's
    call for it, those that are started here where vLLM computes with it."""
    if (adapter := model.architecture.adapter) is None:
        return False
    if section.urls:
        return all(vllm.Server(url).takes_adapters() for url in section.urls)
    # vLLM's kernels for adapters take no float32 on a GPU.
    return adapter.rank <= LORA_RANKS[-1] and (
        model.dtype != np.float32 or model.role.platform == "cpu"
    )


def trainer_probe(
    model: Model, longest: int, params: SamplingParams
) -> tuple[list[int], list[int], Callable[[Params], ProbeScores]]:
    """A probe for servers: token ids over all of the vocabulary, the lengths of its beginnings
    after which a token is sampled with `params`, and what the trainer makes of both with given
    parameters."""
    ids = [
        number * PROBE_STRIDE % model.architecture.vocab_size
        for number in range(min(PROBE_TOKENS, longest - 1))
    ]
    beginnings = sorted(
        {-(-len(ids) * part // PROBE_BEGINNINGS) for part in range(1, PROBE_BEGINNINGS + 1)}
    )
    batch = MicroBatch.empty(Shape(1, PROBE_TOKENS), temperature=1.0)
    batch.add(0, np.array(ids[:1]), {(0, 0, 0): np.array(ids[1:])})
    sampling = SamplingArrays(
        *(
            np.full(len(beginnings), value)
            for value in (
                np.float32(params.temperature),
                np.int32(params.top_k),
                np.float32(params.top_p),
                np.float32(params.min_p),
            )
        )
    )

    def next_token(parameters: Params, arrays: LearnerBatch) -> jax.Array:
        last = jnp.array([length - 1 for length in beginnings])
        return sampling_logprobs(next_token_logits(model, parameters, arrays, last), sampling)

    next_token_program = model.role.jit(next_token, out_shardings=model.role.replicated)

    def score(parameters: Params) -> ProbeScores:
        scorer = ModelScorer(model, parameters)
        logprobs = unpack([batch], [np.asarray(scorer.score(batch.arrays))])[0, 0]
        return ProbeScores(
            logprobs, np.asarray(next_token_program(parameters, scorer.put(batch.arrays)))
        )

    return ids, beginnings, score


def server_words(config: Config, model: Model, version: FolderVersion) -> list[str]:
    """The command that starts a server."""
    first, *rest = shlex.split(config.vllm.python)
    adapter = model.architecture.adapter if version.base else None
    return [
        os.path.expanduser(first),
        *rest,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={version.base or version.place}",
        f"--dtype={model.dtype.name}",
        f"--max-model-len={longest_sequence(config) + 1}",
        "--enable-scale-out",
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
        f"--tensor-parallel-size={config.sampler.devices_per_worker}",
        *[f"--gpu-memory-utilization={config.vllm.memory}"] * (config.vllm.memory > 0),
        *["--enable-sleep-mode"] * (config.shares_gpu and model.role.platform != "cpu"),
        # Room for the adapters of all versions that may be sampled from at once, and the next.
        *(
            [
                "--enable-lora",
                f"--max-loras={schedule_of(config.train).max_staleness + 2}",
                f"--max-lora-rank={next(one for one in LORA_RANKS if one >= adapter.rank)}",
            ]
            if adapter
            else []
        ),
        *["--return-sampling-mask"] * (max_support(config) > 0),
        # vLLM 0.32 on a CPU ends with an error where a prompt whose request has a seed is computed
        # in parts.
        *["--no-enable-chunked-prefill"] * (model.role.platform == "cpu"),
        *config.vllm.arguments,
    ]


def trainer_proof(
    config: Config, model: Model, tokenizer: Tokenizer, say: Callable[[str], None]
) -> WorkerFingerprint | None:
    """What a worker's numbers must be, as this process samples on such devices as a worker's; None
    where the trainer has too few or no room."""
    if len(jax.devices()) < config.sampler.devices_per_worker:
        return None
    try:
        _, proof = make_worker(config, model.architecture, model.dtype.name, tokenizer)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(
            "the trainer has no room to sample as a worker does, so it cannot be the measure of "
            "their numbers"
        )
        return None
    ignored = (
        {"devices"}
        if model.role.platform == "cpu"
        else {"devices", "platform", "processor", "threads"}
    )
    return replace(
        proof, facts={name: value for name, value in proof.facts.items() if name not in ignored}
    )


def make_worker(
    config: Config, architecture: Architecture, dtype: Any, tokenizer: Tokenizer
) -> tuple[EngineHost, WorkerFingerprint]:
    """What a worker samples with, in its own process, and its proof."""
    cache_by_configuration()
    count = config.sampler.devices_per_worker
    devices, tensor = available_devices(config.mesh), config.mesh.sampler_tensor or count
    if len(devices) < count:
        raise ShoalError(
            f"sampler.devices_per_worker={count}: a worker finds {len(devices)} of kind "
            f"{devices[0].device_kind}; lower it, or ask for more by sampler.resources"
        )
    mesh = MeshSection(
        data=count // tensor, tensor=tensor, compiler_options=config.mesh.compiler_options
    )
    roles, size = make_roles(mesh, devices[:count]), config.batch.group_size
    model = make_model(
        replace(config.model, dtype=dtype),
        sampled_architecture(config, architecture),
        roles.sampler,
    )
    multiply_exactly(model.dtype, ExitStack())  # for all of the process
    make = training_engine_maker(config, model, roles, tokenizer)
    places = training_slots(config, roles, architecture)
    host = EngineHost(make, capacity=QUEUED * places.slots, shares_memory=False)
    # A resumed run may have other settings, and with them other programs, whose numbers are not
    # those of before.
    settings = repr(
        (architecture, dtype, config.model.attention, mesh, config.sampling, size, places)
    )
    facts = machine() | {"settings": hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()}
    return host, fingerprint_of(make(Purpose.TRAIN, size), config.sampling.params, size, facts)


def engine_maker(
    model: Model,
    tokenizer: Tokenizer,
    sampling: SamplingSection,
    places: SlotPlan,
    group_size: int,
    max_support: int = 0,
    truncated: bool = False,
) -> Callable[[Purpose, int], Engine]:
    """A function that gives the engine for groups of a purpose and size: one for all sizes that its
    rows can be filled with, made when it is first asked for. Training's stores the support of each
    token, at most `max_support` ids; where that is not 0, the others have engines of their own,
    which store none. `truncated`: requests may truncate, though the settings do not."""
    engines: dict[tuple[int, int], Engine] = {}

    def make(purpose: Purpose, size: int) -> Engine:
        support = max_support if purpose is Purpose.TRAIN else 0
        slots, siblings = places.rows_for(size, group_size, support == max_support)
        if (siblings, support) not in engines:
            engines[siblings, support] = Engine(
                model,
                slots=slots,
                siblings_per_row=siblings,
                group_size=group_size if siblings == places.siblings else size,
                max_prompt_tokens=sampling.slot_prompt,
                max_completion_tokens=sampling.max_completion_tokens,
                eos_ids=tokenizer.eos_ids,
                decode=tokenizer.decode,
                truncated=truncated or sampling.params.truncated,
                max_support=support,
                pages=places.room.pages(slots, siblings),
            )
        return engines[siblings, support]

    return make


def sampling_engine_maker(
    model: Model,
    tokenizer: Tokenizer,
    sampling: SamplingSection,
    slots: int,
    group_size: int,
    truncated: bool = False,
) -> Callable[[Purpose, int], Engine]:
    """A function that makes the engines of a command that only samples, `slots` completions at
    once."""
    # However few prompts are asked: another number of rows is another program, whose last bits
    # differ on some processors, and an answer may not depend on how many others were asked for.
    # Only an evaluation, whose questions are its data's, is given fewer slots where it has fewer
    # completions.
    places = plan_slots(sampling, model, slots, group_size, math.inf)
    return engine_maker(model, tokenizer, sampling, places, group_size, truncated=truncated)


def training_engine_maker(
    config: Config,
    model: Model,
    roles: Roles,
    tokenizer: Tokenizer,
    architecture: Architecture | None = None,
    host: int = 0,
) -> Callable[[Purpose, int], Engine]:
    """A function that makes the engines of a host of a training run. `architecture`: of the model
    that memory is reckoned with, if it is not that of `model`."""
    places = training_slots(config, roles, architecture or model.architecture)
    return engine_maker(
        model.on(roles.hosts[host]),
        tokenizer,
        config.sampling,
        places,
        config.batch.group_size,
        max_support(config),
    )


def run_engines(
    config: Config,
    model: Model,
    roles: Roles,
    tokenizer: Tokenizer,
    architecture: Architecture | None = None,
) -> Iterator[tuple[str, Engine]]:
    """The engines of a run, one by one: for training's groups, greedy answers and pass@k's groups;
    several may be the same. Nothing is compiled."""
    make = training_engine_maker(config, model, roles, tokenizer, architecture)
    yield "training", make(Purpose.TRAIN, config.batch.group_size)
    yield "evaluation", make(Purpose.EVALUATE, 1)
    if config.pass_k:
        yield "pass@k", make(Purpose.EVALUATE, config.pass_k)

"""Makes the sampler of a run or a command: the fleet of hosts, and the engines that they sample
with.

| who samples | fleet | its hosts |
| --- | --- | --- |
| eval; training whose sampler shares the trainer's devices | `caller_fleet` | the caller's thread |
| training whose sampler has devices of its own | `thread_fleet` | a thread a replica of the model |
| training with `sampler.kind=ray` | `ray_fleet` | a worker process in a Ray cluster each |
| training with `sampler.kind=vllm` | `vllm_fleet` | a server of vLLM each |

`training_fleet` chooses among them. `generate`, `doctor` and `replay` have no fleet: they use an
engine directly. A function (purpose, group size) -> engine is called an engine maker here; it makes
an engine when one is first needed, and keeps it.
"""

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
from shoal.config.derived import longest_sequence, max_support, replays_routes
from shoal.config.sections.devices import MeshSection, PublishSection, VllmSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.train import Config
from shoal.files import check_local, is_offline
from shoal.job.cache import cache_by_configuration
from shoal.job.environments import TurnFormats, make_turn_driver
from shoal.job.fingerprint import machine
from shoal.mesh import Roles, available_devices, make_roles
from shoal.model.architecture import Architecture
from shoal.model.transformer import Model
from shoal.records import HostLost, Params, Purpose, SamplingParams, ShoalError
from shoal.report.console import Console
from shoal.rollout import http_engine, vllm
from shoal.rollout.fleet import Fleet
from shoal.rollout.host import EngineHost, ThreadHost
from shoal.rollout.ledger import GroupRewards
from shoal.rollout.turn_driver import TurnDriver
from shoal.rollout.worker_facts import WorkerFingerprint, WorkerParity, fingerprint_of
from shoal.sampler.engine import Engine
from shoal.sampler.sample_tokens import SAMPLING_TYPES, sampling_logprobs
from shoal.stop import StopSignal
from shoal.trainer.batch import LearnerBatch, MicroBatch, Shape, unpack
from shoal.trainer.loss import next_token_logits
from shoal.trainer.schedule import schedule_of
from shoal.trainer.scorers import ModelScorer
from shoal.weights.folder_store import FolderStore, FolderVersion, ProbeScores
from shoal.weights.publish_folder import KEY, default_folder
from shoal.weights.sampler_copy import num_bytes
from shoal.weights.source import ModelSource, make_model, multiply_exactly
from shoal.weights.store import (
    FileStore,
    MemoryStore,
    WeightStore,
)

if TYPE_CHECKING:
    from shoal.rollout.ray_host import Cluster


HERE = "here"
"""Name of the host of a `caller_fleet`."""


PROBE_TOKENS = 64
"""Number of tokens in the probe, a text that a server of vLLM and the trainer both score."""


PROBE_STRIDE = 7919
"""Difference between the ids of neighbouring tokens in the probe, so that they cover the
vocabulary."""


PROBE_BEGINNINGS = 4
"""Number of beginnings of the probe after which a server samples one token."""


GAP_TOLERANCES = 3
"""A step's tokens may differ from the trainer's log-probs, in the mean, by this many times the
tolerance of the probe's log-probs."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's option `--max-lora-rank`."""


def caller_fleet(
    store: WeightStore,
    make_engine: Callable[[Purpose, int], Engine],
    rewards: GroupRewards,
    seed: int,
    on_progress: Callable[[str, int, int], None] | None = None,
    stop: StopSignal | None = None,
    turn_driver: TurnDriver | None = None,
) -> Fleet:
    """Returns a fleet with a single host, which samples in the thread that calls the fleet, with
    the engines that `make_engine(purpose, group size)` returns. The caller closes the fleet;
    `rewards` and `turn_driver` stay open then. `on_progress`: called during an evaluation with
    (name of its part, questions answered, questions of that part). `stop`: ends waits of the fleet
    once it is requested; None: never. `turn_driver`: answers the turns of tools and environments;
    None: a completion is one answer."""
    return Fleet(
        store,
        {HERE: EngineHost(make_engine)},
        rewards,
        seed,
        stop=stop or StopSignal(),
        on_progress=on_progress,
        turn_driver=turn_driver,
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
    """Returns the fleet that samples for a training run: one of vLLM's servers or of Ray's workers
    if `sampler.kind` says so; else, if the sampler has devices of its own, one with a thread for
    each replica of the model; else one that samples in the thread that calls it. The caller closes
    the fleet. `spec`: the model's files and tokenizer. `cluster`: the Ray cluster; None if none was
    joined. `turns`: how turns are written as tokens; None if rollouts are single answers."""
    tokenizer = spec.tokenizer
    turn_driver = None
    if turns:
        num_slots = all_slots(config, roles, model.architecture)
        turn_driver = make_turn_driver(turns, num_slots, config.sampling)
    if config.sampler.kind == "vllm":
        return vllm_fleet(
            config=config,
            model=model,
            roles=roles,
            spec=spec,
            rewards=rewards,
            stop=stop,
            console=console,
            turn_driver=turn_driver,
        )
    store = make_store(
        config.publish, model.on(roles.sampler), cluster, roles.hosts != [roles.sampler]
    )
    if cluster is not None:
        return ray_fleet(
            config=config,
            store=store,
            tokenizer=tokenizer,
            rewards=rewards,
            stop=stop,
            on_progress=console.answered,
            cluster=cluster,
            turn_driver=turn_driver,
        )
    if not roles.disaggregated:
        make_engine = training_engine_maker(config, model, roles, tokenizer)
        return caller_fleet(
            store=store,
            make_engine=make_engine,
            rewards=rewards,
            seed=config.seed,
            on_progress=console.answered,
            stop=stop,
            turn_driver=turn_driver,
        )
    return thread_fleet(
        config=config,
        model=model,
        roles=roles,
        tokenizer=tokenizer,
        store=store,
        rewards=rewards,
        stop=stop,
        console=console,
        turn_driver=turn_driver,
    )


def thread_fleet(
    config: Config,
    model: Model,
    roles: Roles,
    tokenizer: Tokenizer,
    store: WeightStore,
    rewards: GroupRewards,
    stop: StopSignal,
    console: Console,
    turn_driver: TurnDriver | None,
) -> Fleet:
    """Returns the fleet of a sampler that has devices of its own in this process: one host for each
    replica of the model, named `sampler 0`, `sampler 1` and so on, each in a thread of its own, so
    that sampling and training overlap. The fleet works in the background and prints notes and
    progress on `console`."""
    slots = training_slots(config, roles, model.architecture).slots
    woken = threading.Event()
    hosts = {}
    for number in range(len(roles.hosts)):
        make_engine = training_engine_maker(config, model, roles, tokenizer, host=number)
        host = EngineHost(make_engine, capacity=QUEUED * slots, shares_memory=False)
        name = f"sampler {number}"
        hosts[name] = ThreadHost(host, woken.set, name)
    return Fleet(
        store,
        hosts,
        rewards,
        config.seed,
        in_background=True,
        on_note=console.warning,
        stop=stop,
        on_progress=console.answered,
        woken=woken,
        turn_driver=turn_driver,
    )


def decided_channel(config: Config, cluster: Cluster | None) -> str:
    """Returns the value of `publish.channel` for a run that left it open: `memory` if this process
    samples, `files` if hosts read a folder (vLLM, or Ray on one machine or with `publish.folder`),
    `ray` for Ray that may span machines; "" if it depends on a Ray cluster that has not been joined
    here, as in a dry run."""
    if config.sampler.kind == "local":
        return "memory"
    if config.sampler.kind == "vllm" or config.publish.folder:
        return "files"
    if cluster is None:
        return ""
    # Machines that share no folder get Ray's objects.
    return "ray" if cluster.may_span_machines else "files"


def make_store(
    section: PublishSection, model: Model, cluster: Cluster | None, in_parts: bool
) -> WeightStore:
    """Returns the store through which hosts get published weights: arrays of this process for
    `publish.channel=memory`, Ray's objects for `ray`, else files in `publish.folder`; if that is
    not set, in a folder that `default_folder` chooses for the size of the weights. `in_parts`: True
    if each host has only some of the sampler's devices. Side effect: if Ray was started here, its
    watcher removes the files after this process has ended."""
    folder = check_local(section.folder, KEY)
    if section.channel == "memory":
        return MemoryStore(model, in_parts)
    if section.channel == "ray":
        from shoal.weights.ray_store import RayStore

        return RayStore(model)
    size = num_bytes(model) + num_bytes(model, trained=False)
    if folder == Path():  # the key is not set
        folder = default_folder(size)
    store = FileStore(folder, model)
    if cluster is not None and cluster.connection.watcher is not None:
        cluster.connection.watcher.remove(store.folder)
    return store


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
"""Prefixes of the environment variables that decide numbers, threads and memory. A worker gets the
trainer's values of them."""


SHARED_FACTS = ("python", "shoal", "jax", "jaxlib", "numpy")
"""Entries of `machine` that a worker must share with the trainer. The kind of device is not among
them, because it may differ."""


def open_cluster(config: Config, console: Console, stack: ExitStack) -> Cluster | None:
    """Joins or starts the Ray cluster of a run, and returns it; None if `sampler.kind` is not
    `ray`. This must happen before JAX looks for devices, because Ray also assigns the trainer's
    devices: it sets the variable that hides the others from this process. Leaving `stack` closes
    the cluster and restores the environment's variables. In a dry run it only checks the address,
    and returns None. ShoalError if Ray cannot be imported, or if no accelerator is left for the
    trainer. Prints a note about the cluster on `console`."""
    sampler = config.sampler
    if sampler.kind != "ray":
        return None
    try:
        from shoal.rollout import ray_host
    except ImportError as error:  # a broken installation, or another version of Ray
        raise ShoalError(
            f"sampler.kind=ray: Ray cannot be imported ({error}); pip install '.[ray]' in the "
            "clone of Shoal"
        ) from error

    if is_offline():
        ray_host.check_address(config.ray.address)
        return None
    devices = sampler.devices_per_worker
    requested = sampler.asked
    num_cpus = round(sampler.workers * requested.get("CPU", devices))
    connection = ray_host.connect(config.ray.address, num_cpus)
    accelerator = ray_host.accelerator()
    cluster = ray_host.Cluster(
        connection=connection,
        workers=sampler.workers,
        resources=requested or {accelerator: devices},
        wait_seconds=config.ray.wait_seconds,
        environment=worker_environment(devices, accelerator),
        parity=WorkerParity(config.train.versions == "fixed", console.warning),
        say=console.warning,
    )
    stack.callback(cluster.close)
    visible_before = {name: os.environ.get(name) for name in ray_host.VISIBLE.values()}
    stack.callback(set_variables, visible_before)
    holder, cluster.trainer_devices = ray_host.hold_accelerators(
        accelerator,
        config.mesh.trainer,
        sampler.workers * cluster.resources.get(accelerator, 0),
        config.ray.wait_seconds,
    )
    # Ray frees the accelerators when the last reference to their holder is gone.
    stack.callback(lambda holder: None, holder)
    dashboard = f", dashboard http://{connection.dashboard}" if connection.dashboard else ""
    if connection.watcher is None:
        where = f"the Ray cluster {connection.address}"
    else:
        where = "Ray, started here"
    console.note(f"sampler: {sampler.workers} x {devices} {accelerator} in {where}{dashboard}")
    cluster.say_room()
    return cluster


def set_variables(values: Mapping[str, str | None]) -> None:
    """Sets environment variables of this process; a variable whose value is None is removed."""
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def worker_environment(devices: int, accelerator: str) -> dict[str, str]:
    """Returns the environment variables of a Ray worker on `devices` devices: those of this process
    that decide numbers, threads or memory (ENVIRONMENT). If `accelerator`, Ray's name of the
    devices, is CPU and there are several, XLA_FLAGS also makes JAX split the worker's CPU into that
    many, unless it gives a number itself."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    flag = "--xla_force_host_platform_device_count"
    xla_flags = variables.get("XLA_FLAGS", "")
    if accelerator == "CPU" and devices > 1 and flag not in xla_flags:
        variables["XLA_FLAGS"] = f"{xla_flags} {flag}={devices}".strip()
    return variables


def ray_fleet(
    config: Config,
    store: WeightStore,
    tokenizer: Tokenizer,
    rewards: GroupRewards,
    stop: StopSignal,
    on_progress: Callable[[str, int, int], None],
    cluster: Cluster,
    turn_driver: TurnDriver | None,
) -> Fleet:
    """Returns the fleet whose hosts are workers of a Ray cluster, named `worker 0`, `worker 1` and
    so on; each joins when the cluster has free resources for it. If workers must compute the same
    numbers (`train.versions=fixed`), this process samples a known group while they start, and
    theirs are compared with it. `on_progress`: called during an evaluation with (name of its part,
    questions answered, questions of that part). Side effect: sets in `cluster` how workers are made
    and what they are compared with."""
    model = store.model
    woken = threading.Event()
    facts = machine()
    cluster.parity.facts = {name: facts[name] for name in SHARED_FACTS}
    cluster.wake = woken.set
    cluster.make = functools.partial(
        make_worker, config, model.architecture, model.dtype.name, tokenizer
    )
    names = [f"worker {number}" for number in range(config.sampler.workers)]
    hosts = {name: cluster.start(name) for name in names}
    if cluster.parity.strict:
        # Computed while the workers start, because they take as long to compile the same programs.
        proof = trainer_proof(config, model, tokenizer, cluster.say)
        if proof:
            cluster.parity.wanted = {"the trainer": proof, **cluster.parity.wanted}
    return Fleet(
        store,
        hosts,
        rewards,
        config.seed,
        in_background=True,
        restart=cluster.start,
        restarts=config.sampler.restarts,
        stall_seconds=config.sampler.stall_seconds,
        on_note=cluster.say,
        stop=stop,
        on_progress=on_progress,
        woken=woken,
        turn_driver=turn_driver,
    )


def vllm_fleet(
    config: Config,
    model: Model,
    roles: Roles,
    spec: ModelSource,
    rewards: GroupRewards,
    stop: StopSignal,
    console: Console,
    turn_driver: TurnDriver | None,
) -> Fleet:
    """Returns the fleet whose hosts are servers of vLLM: those at `vllm.urls`, or, if there are
    none, as many as `sampler.workers` says, which are started here. ShoalError if a server does not
    answer or the program that starts servers is missing. Servers that are started here write logs
    `shoal-PID-NAME.log` into the folder for temporary files, and these stay."""
    check_servers(config.vllm)
    folder = check_local(config.publish.folder, KEY)
    size = num_bytes(model) + num_bytes(model, trained=False)
    longest = longest_sequence(config)
    woken = threading.Event()
    ids, beginnings, score = trainer_probe(model, longest, config.sampling.params)
    if folder == Path():  # the key is not set
        folder = default_folder(size)
    store = FolderStore(
        parent=folder,
        model=model,
        source=spec.folder,
        config=spec.config,
        score=score,
        adapters=sends_adapters(config.vllm, model),
        starts=not config.vllm.urls,
        origin=spec.origin(),
    )
    # Servers on the trainer's GPU give its memory back while the trainer works.
    sleeps = config.shares_gpu and model.role.platform != "cpu"
    settings = http_engine.Settings(
        probe=ids,
        tolerance=config.vllm.tolerance,
        eos_ids=spec.tokenizer.eos_ids,
        longest=longest,
        capacity=training_slots(config, roles, model.architecture).slots,
        max_support=max_support(config),
        sleeps=sleeps,
        beginnings=beginnings,
        params=config.sampling.params,
    )

    def open_server(name: str, version: FolderVersion) -> http_engine.Server:
        """Connects to the server at the URL `name`; without `vllm.urls` starts one instead, which
        serves `version` and logs to a file in the folder for temporary files."""
        if config.vllm.urls:
            return vllm.server_at(name)
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            **os.environ,
            "PYTHONPATH": "",
            **store.watcher.environment,
        }
        # The log stays after the run, for whoever looks for the cause of a fault.
        log = Path(tempfile.gettempdir()) / f"shoal-{os.getpid()}-{name}.log"
        command = server_command(config, model, version)
        return http_engine.Server.start(command, variables, log, vllm.api_key())

    def start(name: str) -> http_engine.HttpHost:
        """Starts the host of the server `name`."""
        open_named = functools.partial(open_server, name)
        return http_engine.HttpHost(name, vllm.VllmEngine, open_named, settings, woken.set)

    # If the sampler truncates the distribution and the trainer does not, log-probs differ anyway.
    is_compared = not config.sampling.params.truncated or config.algorithm.match_sampling_support
    logprob_tolerance = GAP_TOLERANCES * settings.tolerance if is_compared else 0.0
    names = config.vllm.urls
    if not names:
        names = [f"vllm-{number}" for number in range(config.sampler.workers)]
    return Fleet(
        store,
        {name: start(name) for name in names},
        rewards,
        config.seed,
        in_background=True,
        restart=start,
        logprob_tolerance=logprob_tolerance,
        shares_memory=sleeps,
        restarts=config.sampler.restarts,
        stall_seconds=config.sampler.stall_seconds,
        on_note=console.warning,
        stop=stop,
        on_progress=console.answered,
        woken=woken,
        turn_driver=turn_driver,
    )


def check_servers(section: VllmSection) -> None:
    """Raises ShoalError unless every server at `vllm.urls` answers within CONNECT_SECONDS, all
    together, and the program `vllm.python`, which starts servers, exists; without `vllm.python`
    only the servers are checked."""
    deadline = time.monotonic() + http_engine.CONNECT_SECONDS
    faults = []
    for url in section.urls:
        remaining = max(1.0, deadline - time.monotonic())
        try:
            vllm.server_at(url).wait_until_ready(remaining)
        except HostLost as error:
            faults.append(str(error))
    if faults:
        raise ShoalError(
            f"vllm.urls: {'; '.join(faults)}; start them, or leave out those that do not run"
        )
    if not section.python:
        return
    program = os.path.expanduser(shlex.split(section.python)[0])
    if not shutil.which(program):
        raise ShoalError(
            f"vllm.python={section.python}: there is no program {program}; make an environment "
            "(python -m venv FOLDER; FOLDER/bin/pip install vllm) and give FOLDER/bin/python",
            "vllm.python",
        )


def sends_adapters(section: VllmSection, model: Model) -> bool:
    """True if each version is sent to servers of vLLM as an adapter alone, False if as whole
    weights: without an adapter; if one of the servers at `vllm.urls` lacks vLLM's call that loads
    adapters; or if servers that are started here could not compute with this one, because of its
    rank or its type."""
    adapter = model.architecture.adapter
    if adapter is None:
        return False
    if section.urls:
        return all(vllm.takes_adapters(vllm.server_at(url)) for url in section.urls)
    # vLLM's kernels for adapters take no float32 on a GPU.
    has_kernel = model.dtype != np.float32 or model.role.platform == "cpu"
    return adapter.rank <= LORA_RANKS[-1] and has_kernel


def trainer_probe(
    model: Model, longest: int, params: SamplingParams
) -> tuple[list[int], list[int], Callable[[Params], ProbeScores]]:
    """Makes a probe that compares a server's numbers with the trainer's. Returns (ids, beginnings,
    score). `ids`: at most PROBE_TOKENS tokens from all over the vocabulary, fewer than `longest`,
    which both sides score. `beginnings`: lengths of beginnings of these tokens; after each the
    server samples a token with `params`. `score(parameters)`: the trainer's log-probs of both. It
    compiles when it is first called."""
    num_tokens = min(PROBE_TOKENS, longest - 1)
    vocab_size = model.architecture.vocab_size
    ids = [position * PROBE_STRIDE % vocab_size for position in range(num_tokens)]
    # A quarter, half, three quarters and all of the tokens, rounded up. A set, because the lengths
    # of a short probe's beginnings may be equal.
    lengths = {-(-len(ids) * part // PROBE_BEGINNINGS) for part in range(1, PROBE_BEGINNINGS + 1)}
    beginnings = sorted(lengths)
    batch = MicroBatch.empty(Shape(1, PROBE_TOKENS), temperature=1.0)
    # In row 0: the first token counts as the prompt, the others as its completion. A key is (group,
    # completion, index of its first token).
    batch.add(0, np.array(ids[:1]), {(0, 0, 0): np.array(ids[1:])})
    sampling = jax.tree.map(functools.partial(np.zeros, len(beginnings)), SAMPLING_TYPES)
    sampling.set(slice(None), params)

    def next_token(parameters: Params, arrays: LearnerBatch) -> jax.Array:
        """Returns the log-probs of the token after each beginning; compiled."""
        last = jnp.array([length - 1 for length in beginnings])
        return sampling_logprobs(next_token_logits(model, parameters, arrays, last), sampling)

    next_token_program = model.role.jit(next_token, out_shardings=model.role.replicated)

    def score(parameters: Params) -> ProbeScores:
        """Returns what the trainer computes with these parameters: the log-prob of each token of
        the probe after the first, and after each beginning the log-probs of all tokens of the
        vocabulary."""
        scorer = ModelScorer(model, parameters)
        # [0, 0]: group 0, completion 0
        logprobs = unpack([batch], [np.asarray(scorer.score(batch.arrays))])[0, 0]
        next_logprobs = next_token_program(parameters, scorer.put(batch.arrays))
        return ProbeScores(logprobs, np.asarray(next_logprobs))

    return ids, beginnings, score


def server_command(config: Config, model: Model, version: FolderVersion) -> list[str]:
    """Returns the command that starts a server of vLLM, as a list of arguments. `version`: the
    weights that the server starts with: a model's folder, or, if `version.base` is set, a folder
    with an adapter alone for the model in `base`, which the server then loads."""
    program, *program_arguments = shlex.split(config.vllm.python)
    command = [os.path.expanduser(program), *program_arguments]
    command += [
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={version.base or version.folder}",
        f"--dtype={model.dtype.name}",
        f"--max-model-len={longest_sequence(config) + 1}",
        "--enable-scale-out",
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
        f"--tensor-parallel-size={config.sampler.devices_per_worker}",
    ]
    if config.vllm.memory > 0:
        command.append(f"--gpu-memory-utilization={config.vllm.memory}")
    if config.shares_gpu and model.role.platform != "cpu":
        command.append("--enable-sleep-mode")
    adapter = model.architecture.adapter if version.base else None
    if adapter:
        # The server must hold the adapters of all versions that may be sampled from at the same
        # time, and the next one.
        max_adapters = schedule_of(config.train).max_staleness + 2
        max_rank = next(rank for rank in LORA_RANKS if rank >= adapter.rank)
        command += ["--enable-lora", f"--max-loras={max_adapters}", f"--max-lora-rank={max_rank}"]
    if max_support(config) > 0:
        command.append("--return-sampling-mask")
    if model.role.platform == "cpu":
        # vLLM 0.32 on a CPU fails if a request has a seed and its prompt is computed in parts.
        command.append("--no-enable-chunked-prefill")
    command += config.vllm.arguments
    return command


def trainer_proof(
    config: Config, model: Model, tokenizer: Tokenizer, say: Callable[[str], None]
) -> WorkerFingerprint | None:
    """Samples, in this process, the group that each worker samples when it starts, and returns the
    fingerprint that theirs must equal. Leaves out facts in which workers may differ: the number of
    devices, and on accelerators the host's processor. None if the trainer has fewer devices than a
    worker, or too little memory, which is reported by `say`. Other errors of JAX are raised."""
    if len(jax.devices()) < config.sampler.devices_per_worker:
        return None
    try:
        _, proof = make_worker(config, model.architecture, model.dtype.name, tokenizer)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(
            "the trainer has no memory to sample as a worker does, so the workers' numbers are not "
            "compared with its own"
        )
        return None
    ignored = {"devices"}
    if model.role.platform != "cpu":
        ignored |= {"platform", "processor", "threads"}
    facts = {name: value for name, value in proof.facts.items() if name not in ignored}
    return replace(proof, facts=facts)


def make_worker(
    config: Config, architecture: Architecture, dtype: Any, tokenizer: Tokenizer
) -> tuple[EngineHost, WorkerFingerprint]:
    """Makes what a Ray worker samples with; runs in the worker's process. Returns the host and the
    fingerprint of its numbers, which the trainer compares. Side effects: sets JAX's compilation
    cache and, for float32, full precision of products, for all of the process. ShoalError if there
    are fewer devices than `sampler.devices_per_worker`. `dtype`: the name of the data type that the
    trainer computes with."""
    cache_by_configuration()
    count = config.sampler.devices_per_worker
    devices = available_devices(config.mesh)
    tensor = config.mesh.sampler_tensor or count
    if len(devices) < count:
        raise ShoalError(
            f"sampler.devices_per_worker={count}: a worker finds {len(devices)} of kind "
            f"{devices[0].device_kind}; lower it, or request more with sampler.resources"
        )
    mesh = MeshSection(
        data=count // tensor, tensor=tensor, compiler_options=config.mesh.compiler_options
    )
    roles = make_roles(mesh, devices[:count])
    group_size = config.batch.group_size
    model = make_model(
        replace(config.model, dtype=dtype),
        sampled_architecture(config, architecture),
        roles.sampler,
    )
    multiply_exactly(model.dtype, ExitStack())  # stays set until the process ends
    make_engine = training_engine_maker(config, model, roles, tokenizer)
    plan = training_slots(config, roles, architecture)
    host = EngineHost(make_engine, capacity=QUEUED * plan.slots, shares_memory=False)
    # A resumed run may have other settings, and with them other programs, whose numbers differ. So
    # the fingerprint contains a digest of the settings.
    settings = repr(
        (architecture, dtype, config.model.attention, mesh, config.sampling, group_size, plan)
    )
    digest = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    facts = machine() | {"settings": digest}
    engine = make_engine(Purpose.TRAIN, group_size)
    return host, fingerprint_of(engine, config.sampling.params, group_size, facts)


def engine_maker(
    model: Model,
    tokenizer: Tokenizer,
    sampling: SamplingSection,
    plan: SlotPlan,
    group_size: int,
    max_support: int = 0,
    truncated: bool = False,
    evaluation_truncated: bool = False,
    records_experts: bool = False,
) -> Callable[[Purpose, int], Engine]:
    """Returns a function (purpose, group size) -> engine. It makes an engine when one is first
    needed, and returns the same one for all group sizes that its rows can be filled with.

    `plan`: how many completions an engine holds at once, and how many of a group share a row.
    `max_support`: the most token ids that training's engine stores for each sampled token, those
    that truncation left to sample from; 0: none. If it is not 0, evaluations have engines of their
    own, which store none. `truncated`: True if a request may truncate the distribution (top-k,
    top-p, min-p) although `sampling` does not; `evaluation_truncated`: the same of requests of
    evaluations alone. `records_experts`: completions of training record the experts of their
    tokens.
    """
    engines: dict[tuple[int, int, bool], Engine] = {}
    truncates_in_training = truncated or sampling.params.truncated

    def make(purpose: Purpose, size: int) -> Engine:
        """Returns the engine for groups of `size` completions; it is made now if no earlier one has
        rows of this form, stores as much truncation support and truncates where this one does."""
        support = max_support
        truncates = truncates_in_training
        if purpose is not Purpose.TRAIN:
            support = 0
            truncates = truncates or evaluation_truncated
        # Training and evaluations share an engine if it stores as much for both, and truncates for
        # both or for neither.
        is_shared = support == max_support and truncates == truncates_in_training
        slots, siblings = plan.rows_for(size, group_size, is_shared)
        if (siblings, support, truncates) not in engines:
            largest_group = group_size if siblings == plan.siblings else size
            engines[siblings, support, truncates] = Engine(
                model,
                slots=slots,
                siblings_per_row=siblings,
                group_size=largest_group,
                max_prompt_tokens=sampling.slot_prompt,
                max_completion_tokens=sampling.max_completion_tokens,
                eos_ids=tokenizer.eos_ids,
                decode=tokenizer.decode,
                truncated=truncates,
                max_support=support,
                records_experts=records_experts,
                pages=plan.room.pages(slots, siblings),
            )
        return engines[siblings, support, truncates]

    return make


def sampling_engine_maker(
    model: Model,
    tokenizer: Tokenizer,
    sampling: SamplingSection,
    slots: int,
    group_size: int,
    truncated: bool = False,
) -> Callable[[Purpose, int], Engine]:
    """Returns the engine maker of a command that only samples (eval, generate, serve): a function
    (purpose, group size) -> engine, which makes an engine when one is first needed and keeps it. An
    engine holds at most `slots` completions at once. `group_size`: the number of completions of a
    prompt for which rows are planned. `truncated`: True if a request may truncate the distribution
    (top-k, top-p, min-p) although `sampling` does not."""
    # The number of slots does not depend on how many prompts there are. Another number of rows is
    # another program, whose last bits differ on some processors, and an answer must not depend on
    # how many others were requested. Only an evaluation gets fewer slots if it has fewer
    # completions, because its questions are fixed by its data. So math.inf stands for the number of
    # completions that are requested at the same time.
    plan = plan_slots(sampling, model, slots, group_size, math.inf)
    return engine_maker(model, tokenizer, sampling, plan, group_size, truncated=truncated)


def training_engine_maker(
    config: Config,
    model: Model,
    roles: Roles,
    tokenizer: Tokenizer,
    architecture: Architecture | None = None,
    host: int = 0,
) -> Callable[[Purpose, int], Engine]:
    """Returns the engine maker of one host of a training run's sampler, `roles.hosts[host]`: a
    function (purpose, group size) -> engine, which makes an engine when one is first needed and
    keeps it. `host` counts from 0. `architecture`: the one from which the number of slots is
    planned, if it is not that of `model`, as in a plan whose model has fewer layers."""
    plan = training_slots(config, roles, architecture or model.architecture)
    return engine_maker(
        model.on(roles.hosts[host]),
        tokenizer,
        config.sampling,
        plan,
        config.batch.group_size,
        max_support(config),
        evaluation_truncated=config.evaluation.params(config.sampling.params).truncated,
        records_experts=replays_routes(config),
    )


def run_engines(
    config: Config,
    model: Model,
    roles: Roles,
    tokenizer: Tokenizer,
    architecture: Architecture | None = None,
) -> Iterator[tuple[str, Engine]]:
    """Yields (name, engine) for each use that a training run makes of its sampler: `training`'s
    groups, the answers of an `evaluation`, and groups of `pass@k` if the run measures it.
    Several names may have the same engine. Compiles nothing. All are engines of the first host.
    `architecture`: the one from which the number of slots is planned, if it is not that of
    `model`."""
    make_engine = training_engine_maker(config, model, roles, tokenizer, architecture)
    yield "training", make_engine(Purpose.TRAIN, config.batch.group_size)
    yield "evaluation", make_engine(Purpose.EVALUATE, config.evaluation.samples)
    if config.pass_k:
        yield "pass@k", make_engine(Purpose.EVALUATE, config.pass_k)

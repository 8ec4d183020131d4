"""`shoal launch`: writes a job of `shoal` as an image, a command, a manifest or a script for a
cluster, and starts it there.

    target, topology, -- train ...
        ->  Workload: hosts, chips, the words of the job
        ->  words of a shell, or a manifest as a dictionary: quoted or dumped, then printed
        ->  given to docker, ray, sbatch, kubectl or xpk unless it is a dry run

Values are never pasted into the text of a shell script or of YAML, where they could be read as more
than a value. A job is resumed by the same command: by its run_name, which `launch` adds if it has
none."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from shoal.commands.multirun import combine
from shoal.config.arguments import switch_of
from shoal.config.commands import COMMANDS, LaunchConfig
from shoal.config.merge import compose
from shoal.config.sections.devices import MeshSection
from shoal.config.train import Config
from shoal.mesh.topology import Topology, parse_topology, placeholder_devices
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.text import count

CLIENTS = {
    "docker": ("docker", ["bash", "-ec"], "Docker, with its daemon"),
    "ray": ("ray", ["bash", "-ec"], "'.[ray]', and a cluster at RAY_API_SERVER_ADDRESS"),
    "slurm": ("sbatch", ["sbatch"], "Slurm: run this on a login node of the cluster"),
    "gke": (
        "kubectl",
        ["kubectl", "apply", "-f", "-"],
        "kubectl, with the credentials of the cluster",
    ),
    "xpk": (
        "xpk",
        ["bash", "-ec"],
        "xpk, in an environment of its own (pipx install xpk), with gcloud and kubectl",
    ),
}
"""Target -> (the program that starts a job there, the command that gets the printed text, what has
to be installed)."""

NAMES = {
    "v4": ("tpu-v4-podslice", "v4"),
    "v5e": ("tpu-v5-lite-podslice", "v5litepod"),
    "v5p": ("tpu-v5p-slice", "v5p"),
    "v6e": ("tpu-v6e-slice", "v6e"),
    "tpu7x": ("tpu7x", "tpu7x"),
    "l4": ("nvidia-l4", "l4"),
    "a100-40gb": ("nvidia-tesla-a100", "a100-40gb"),
    "a100": ("nvidia-a100-80gb", "a100-80gb"),
    "h100": ("nvidia-h100-80gb", "h100-80gb"),
    "h200": ("nvidia-h200-141gb", "h200-141gb"),
    "b200": ("nvidia-b200", "b200"),
}
"""Kind of a topology -> (GKE's name of the accelerator, the first part of xpk's name of a machine
or slice)."""

PROXY = (
    "JAX_PLATFORMS=proxy",
    "JAX_BACKEND_TARGET=grpc://127.0.0.1:29000",
    "ENABLE_PATHWAYS_PERSISTENCE=1",
)
"""Environment of a process that uses Pathways, the same as in xpk's own jobs."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "SHOAL_MESH_TOKEN")
"""Variables that a job gets from the environment, or in Kubernetes from a Secret. Their values are
never printed."""


def launch(config: LaunchConfig, console: Console) -> None:
    """Prints the script, manifest or command that starts the job on `config.target`, and starts it
    with the target's client unless it is a dry run. Raises ShoalError if the job cannot run on
    these devices, if the client is not installed, or if the client fails. The text is printed
    before the last two errors. Returns after the client has ended. The job may still be waiting or
    running then; with `docker` the client ends when the job does."""
    write = {
        "docker": docker_script,
        "ray": ray_script,
        "slurm": slurm_script,
        "gke": manifest,
        "xpk": xpk_command,
    }
    text = write[config.target](Workload(config))
    print(text, end="", flush=True)
    if config.dry_run:
        return
    client, argv, needed = CLIENTS[config.target]
    if shutil.which(client) is None:
        raise ShoalError(
            f"target={config.target}: {client} is not on PATH, so nothing was started; the input "
            f"that it would get is printed. It needs {needed}; --dry-run only prints"
        )
    if argv[0] == "bash":  # gets the text as its last argument, other programs get it on stdin
        ended = subprocess.run([*argv, text], text=True)
    else:
        ended = subprocess.run(argv, input=text, text=True)
    if ended.returncode:
        raise ShoalError(
            f"target={config.target}: {client} ended with exit code {ended.returncode}; the "
            "input that it got is printed"
        )


@dataclass(frozen=True)
class Workload:
    """A job together with the devices that it gets."""

    config: LaunchConfig

    @cached_property
    def topology(self) -> Topology | None:
        return parse_topology(self.config.topology) if self.config.topology else None

    @cached_property
    def training(self) -> Config | None:
        """The configuration of a job `train ...`; None for another command, or if it asks for help.
        ShoalError for wrong keys."""
        job = self.config.job
        asks_for_help = "-h" in job or "--help" in job
        if job[:1] != ("train",) or asks_for_help:
            return None
        return configuration(job[1:])

    @cached_property
    def pathways(self) -> bool:
        """True if the job asks for Pathways: a training by its key `mesh.pathways`; any other job
        by a word of its command line, `use_pathways`, `use_pathways=true` (both also with dashes
        before it) or `JAX_PLATFORMS=proxy`."""
        if self.training:
            return self.training.mesh.pathways
        words = " ".join(self.config.job).split()  # also the words within a quoted command
        requests = ("use_pathways", "use_pathways=true", PROXY[0])
        return any(word.lstrip("-") in requests for word in words)

    @property
    def name(self) -> str:
        """The job's name in a form that Kubernetes allows: at most 40 of a-z, 0-9 and -, beginning
        with a letter and not ending with -. Taken from `name=`, else the run's name, else `shoal`.
        Capitals become small letters, and each series of other characters a single -. `run-` is put
        before a name that begins with a digit. A name without any letter or digit gives `shoal`."""
        name = self.config.name
        if not name and self.training:
            name = self.training.run_name
        name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        if name[:1].isdigit():
            name = f"run-{name}"
        return name[:40].rstrip("-") or "shoal"

    @property
    def hosts(self) -> int:
        """The number of hosts; 1 without accelerators."""
        if self.topology is None:
            return 1
        return self.topology.num_hosts

    @property
    def chips(self) -> int:
        """The number of accelerators of a host; 0 if there are none."""
        if self.topology is None:
            return 0
        return self.topology.num_chips // self.hosts

    @cached_property
    def words(self) -> list[str]:
        """The job's command line. Keys are added to a training that has none of its own: run_name,
        so that it can resume (not if it has `resume`); mesh.fsdp and mesh.dcn_data, so that it uses
        all devices (only with a topology, if no key of `mesh` but `pathways` is set and samplers
        are not remote); sampler.kind=ray for the target `ray`, unless samplers are remote already.

        The first word is `shoal`; a command that is not one of Shoal's stays unchanged. ShoalError
        if there is no job, or if a training does not fit the devices. Whether it fits is checked
        only with a topology, not for the target `ray`, and not with remote samplers."""
        job = list(self.config.job)
        train = self.training
        topology = self.topology
        if not job:
            raise ShoalError(
                "there is no job: give one after --, as shoal launch target=slurm topology=h100:8 "
                "-- train task=gsm8k"
            )
        if train is None:
            is_of_shoal = job[0] in COMMANDS
            return ["shoal", *job] if is_of_shoal else job
        if not (train.run_name or train.resume):
            job.append(f"run_name={self.name}")
        if self.config.target == "ray" and not train.sampler.is_remote:
            job.append("sampler.kind=ray")
        elif topology and not train.sampler.is_remote:
            # pathways says how processes are started, not how devices share the work
            has_default_mesh = replace(train.mesh, pathways=False) == MeshSection()
            if topology.num_devices > 1 and has_default_mesh:
                job.append("mesh.fsdp=-1")
                if topology.slices > 1:
                    job.append(f"mesh.dcn_data={topology.slices}")
            self.check_roles(job, topology)
        return ["shoal", *job]

    def check_roles(self, job: Sequence[str], topology: Topology) -> None:
        """Raises ShoalError if the roles of sampler and trainer do not fit the devices, or cannot
        be split into one process on each host. `job`: the command line from `train` on, without
        `shoal`. Sets JAX's platform to cpu for this process, because the devices are only
        placeholders. For Pathways only the roles are checked, because one process has all
        devices."""
        import jax

        from shoal.mesh.roles import make_roles, process_refusal

        jax.config.update("jax_platforms", "cpu")
        devices = placeholder_devices(topology)
        mesh = configuration(job[1:]).mesh
        roles = make_roles(mesh, devices)
        if self.pathways:  # one process uses the devices of all hosts
            return
        devices_per_host = len(devices) // self.hosts
        host_of = {device: device.id // devices_per_host for device in devices}
        reason = process_refusal(mesh, roles, host_of)
        if reason:
            raise ShoalError(
                f"topology={topology}: {reason}; or use Pathways: target=xpk with "
                "mesh.pathways=true"
            )

    @property
    def command(self) -> str:
        """The job as a line for a shell."""
        return shlex.join(self.words)

    @property
    def summary(self) -> str:
        """Target, hosts and devices: `gke, 2 hosts: 16 H100`."""
        devices = self.topology.describe() if self.topology else "no accelerator"
        return f"{self.config.target}, {count(self.hosts, 'host')}: {devices}"


def configuration(words: Sequence[str]) -> Config:
    """Composes and returns the configuration of `shoal train` with these words; for a sweep that of
    its first run. `words`: the command line without `shoal train`; switches in it, such as
    `--dry-run`, are left out. ShoalError for wrong keys."""
    switches = {switch_of(word) for word in words}
    keys = [word for word in words if not switch_of(word)]
    if "multirun" in switches:
        _, keys = next(combine(Config, keys))
    return compose("train", keys)[0]


def script(lines: Sequence[str]) -> str:
    """Joins lines to a text."""
    return "".join(f"{line}\n" for line in lines)


def shell_part(name: str) -> str:
    """Returns a file of assets/launch: the part of a script that is the same for every job."""
    return resources.files("shoal").joinpath("assets", "launch", name).read_text(encoding="utf-8")


# ---- targets


def docker_script(work: Workload) -> str:
    """Returns a script with up to three steps, as the keys ask: it builds an image (`mode`), pushes
    it (`push`; with the tag `latest` if the address has none), and runs the job in it on this
    machine (if there is a job, or if neither `mode` nor `push` is set). The container sees the
    current folder as /work. ShoalError if an image is to be built and Shoal is not a clone, and if
    the job is to run and there is none."""
    config = work.config
    root = Path(__file__).parents[3]  # of a clone: the folder above src/shoal/commands
    steps = []
    if config.mode:
        if not (root / "deploy" / "Dockerfile").is_file():
            raise ShoalError(
                f"mode={config.mode}: an image is built from a clone of Shoal; install it with pip "
                "install -e in its folder"
            )
        build = ["docker", "build", f"--file={root}/deploy/Dockerfile"]
        build += [f"--build-arg=MODE={config.mode}", f"--tag={config.image}", str(root)]
        steps.append(shlex.join(build))
    if config.push:
        address = config.push
        image_name = address.rpartition("/")[2]
        if ":" not in image_name:
            address = f"{address}:latest"
        steps.append(shlex.join(["docker", "tag", config.image, address]))
        steps.append(shlex.join(["docker", "push", address]))
    if config.job or not steps:
        options = [
            "--init",
            "--rm",
            f"--name={work.name}",
            f"--stop-timeout={config.grace_seconds}",
        ]
        if work.topology and work.topology.accelerator.is_tpu:
            options += ["--privileged", "--net=host"]
        elif work.topology:
            options.append("--gpus=all")
        for name in SECRETS:
            options.append(f"--env={name}")
        here = '--volume="$PWD":/work'  # $PWD is for the shell to fill in
        image_and_command = shlex.join([config.image, *work.words])
        steps.append(f"docker run {shlex.join(options)} {here} {image_and_command}")
    return script([f"# {work.summary}", *steps])


def ray_script(work: Workload) -> str:
    """Returns a script that submits the job to the Ray cluster at RAY_API_SERVER_ADDRESS, with
    `config.options` as further options of `ray job submit`. ShoalError if there is no job."""
    words = ["ray", "job", "submit", *work.config.options, "--"]
    for word in work.words:
        words.append(ray_word(word))
    lines = [
        "#!/bin/bash",
        f"# {work.summary}; RAY_API_SERVER_ADDRESS is the address of the cluster's dashboard.",
        shell_part("ray.sh").rstrip("\n"),
        shlex.join(words),
    ]
    return script(lines)


def ray_word(word: str) -> str:
    """Returns a word of a job in the form that `ray job submit` hands on unchanged: the word itself
    if a shell reads it as it is. An empty word or one with a space or tab is escaped in another way
    than others, because Ray quotes it.

    `ray job submit` joins words by the rules of Windows (`subprocess.list2cmdline`: double quotes
    around a word with a space, a backslash before a double quote), and a shell reads the result, in
    which `$` and `;` would have an effect."""
    if shlex.quote(word) == word:
        return word
    if " " in word or "\t" in word or not word:  # Ray puts such a word in double quotes
        # Ray already doubles a backslash before a double quote or at the end.
        return re.sub(r'\\(?!\\*("|\Z))|[$`]', r"\\\g<0>", word)
    # Single quotes around all but double quotes, before which Ray puts a backslash.
    quoted = []
    for part in word.split('"'):
        escaped = part.replace("'", "'\\''")
        quoted.append(f"'{escaped}'" if part else "")
    return '"'.join(quoted)


def slurm_script(work: Workload) -> str:
    """Returns a script for sbatch. Its first lines are options for sbatch, those of
    `config.options` last; then it runs one process of the job on each host. ShoalError for a TPU,
    and if there is no job."""
    if work.topology and work.topology.accelerator.is_tpu:
        raise ShoalError(
            f"topology={work.topology}: Slurm has machines with GPUs here, such as h100:8x8; use "
            "target=gke or xpk for a TPU"
        )
    # `B:` sends the signal to the script itself, which hands it on to the run.
    options = [
        f"--job-name={work.name}",
        f"--nodes={work.hosts}",
        "--exclusive",
        "--ntasks-per-node=1",
        f"--signal=B:TERM@{work.config.grace_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    if work.chips:
        options.append(f"--gpus-per-node={work.chips}")
    options += work.config.options
    lines = ["#!/bin/bash", f"# {work.summary}", "#   sbatch FILE"]
    for option in options:
        lines.append(f"#SBATCH {option}")
    lines.append(f"set -- {work.command}")
    lines.append(shell_part("slurm.sh").rstrip("\n"))
    return script(lines)


def xpk_command(work: Workload) -> str:
    """Returns the command of xpk that creates the job, as text for a shell over several lines;
    with `create-pathways` for a job that asks for Pathways. Secrets stay names of variables, which
    the shell fills in. ShoalError if the job, the cluster or the topology is missing."""
    config = work.config
    command = work.command  # raises ShoalError if there is no job
    topology = work.topology
    if topology is None or not config.cluster:
        missing = "cluster" if topology else "topology"
        raise ShoalError(f"target=xpk needs {missing}=..., such as topology=v5p-256 cluster=NAME")
    name_of_machine = NAMES[topology.kind][1]
    if topology.accelerator.is_tpu:
        # The number in xpk's name: the cores of one slice.
        cores = topology.num_chips // topology.slices * topology.accelerator.cores
        devices = [f"--tpu-type={name_of_machine}-{cores}", f"--num-slices={topology.slices}"]
    else:
        devices = [f"--device-type={name_of_machine}-{work.chips}", f"--num-nodes={work.hosts}"]
    options = list(config.options)
    verb = "create"
    if work.pathways:
        verb = "create-pathways"
        missing = [variable for variable in PROXY if variable not in command]
        command = " ".join([*missing, command])
    elif work.hosts > 1:
        # xpk restarts after exit codes 42 and 127 to 255. A process whose neighbour has ended
        # exits with 2, so that must restart, too.
        options.append("--restart-on-exit-codes=2")
    restarts = [
        f"--max-restarts={config.restarts}",
        f"--termination-grace-period-seconds={config.grace_seconds}",
    ]
    parts = [
        f"xpk workload {verb} "
        + shlex.join([f"--workload={work.name}", f"--cluster={config.cluster}"]),
        shlex.join([*devices, f"--docker-image={config.image}"]),
        shlex.join(restarts),
    ]
    if options:
        parts.append(shlex.join(options))
    # The shell fills in the variables, so that secrets are not printed.
    # `${A:+--env A="$A"}`: the option only if A is set and not empty.
    parts.append(" ".join(f'${{{name}:+--env {name}="${name}"}}' for name in SECRETS))
    parts.append(f"--command={shlex.quote(command)}")
    return script([f"# {work.summary}", " \\\n    ".join(parts)])


# ---- Kubernetes

DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
"""The condition of a pod that the cluster takes away, for example to free its machine."""


def manifest(work: Workload) -> str:
    """Returns a Kubernetes manifest as YAML: a Job for one host, a JobSet for several, a RayJob if
    the job is a training with sampler.kind=ray. Two lines of comments come first. ShoalError if
    there is no job, or if a RayJob is needed and Ray is not installed here."""
    train = work.training
    if train and train.sampler.kind == "ray":
        resource = ray_job(work, train)
    elif work.topology is None or work.hosts == 1:
        resource = job(work)
    else:
        resource = job_set(work, work.topology)
    # width: no line is broken
    text = yaml.safe_dump(resource, sort_keys=False, allow_unicode=True, width=10**9)
    return script([f"# {work.summary}", "#   kubectl apply -f FILE"]) + text


def job(work: Workload) -> dict[str, Any]:
    """Returns the manifest of a Job on one host. The job fails at once if its container exits with
    code 2, a mistake of the user; after other codes than 0 it is tried again, up to
    `config.restarts` times. A pod that the cluster takes away is replaced and does not count."""
    rules = [
        # A pod that the cluster takes away is no failed try: the next pod resumes the run.
        {"action": "Ignore", "onPodConditions": [dict(DISRUPTED)]},
        # Exit code 2 is a mistake of the user, which another start does not cure.
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "shoal", "operator": "In", "values": [2]},
        },
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": work.name},
        "spec": {
            "backoffLimit": work.config.restarts,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": pod(work, work.chips, container_command(work))},
        },
    }


def job_set(work: Workload, topology: Topology) -> dict[str, Any]:
    """Returns the manifest of a JobSet, which runs one process on each of several hosts: a replica
    for each slice, with a pod for each host of the slice. On GPUs a training also gets the keys
    with which its processes find each other (mesh.coordinator, mesh.processes, mesh.process); on
    TPUs GKE tells them, and other commands get none. All pods restart together if one fails, up to
    `config.restarts` times; restarts because the cluster takes a host away do not count."""
    metadata: dict[str, Any] = {"name": work.name}
    command = container_command(work)
    if topology.accelerator.is_tpu:  # GKE tells each process of a slice where the others are
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    elif work.training:
        # The address of the first pod of the first replica, within the JobSet. The container's
        # shell fills in the last variable.
        command += (
            f" mesh.coordinator={work.name}-workers-0-0.{work.name}:7777 "
            f"mesh.processes={work.hosts} mesh.process=$JOB_COMPLETION_INDEX"
        )
    hosts_of_slice = work.hosts // topology.slices
    taken_away = {"action": "FailJob", "onPodConditions": [dict(DISRUPTED)]}
    processes = {
        "parallelism": hosts_of_slice,
        "completions": hosts_of_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [taken_away]},
        "template": {"spec": pod(work, work.chips, command)},
    }
    # All processes restart together and resume the run. A restart because the cluster takes a host
    # away does not count towards maxRestarts.
    policy = {
        "maxRestarts": work.config.restarts,
        "rules": [
            {
                "name": "taken-away",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": policy,
            "replicatedJobs": [
                {"name": "workers", "replicas": topology.slices, "template": {"spec": processes}}
            ],
        },
    }


def ray_job(work: Workload, train: Config) -> dict[str, Any]:
    """Returns the manifest of a RayJob: the trainer on the head, a sampler on each worker. `train`:
    the configuration of the job. The head gets all accelerators of a host (`work.chips`), a worker
    `sampler.devices_per_worker`. The cluster begins with `sampler.workers` workers. ShoalError if
    Ray is not installed here, whose version the manifest names."""
    if find_spec("ray") is None:
        raise ShoalError(
            "sampler.kind=ray: the manifest names the version of Ray; pip install '.[ray]'"
        )
    workers = train.sampler.workers
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": {"spec": pod(work, work.chips)},
    }
    samplers = {
        "groupName": "samplers",
        "replicas": workers,
        "minReplicas": 1,
        "maxReplicas": workers,
        "rayStartParams": {},
        "template": {"spec": pod(work, train.sampler.devices_per_worker)},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": work.name},
        "spec": {
            "entrypoint": shlex.join([ray_word(word) for word in work.words]),
            "backoffLimit": work.config.restarts,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "headGroupSpec": head,
                "workerGroupSpecs": [samplers],
            },
        },
    }


def container_command(work: Workload) -> str:
    """Returns the job as a command for `bash -c` in a container: `exec shoal train ...`. Escapes
    `$(NAME)` and `$$`, which Kubernetes would replace before bash reads them. ShoalError if there
    is no job, or if it does not fit the devices."""
    # With exec, SIGTERM reaches the run itself, which then saves its last complete step.
    return "exec " + re.sub(r"\$(?=[$(])", "$$", work.command)


def pod(work: Workload, chips: int, command: str = "") -> dict[str, Any]:
    """Returns the specification of a pod with this many accelerators. `command`: what its container
    runs; '' for a pod that Ray starts, which then has no restart policy either. `chips`: 0 without
    accelerators; ignored without a topology. The pod mounts the claim `config.storage` as /work,
    and memory as /dev/shm."""
    topology = work.topology
    limits = {}
    selector = {}
    if topology and topology.accelerator.is_tpu:
        selector = {
            "cloud.google.com/gke-tpu-accelerator": NAMES[topology.kind][0],
            "cloud.google.com/gke-tpu-topology": "x".join(str(size) for size in topology.shape),
        }
        limits = {"google.com/tpu": str(chips)}
    elif topology:
        selector = {"cloud.google.com/gke-accelerator": NAMES[topology.kind][0]}
        limits = {"nvidia.com/gpu": str(chips)}
    container: dict[str, Any] = {"name": "shoal", "image": work.config.image, "workingDir": "/work"}
    if command:
        container |= {"command": ["bash", "-c"], "args": [command]}
    container |= {
        "envFrom": [{"secretRef": {"name": "shoal-secrets", "optional": True}}],
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": [
            {"name": "runs", "mountPath": "/work"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    spec: dict[str, Any] = {}
    if command:
        spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = work.config.grace_seconds
    if selector:
        spec["nodeSelector"] = selector
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": work.config.storage}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return spec | {"containers": [container], "volumes": volumes}

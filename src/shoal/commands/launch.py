"""`shoal launch`: a job of `shoal` as an image, a command, a manifest or a script for a cluster, and its start there.

    target, topology, -- train ...  ->  Workload: hosts, chips, the words of the job  ->  a template of assets/launch
                                    ->  printed; given to docker, ray, sbatch, kubectl or xpk unless it is a dry run

A job is resumed by its own command: by its run_name, which it gets from here if it has none.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from shoal.config.keys import COMMANDS
from shoal.config.loading import compose
from shoal.config.schema import Config, LaunchConfig, MeshSection
from shoal.mesh.topology import Topology, parse_topology, placeholder_devices
from shoal.report.console import Console
from shoal.text import count
from shoal.types import ShoalError

CLIENTS = {
    "docker": ("docker", ["bash", "-ec"], "Docker, with its daemon"),
    "ray": ("ray", ["bash", "-ec"], "'.[ray]', and a cluster at RAY_API_SERVER_ADDRESS"),
    "slurm": ("sbatch", ["sbatch"], "Slurm: run this on a login node of the cluster"),
    "gke": ("kubectl", ["kubectl", "apply", "-f", "-"], "kubectl, with the credentials of the cluster"),
    "xpk": ("xpk", ["bash", "-ec"], "xpk, in an environment of its own (pipx install xpk), with gcloud and kubectl")}
"""Target -> the program that starts a job there, how it is called with what is printed, what has to be installed."""

NAMES = {
    "v4": ("tpu-v4-podslice", "v4"), "v5e": ("tpu-v5-lite-podslice", "v5litepod"), "v5p": ("tpu-v5p-slice", "v5p"),
    "v6e": ("tpu-v6e-slice", "v6e"), "tpu7x": ("tpu7x", "tpu7x"), "l4": ("nvidia-l4", "l4"),
    "a100-40gb": ("nvidia-tesla-a100", "a100-40gb"), "a100": ("nvidia-a100-80gb", "a100-80gb"),
    "h100": ("nvidia-h100-80gb", "h100-80gb"), "h200": ("nvidia-h200-141gb", "h200-141gb"),
    "b200": ("nvidia-b200", "b200")}
"""Kind of a topology -> GKE's name of the accelerator, and the first part of xpk's name of a machine or slice."""

PROXY = ("JAX_PLATFORMS=proxy", "JAX_BACKEND_TARGET=grpc://127.0.0.1:29000", "ENABLE_PATHWAYS_PERSISTENCE=1")
"""The environment of a process that uses Pathways, as xpk's own jobs have it."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "SHOAL_MESH_TOKEN")
"""Variables that a job gets from the environment, from a Secret in Kubernetes; never printed."""


def launch(config: LaunchConfig, console: Console) -> None:
    """Prints what starts the job, and starts it unless it is a dry run. ShoalError for a job that cannot run on these
    devices, for a client that is not installed, and for one that fails."""
    write = {"docker": docker_script, "ray": ray_script, "slurm": slurm_script, "gke": manifest, "xpk": xpk_command}
    text = write[config.target](Workload(config))
    print(text, end="", flush=True)
    if config.dry_run:
        return
    client, argv, needed = CLIENTS[config.target]
    if shutil.which(client) is None:
        raise ShoalError(f"target={config.target}: {client} is not on PATH, so nothing was started; what it is to be "
                         f"given is printed. It needs {needed}; --dry-run only prints")
    as_word = argv[0] == "bash"
    code = subprocess.run([*argv, text] if as_word else argv, input=None if as_word else text, text=True).returncode
    if code:
        raise ShoalError(f"target={config.target}: {client} ended with exit code {code}; what it was given is printed")


@dataclass(frozen=True)
class Workload:
    """A job with the devices that it gets."""

    config: LaunchConfig

    @cached_property
    def topology(self) -> Topology | None:
        return parse_topology(self.config.topology) if self.config.topology else None

    @cached_property
    def training(self) -> Config | None:
        """The configuration of a job `train ...`; None for another command. ShoalError for wrong keys."""
        job = self.config.job
        return compose("train", [word for word in job[1:] if word != "--dry-run"])[0] if job[:1] == ("train",) else None

    @cached_property
    def pathways(self) -> bool:
        """True if the job asks for Pathways: by its keys, or, another command, by the words of its line."""
        asked = {"use_pathways", "use_pathways=true", PROXY[0]}
        return self.training.mesh.pathways if self.training else any(
            word.lstrip("-") in asked for line in self.config.job for word in line.split())

    @property
    def name(self) -> str:
        """The job's name, as Kubernetes allows it."""
        given = self.config.name or (self.training.run_name if self.training else "")
        return re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")[:40] or "shoal"

    @property
    def hosts(self) -> int:
        return self.topology.num_hosts if self.topology else 1

    @property
    def chips(self) -> int:
        """Accelerators of a host; 0 without any."""
        return self.topology.num_chips // self.hosts if self.topology else 0

    @cached_property
    def words(self) -> list[str]:
        """The words of the job, with what it needs to resume, to use all devices, and to sample in Ray's cluster."""
        job, train, topology = list(self.config.job), self.training, self.topology
        if not job:
            raise ShoalError("there is no job: give one after --, as shoal launch target=slurm topology=h100:8 -- "
                             "train task=gsm8k")
        if train is None:
            return ["shoal", *job] if job[0] in COMMANDS else job
        if not (train.run_name or train.resume):
            job.append(f"run_name={self.name}")
        if self.config.target == "ray" and not train.sampler.is_remote:
            job.append("sampler.kind=ray")
        elif topology and not train.sampler.is_remote:
            if topology.num_devices > 1 and replace(train.mesh, pathways=False) == MeshSection():
                job += ["mesh.fsdp=-1", *[f"mesh.dcn_data={topology.slices}"] * (topology.slices > 1)]
            self.check_roles(job, topology)
        return ["shoal", *job]

    def check_roles(self, job: Sequence[str], topology: Topology) -> None:
        """ShoalError where the roles do not fit the devices, or not with a process on each host."""
        import jax

        from shoal.mesh.roles import make_roles, refusal

        jax.config.update("jax_platforms", "cpu")
        devices, mesh = placeholder_devices(topology), compose("train", job[1:])[0].mesh
        roles, each = make_roles(mesh, devices), len(devices) // self.hosts
        if not self.pathways and (reason := refusal(mesh, roles, {one: one.id // each for one in devices})):
            raise ShoalError(f"topology={topology}: {reason}; or use Pathways: target=xpk with mesh.pathways=true")

    @property
    def command(self) -> str:
        """The job as a line of a shell."""
        return shlex.join(self.words)

    def fill(self, template: str, **given: object) -> str:
        """A file of assets/launch with each `{{name}}` replaced. Where a placeholder has a line of its own, every line
        of its value gets what is around it there, and an empty value removes the line."""
        c, devices = self.config, self.topology.describe() if self.topology else "no accelerator"
        values = {"name": self.name, "grace": c.grace_seconds, "restarts": c.restarts, "image": c.image,
                  "storage": c.storage, "summary": f"{c.target}, {count(self.hosts, 'host')}: {devices}", **given}

        def whole(match: re.Match[str]) -> str:
            lines = str(values[match[3]]).splitlines()
            return "".join(textwrap.indent(f"{match[2]}{line}\n", match[1]) for line in lines)

        text = resources.files("shoal").joinpath("assets", "launch", template).read_text(encoding="utf-8")
        text = re.sub(r"(?m)^( *)(#SBATCH |nodeSelector: |annotations: |)\{\{(\w+)\}\}\n", whole, text)
        return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)


# ---- targets


def docker_script(work: Workload) -> str:
    """Builds the image, pushes it, or runs the job in it on this machine."""
    c, steps, image, root = work.config, [], shlex.quote(work.config.image), Path(__file__).parents[3]
    if c.mode:
        if not (root / "deploy" / "Dockerfile").is_file():
            raise ShoalError(f"mode={c.mode}: an image is built from a clone of Shoal; install it with pip install -e "
                             "in its folder")
        steps.append(f"docker build --file={shlex.quote(f'{root}/deploy/Dockerfile')} --build-arg=MODE={c.mode} "
                     f"--tag={image} {shlex.quote(str(root))}")
    if c.push:
        address = shlex.quote(c.push if ":" in c.push.rpartition("/")[2] else f"{c.push}:latest")
        steps += [f"docker tag {image} {address}", f"docker push {address}"]
    if c.job or not steps:
        is_tpu = work.topology and work.topology.accelerator.is_tpu
        devices = " --privileged --net=host" if is_tpu else " --gpus=all" if work.topology else ""
        passed = "".join(f" --env={name}" for name in SECRETS)
        steps.append(f"docker run --init --rm --name={work.name} --stop-timeout={c.grace_seconds}{devices}{passed} "
                     f'--volume="$PWD":/work {image} {work.command}')
    return work.fill("docker.sh", steps="\n".join(steps))


def ray_script(work: Workload) -> str:
    return work.fill("ray.sh", words=shlex.join([*work.config.options, "--", *work.words]))


def slurm_script(work: Workload) -> str:
    if work.topology and work.topology.accelerator.is_tpu:
        raise ShoalError(f"topology={work.topology}: Slurm has machines with GPUs here, as h100:8x8; use target=gke or "
                         "xpk for a TPU")
    options = [*[f"--gpus-per-node={work.chips}"] * bool(work.chips), *work.config.options]
    return work.fill("slurm.sh", hosts=work.hosts, options="\n".join(options), command=work.command)


def manifest(work: Workload) -> str:
    """Of Kubernetes: a Job on one host, a JobSet on several, a RayJob where samplers are in a Ray cluster."""
    train, topology, command, annotations = work.training, work.topology, f"exec {work.command}", ""
    if train and train.sampler.kind == "ray":
        if find_spec("ray") is None:
            raise ShoalError("sampler.kind=ray: the manifest names the version of Ray; pip install '.[ray]'")
        return work.fill("rayjob.yaml", ray=version("ray"), workers=train.sampler.workers,
                         command=json.dumps(work.command), trainer=pod(work, work.chips),
                         sampler=pod(work, train.sampler.devices_per_worker))
    if topology is None or work.hosts == 1:
        return work.fill("job.yaml", pod=pod(work, work.chips, command))
    if topology.accelerator.is_tpu:  # GKE says to each process of a TPU slice where the others are
        annotations = "{alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool}"
    elif train:
        command += f" mesh.coordinator={work.name}-workers-0-0.{work.name}:7777 mesh.processes={work.hosts} " \
                   "mesh.process=$JOB_COMPLETION_INDEX"
    return work.fill("jobset.yaml", slices=topology.slices, hosts=work.hosts // topology.slices,
                     annotations=annotations, pod=pod(work, work.chips, command))


def pod(work: Workload, chips: int, command: str = "") -> str:
    """The specification of a pod with so many accelerators; without a command of one that Ray starts."""
    selector, limits, topology = "", "", work.topology
    if topology and topology.accelerator.is_tpu:
        selector = f"cloud.google.com/gke-tpu-accelerator: {NAMES[topology.kind][0]}, " \
                   f"cloud.google.com/gke-tpu-topology: {'x'.join(map(str, topology.shape))}"
        limits = f'google.com/tpu: "{chips}"'
    elif topology:
        selector, limits = f"cloud.google.com/gke-accelerator: {NAMES[topology.kind][0]}", f'nvidia.com/gpu: "{chips}"'
    # exec in the command: SIGTERM reaches the run itself, which saves its last complete step.
    return work.fill("pod.yaml", selector=selector and f"{{{selector}}}", limits=limits,
                     restart=command and "restartPolicy: Never",
                     command=command and f"command: [bash, -c]\nargs:\n  - {json.dumps(command)}")


def xpk_command(work: Workload) -> str:
    c, topology, words, options = work.config, work.topology, work.command, list(work.config.options)
    for key, value in (("topology", topology), ("cluster", c.cluster)):
        if not value:
            raise ShoalError(f"target=xpk needs {key}=..., such as topology=v5p-256 cluster=NAME")
    assert topology
    a, first = topology.accelerator, NAMES[topology.kind][1]
    devices = f"--tpu-type={first}-{topology.num_chips // topology.slices * a.cores} --num-slices={topology.slices}" \
        if a.is_tpu else f"--device-type={first}-{work.chips} --num-nodes={work.hosts}"
    if work.pathways:
        words = " ".join([*(one for one in PROXY if one not in words), words])
    elif work.hosts > 1:  # xpk starts again after 42 and 127 to 255; 2 is also a process whose neighbour has ended
        options.append("--restart-on-exit-codes=2")
    passed = [f'${{{name}:+--env {name}="${name}"}}' for name in SECRETS]
    return work.fill("xpk.sh", verb="create-pathways" if work.pathways else "create", cluster=shlex.quote(c.cluster),
                     devices=devices, command=shlex.quote(words),
                     options=" ".join([*map(shlex.quote, options), *passed]))

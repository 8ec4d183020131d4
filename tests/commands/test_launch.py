"""`shoal launch`: what it prints for each target, that the schemas accept it, and that what it
prints resumes a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_runs import Workshop

from shoal import cli
from shoal.mesh.topology import parse_topology

SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "kubernetes.json").read_text())
ROOT = Path(__file__).parents[2]
POD = "DisruptionTarget"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), num_hidden_layers=1)


@pytest.fixture
def launched(capsys):
    def run(line: str, *job: str) -> str:
        """What a dry run prints."""
        words = shlex.split(line)
        assert cli.main(["launch", "--dry-run", *words, *(["--", *job] if job else [])]) == 0
        return capsys.readouterr().out

    return run


def refused(line: str, capsys) -> str:
    assert cli.main(["launch", *shlex.split(line)]) == 2
    return capsys.readouterr().err


def checked(text: str) -> dict[str, Any]:
    """A manifest that its kind's schema accepts."""
    found = yaml.safe_load(text)
    jsonschema.validate(found, SCHEMAS[found["kind"]])
    return found


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    spec = found["spec"]
    spec = spec["replicatedJobs"][0]["template"]["spec"] if found["kind"] == "JobSet" else spec
    return spec["template"]["spec"]


# ---- hosts, chips, and the mesh


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v5p-256", 32),
        ("v5p-64", 8),
        ("v5p-8", 1),
        ("v6e-8", 1),
        ("v6e-16", 4),
        ("v5e-1", 1),
        ("v6e:4x8@2", 16),
        ("tpu7x-8", 1),
        ("h100:8", 1),
        ("h200:8x8", 8),
    ],
)
def test_hosts_of_a_topology(name, hosts):
    assert parse_topology(name).num_hosts == hosts


@pytest.mark.parametrize(
    ("topology", "kind", "slices", "hosts", "limits", "selectors"),
    [
        ("v5p-256", "JobSet", 1, 32, {"google.com/tpu": "4"}, ["tpu-v5p-slice", "4x4x8"]),
        ("v6e-8", "Job", 1, 1, {"google.com/tpu": "8"}, ["tpu-v6e-slice", "2x4"]),
        ("v6e:4x8@2", "JobSet", 2, 8, {"google.com/tpu": "4"}, ["tpu-v6e-slice", "4x8"]),
        ("h100:8", "Job", 1, 1, {"nvidia.com/gpu": "8"}, ["nvidia-h100-80gb"]),
        ("h200:2x8", "JobSet", 1, 2, {"nvidia.com/gpu": "8"}, ["nvidia-h200-141gb"]),
        ("", "Job", 1, 1, {}, []),
    ],
)
def test_a_manifest_has_the_topologys_hosts_and_chips(
    launched, topology, kind, slices, hosts, limits, selectors
):
    found = checked(launched(f"target=gke topology={topology} name=first", "train", "task=gsm8k"))
    pod = pod_of(found)
    assert found["kind"] == kind and found["metadata"]["name"] == "first"
    assert pod["containers"][0]["resources"]["limits"] == limits
    assert list(pod.get("nodeSelector", {}).values()) == selectors
    if kind == "JobSet":
        [workers] = found["spec"]["replicatedJobs"]
        spec = workers["template"]["spec"]
        assert (workers["replicas"], spec["parallelism"], spec["completions"]) == (
            slices,
            hosts,
            hosts,
        )


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda pod: pod.update(gracePeriod=3), "gracePeriod"),
        (lambda pod: pod["containers"][0].update(image=3), "is not of type"),
        (lambda pod: pod.pop("containers"), "'containers' is a required property"),
    ],
)
def test_the_schemas_see_a_wrong_manifest(launched, spoil, part):
    for topology in ("v6e-8", "v5p-64"):
        found = checked(launched(f"target=gke topology={topology}", "train"))
        spoil(pod_of(found))
        with pytest.raises(jsonschema.ValidationError, match=part):
            jsonschema.validate(found, SCHEMAS[found["kind"]])


def test_a_job_of_samplers_in_ray_is_a_ray_job(launched):
    found = checked(
        launched(
            "target=gke topology=h100:1",
            "train",
            "sampler.kind=ray",
            "sampler.workers=4",
            "sampler.devices_per_worker=2",
        )
    )
    cluster = found["spec"]["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    limits = []
    for part in (cluster["headGroupSpec"], group):
        limits.append(
            part["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        )
    assert (limits, group["replicas"]) == (["1", "2"], 4)
    assert found["spec"]["entrypoint"].startswith("shoal train sampler.kind=ray ")


@pytest.mark.parametrize(
    ("line", "job", "words"),
    [
        ("topology=h100:8", "train", "shoal train run_name=shoal mesh.fsdp=-1"),
        ("topology=h100:1 name=My_Run", "train", "shoal train run_name=my-run"),
        ("topology=h100:8", "train run_name=a mesh.fsdp=8", "shoal train run_name=a mesh.fsdp=8"),
        ("topology=h100:8", "train resume=last", "shoal train resume=last mesh.fsdp=-1"),
        ("topology=h100:8", "eval model=x", "shoal eval model=x"),
        ("topology=h100:8", "python grpo.py 'a b'", "python grpo.py 'a b'"),
    ],
)
def test_a_job_can_resume_and_uses_all_devices(launched, line, job, words):
    text = launched(f"target=slurm {line}", *shlex.split(job))
    assert f"set -- {words}\n" in text and 'srun --kill-on-bad-exit=1 "$@" &\n' in text


def test_slices_are_an_axis_of_their_own(launched):
    [text] = pod_of(checked(launched("target=gke topology=v6e:4x8@2", "train")))["containers"][0][
        "args"
    ]
    assert text == "exec shoal train run_name=shoal mesh.fsdp=-1 mesh.dcn_data=2"


def test_processes_on_gpu_hosts_find_each_other(launched):
    [text] = pod_of(checked(launched("target=gke topology=h100:2x8 name=a", "train")))[
        "containers"
    ][0]["args"]
    assert text.endswith(
        " mesh.coordinator=a-workers-0-0.a:7777 mesh.processes=2 mesh.process=$JOB_COMPLETION_INDEX"
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (
            "target=slurm topology=h100:8",
            "there is no job: give one after --, as shoal launch target=slurm topology=",
        ),
        ("target=slurm topology=h100:8 -- train mesh.fdsp=2", "mesh.fdsp"),
        (
            "target=slurm topology=h100:9x9x9 -- train",
            "topology=h100:9x9x9: expected h100:GPUS of one machine",
        ),
        (
            "target=slurm topology=v5p-8 -- train",
            "Slurm has machines with GPUs here, such as h100:8x8; use target=gke or xpk",
        ),
        (
            "target=xpk cluster=c -- train",
            "target=xpk needs topology=..., such as topology=v5p-256 cluster=NAME",
        ),
        (
            "target=xpk topology=v5p-8 -- train",
            "target=xpk needs cluster=..., such as topology=v5p-256",
        ),
        (
            "target=gke topology=h100:8 -- train mesh.fsdp=3",
            "mesh.fsdp=3 does not divide 8 devices; use 1, 2, 4 or 8",
        ),
        (
            "target=gke topology=v5p-64 -- train mesh.trainer=16 mesh.sampler=16 mesh.fsdp=-1",
            "a run in 8 processes has all roles on all devices",
        ),
        (
            "target=gke topology=v5p-64 -- train mesh.fsdp=4",
            "mesh.fsdp=4 x mesh.expert=1 x mesh.context=1 x mesh.tensor=1 uses 4 of 32",
        ),
        ("target=k8s -- train", "target='k8s': expected one of docker, ray, slurm, gke, xpk"),
        ("grace_seconds=0 -- train", "grace_seconds=0"),
    ],
)
def test_a_job_that_cannot_run_there_is_refused(capsys, line, part):
    assert part in refused(line, capsys)


def test_roles_on_hosts_of_their_own_run_through_pathways(launched):
    text = launched(
        "target=xpk topology=v5p-64 cluster=c name=w options=[--zone=z,--priority=high]",
        "train",
        "mesh.pathways=true",
        "mesh.trainer=16",
        "mesh.sampler=16",
        "mesh.fsdp=-1",
    )
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    assert words[:3] == ["xpk", "workload", "create-pathways"]
    assert {
        "--workload=w",
        "--cluster=c",
        "--tpu-type=v5p-64",
        "--num-slices=1",
        "--docker-image=shoal",
        "--zone=z",
        "--priority=high",
        "--max-restarts=10",
        "--termination-grace-period-seconds=300",
    } <= {*words}
    assert words[-1] == (
        "--command=JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 "
        "ENABLE_PATHWAYS_PERSISTENCE=1 shoal train mesh.pathways=true mesh.trainer=16 "
        "mesh.sampler=16 mesh.fsdp=-1 run_name=w"
    )


# ---- clients


def test_without_the_client_the_artefact_is_printed_and_the_client_named(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for target, client in (
        ("docker", "docker"),
        ("ray", "ray"),
        ("slurm", "sbatch"),
        ("gke", "kubectl"),
        ("xpk", "xpk"),
    ):
        line = f"target={target} topology=h100:8 cluster=c -- train"
        assert cli.main(["launch", "--dry-run", *line.split()]) == 0
        printed = capsys.readouterr().out
        assert cli.main(["launch", *line.split()]) == 2
        out, err = capsys.readouterr()
        assert out == printed and "shoal train" in out
        assert err.startswith(
            f"error: target={target}: {client} is not on PATH, so nothing was started"
        )


def put_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("line", "client", "given"),
    [
        ("target=gke topology=h100:8 -- train", "kubectl", "apply -f -"),
        ("target=slurm topology=h100:8 -- train", "sbatch", ""),
        ("target=ray -- train", "ray", "job submit -- shoal train run_name=shoal sampler.kind=ray"),
        (
            "target=xpk topology=v5p-8 cluster=c -- train",
            "xpk",
            "--env HF_TOKEN=a secret --command=shoal train run_name=",
        ),
    ],
)
def test_the_client_gets_what_is_printed(tmp_path, capfd, monkeypatch, line, client, given):
    put_program(
        tmp_path / "bin", client, f'echo "$*" >{tmp_path}/argv; cat >{tmp_path}/stdin </dev/stdin'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["launch", *line.split()]) == 0
    out = capfd.readouterr().out
    assert given in (tmp_path / "argv").read_text() and "a secret" not in out
    if client in ("kubectl", "sbatch"):
        assert (tmp_path / "stdin").read_text() == out
    put_program(tmp_path / "bin", client, "exit 3")
    assert cli.main(["launch", *line.split()]) == 2
    assert f"{client} ended with exit code 3" in capfd.readouterr().err


def test_images_are_built_and_pushed_by_maxtexts_words(launched):
    for mode in ("grpo", "grpo-experimental"):
        [line] = [
            line
            for line in launched(f"target=docker MODE={mode}").splitlines()
            if not line.startswith("#")
        ]
        assert shlex.split(line) == [
            "docker",
            "build",
            f"--file={ROOT}/deploy/Dockerfile",
            f"--build-arg=MODE={mode}",
            "--tag=shoal",
            str(ROOT),
        ]
    assert "docker push path/to/gcr.io:latest\n" in launched(
        "target=docker CLOUD_IMAGE_NAME=path/to/gcr.io"
    )
    assert "docker push gcr.io/p/x:1\n" in launched("target=docker push=gcr.io/p/x:1")
    text = launched("target=docker topology=h100:8", "train")
    assert " --gpus=all --env=HF_TOKEN " in text and text.endswith(
        " shoal shoal train run_name=shoal mesh.fsdp=-1\n"
    )


def test_the_dockerfile_knows_every_mode_and_extra():
    import tomllib

    from shoal.config.commands import LaunchConfig
    from shoal.config.key import keys_of

    text = (ROOT / "deploy" / "Dockerfile").read_text()
    cases = dict(
        line.strip(" \\").removesuffix(" ;;").split(") extras=")
        for line in text.splitlines()
        if ") extras=" in line
    )
    assert {mode for case in cases for mode in case.split("|")} | {""} == {
        *keys_of(LaunchConfig)["mode"].choices
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for case in cases.values():
        for extra in case.split(","):
            assert extra in extras
    # Buckets are read in every mode, and the lines of other systems' documents are typed in the
    # work folder.
    assert "/shoal[$extras,gcs,s3,wandb,tensorboard]" in text and "RUN shoal compat /work" in text


# ---- values that a shell, YAML or Kubernetes would read as more

HOSTILE = (
    "a b",
    "",
    "{{word}}",
    "a:{{name}}",
    "\U0001f600",
    "line\nbreak",
    "x\u2028y\x85z",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a;touch$IFS$@pwned",
    '"q" \\',
    "it's",
    "$(HOME) $$(HOME) $HOME",
    "~",
    "*",
    "#x",
    "- a: [b",
    "\t\x1b[0m",
    "&& touch pwned",
    "!x",
)
KEEP_WORDS = r"""printf '%s\0' "$@" >"$WORDS" """
IMAGES = (
    "$(touch${IFS}pwned)",
    "{a:b}",
    "[a]",
    "a:",
    "yes",
    "123",
    "*x",
    "#x",
    "@x",
    "'x",
    "{{name}}",
    "&x",
)


def run_printed(text: str, folder: Path) -> None:
    """Runs what is printed for a shell, with programs that keep the words that they get."""
    put_program(folder / "bin", "job", KEEP_WORDS)
    put_program(
        folder / "bin", "docker", 'while [ "$1" != shoal ]; do shift; done; shift; exec "$@"'
    )
    put_program(folder / "bin", "srun", 'shift; exec "$@"')
    put_program(folder / "bin", "xpk", 'exec bash -c "${@: -1:1}"')
    put_program(
        folder / "bin",
        "ray",
        f"""exec {sys.executable} -c '
import subprocess, sys
subprocess.run(subprocess.list2cmdline(sys.argv[4:]), shell=True, check=True)' "$@" """,
    )
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "WORDS": str(folder / "words"),
        "HOME": str(folder),
    }
    subprocess.run(["bash", "-ec", text], cwd=folder, env=environment, check=True)


def by_kubernetes(text: str) -> str:
    """An argument as a container gets it: `$$` is a dollar, `$(NAME)` a variable."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else "a variable", text)


@pytest.mark.parametrize("target", ["docker", "slurm", "xpk", "gke", "ray", "rayjob"])
def test_a_job_gets_its_own_words(launched, tmp_path, target):
    job = ["job", *HOSTILE]
    if target == "gke":
        [text] = pod_of(checked(launched("target=gke topology=h100:1", *job)))["containers"][0][
            "args"
        ]
        text = by_kubernetes(text)
    elif target == "rayjob":
        found = checked(
            launched(
                "target=gke topology=h100:1",
                "train",
                "sampler.kind=ray",
                *(f"task.template={{q}}{word}" for word in HOSTILE[5:6]),
            )
        )
        words = shlex.split(found["spec"]["entrypoint"])
        text = shlex.join(["ray", "job", "submit", "--", "job", *words[3:-1]])
        job = ["job", f"task.template={{q}}{HOSTILE[5]}"]
    else:
        text = launched(
            f"target={target} topology={'v5p-8 cluster=c' if target == 'xpk' else ''}", *job
        )
        text = text.replace(" --command=", " ") if target == "xpk" else text
    run_printed(text, tmp_path)
    assert (tmp_path / "words").read_text().split("\0")[:-1] == job[1:]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_and_a_volume_are_text(launched, tmp_path, image):
    spec = pod_of(
        checked(
            launched(f"target=gke image={shlex.quote(image)} storage={shlex.quote(image)}", "train")
        )
    )
    assert (
        spec["containers"][0]["image"]
        == spec["volumes"][0]["persistentVolumeClaim"]["claimName"]
        == image
    )
    for line in ("target=docker", "target=xpk topology=v5p-8 cluster=c"):
        text = launched(f"{line} image={shlex.quote(image)}", "train")
        put_program(tmp_path / "bin", line.split()[0].removeprefix("target="), KEEP_WORDS)
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "WORDS": str(tmp_path / "words"),
        }
        subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=environment, check=True)
        words = (tmp_path / "words").read_text().split("\0")
        assert image in words or f"--docker-image={image}" in words
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["image=a b"], "image='a b': expected a name without spaces"),
        (["image=-v"], "image='-v'"),
        (["target=slurm", "options=[--a\nrm -r x]"], "options="),
        (["storage=a\nb"], "storage='a\\nb'"),
        (["target=xpk", "topology=v5p-8", "cluster=c\nd"], "cluster='c\\nd'"),
    ],
)
def test_a_name_with_a_line_break_is_refused(capsys, words, part):
    assert cli.main(["launch", *words, "--dry-run", "--", "train"]) == 2
    assert part in capsys.readouterr().err


def test_a_job_that_is_no_text_is_refused(capsys):
    assert cli.main(["launch", "--dry-run", "--", "job", "\udcff"]) == 2
    assert "a job in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2026-run", "run-2026-run"),
        ("a" * 39 + "-b", "a" * 39),
        ("7" * 60, "run-" + "7" * 36),
        ("-a-", "a"),
        ("My Run!", "my-run"),
        ("\u00e9", "shoal"),
        ("x" * 36 + "----y", "x" * 36 + "-y"),
    ],
)
def test_a_name_is_one_that_kubernetes_takes(launched, name, expected):
    found = checked(launched("target=gke", "train", f"run_name={name}"))["metadata"]["name"]
    assert (
        found == expected and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", found) and len(found) <= 40
    )


@pytest.mark.parametrize(
    "job",
    [
        "train --dry-run",
        "train --dry_run task=gsm8k",
        "train --plan",
        "train --multirun seed=1,2",
        "train -m seed=1,2",
        "train --help",
        "sft --dry-run",
    ],
)
def test_the_switches_of_a_job_are_the_jobs(launched, job):
    text = launched("target=slurm topology=h100:8", *job.split())
    assert f"set -- shoal {job}" in text


# ---- a run that is taken away, and started again by what was printed

SLOW = """
from pathlib import Path
import time
import rewards

def slow(completions, trainer_state, **kwargs):
    if trainer_state.global_step >= 3 and not Path("{again}").exists():
        Path("{reached}").touch()
        time.sleep(1)
    return rewards.letters(completions)
"""


class TakenAway:
    """A job of 20 steps, each of a second from the fourth on until it is started again."""

    def __init__(self, workshop: Workshop, folder: Path) -> None:
        self.folder, self.reached, self.again = folder, folder / "reached", folder / "again"
        folder.mkdir(exist_ok=True)
        reward = workshop.folder / f"slow_{folder.name}.py"
        reward.write_text(SLOW.format(reached=self.reached, again=self.again))
        self.job = workshop.words(
            folder.name,
            f"reward={reward}:slow",
            f"base_output_directory={folder}/runs",
            "steps=20",
            "train.evaluate_every=-1",
            "checkpoint.every=100",
        )
        put_program(folder / "bin", "shoal", f'exec {sys.executable} -m shoal "$@"')
        # its one option; Slurm's hands signals on, too
        put_program(folder / "bin", "srun", 'shift; exec "$@"')
        put_program(folder / "bin", "scontrol", f'echo "$*" >>{folder}/scontrol')
        self.environment = {
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "PYTHONPATH": f"{ROOT / 'src'}:{workshop.folder}",
        }

    def start(self, argv: list[str]) -> subprocess.Popen:
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def take_away(self, argv: list[str], grace_seconds: int) -> int:
        """The exit code of a process that gets SIGTERM in its fourth step, and SIGKILL after its
        grace."""
        process = self.start(argv)
        while not self.reached.exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=grace_seconds)
        self.again.touch()
        return process.returncode

    def steps(self) -> list[int]:
        [metrics] = self.folder.glob("runs/*/metrics.jsonl")
        result = []
        for row in map(json.loads, metrics.read_text().splitlines()):
            if "train/loss" in row or "reward/mean" in row:
                result.append(row["step"])
        return result


@pytest.mark.system
def test_a_slurm_job_that_is_taken_away_is_queued_again_and_resumes(workshop, tmp_path, launched):
    one = TakenAway(workshop, tmp_path / "slurm")
    script = one.folder / "job.sh"
    script.write_text(launched("target=slurm grace_seconds=60", *one.job))
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert one.take_away(["bash", str(script)], 60) == 130
    assert (one.folder / "scontrol").read_text() == "requeue 7\n"
    done = one.steps()
    assert 3 <= len(done) < 20
    process = one.start(["bash", str(script)])
    out = process.communicate()[0]
    assert process.returncode == 0 and f"from step {len(done) + 1} on" in out, out
    assert one.steps() == list(range(1, 21))
    assert (one.folder / "scontrol").read_text() == "requeue 7\n"


@pytest.mark.system
def test_a_kubernetes_job_that_is_taken_away_resumes_and_a_mistake_ends_it(
    workshop, tmp_path, launched
):
    """The controller's rules are those of Kubernetes' documentation: the first that matches."""
    one = TakenAway(workshop, tmp_path / "gke")
    spec = checked(launched("target=gke grace_seconds=60", *one.job))["spec"]
    [container] = spec["template"]["spec"]["containers"]

    def action(code: int, *conditions: str) -> str:
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values", [])
            if code in codes or any(
                each["type"] in conditions for each in rule.get("onPodConditions", [])
            ):
                return rule["action"]
        return "Count"

    argv = [*container["command"], *container["args"]]
    code = one.take_away(argv, spec["template"]["spec"]["terminationGracePeriodSeconds"])
    assert (code, action(code, POD), action(code)) == (130, "Ignore", "Count")
    done = len(one.steps())
    process = one.start(argv)
    out = process.communicate()[0]
    assert process.returncode == 0 and f"from step {done + 1} on" in out, out
    assert one.steps() == list(range(1, 21))
    process = one.start(["bash", "-c", "exec shoal train optimizer.lr=x"])
    process.communicate()
    assert action(process.returncode) == "FailJob"

"""Metrics beyond the run's own files: TensorBoard and W&B by their real packages, sinks that fail,
profiler traces."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.config.sections.train import (
    MlflowSection,
    ReportSection,
    TrackioSection,
    WandbSection,
)
from shoal.job.profiler import Profiler
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.report.console import Console
from shoal.report.mlflow import permitted_name
from shoal.report.sinks import Background, check_sinks, completion_rows, make_sinks
from shoal.report.tensorboard import TensorboardSink
from shoal.report.wandb import WandbSink
from shoal.runs.lines import evaluation_scalars

STEPS = [
    {"reward/mean": 0.25, "lr": 1e-3},
    {"reward/mean": 0.5, "lr": 5e-4},
    {"reward/mean": float("nan")},
]
ODD = "rewards/logged/größe {a}\n%s.b"


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def sinks_of(folder: Path, resumed_at: int | None = None, warn: Said | None = None, **section: Any):
    return make_sinks(
        folder,
        ReportSection(**section),
        {"seed": 0, "batch": {"group_size": 8}},
        "first",
        resumed_at,
        Said(),
        Said() if warn is None else warn,
    )


# ---- TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> (step, value), read by its own accumulator."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    result = {}
    for tag in events.Tags()["scalars"]:
        result[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return result


def test_tensorboard_shows_steps_and_evaluations(tmp_path):
    warned = Said()
    (sink,) = sinks_of(tmp_path, tensorboard=True, warn=warned)
    sink.write(
        0,
        evaluation_scalars(
            "held_out",
            {
                "accuracy": 0.5,
                "protocol": "greedy",
                "accuracy_interval": [0, 1],
                "num_questions": 4,
                "mean_reward": None,
            },
        ),
    )
    for step, metrics in enumerate([*STEPS[:2], {ODD: 2}], 1):
        sink.write(step, metrics)
    sink.close()
    assert warned == []
    assert curves(tmp_path / "tensorboard") == {
        "reward/mean": [(1, 0.25), (2, 0.5)],
        "lr": [(1, pytest.approx(1e-3)), (2, pytest.approx(5e-4))],
        "evaluate/held_out/accuracy": [(0, 0.5)],
        "evaluate/held_out/num_questions": [(0, 4.0)],
        ODD: [(3, 2.0)],
    }


@pytest.mark.parametrize("torn", [False, True])
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path, torn):
    killed = TensorboardSink(tmp_path)
    for step in range(1, 6):
        killed.write(step, {"reward/mean": step})
    if torn:  # the kill came in the middle of a record
        file = next(tmp_path.iterdir())
        file.write_bytes(file.read_bytes()[:-7])
    # within the same second: its file is read after the other
    resumed = TensorboardSink(tmp_path, resumed_at=2)
    for step in range(3, 5):
        resumed.write(step, {"reward/mean": 10 * step})
    resumed.close()
    assert curves(tmp_path) == {"reward/mean": [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]}
    killed.close()


def test_tensorboard_forgets_a_run_that_begins_anew(tmp_path):
    for resumed_at, value in ((None, 1.0), (0, 2.0)):
        sink = TensorboardSink(tmp_path, resumed_at)
        sink.write(0, {"evaluate/held_out/accuracy": value})
        sink.write(1, {"lr": value})
        sink.close()
    assert curves(tmp_path) == {"evaluate/held_out/accuracy": [(0, 2.0)], "lr": [(1, 2.0)]}


def test_a_clock_set_back_does_not_change_the_order(tmp_path, monkeypatch):
    TensorboardSink(tmp_path).close()
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    first, second = TensorboardSink(tmp_path, 1), TensorboardSink(tmp_path, 2)
    first.close(), second.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 and [".1000." in file.name for file in files] == [False] * 3
    assert files == sorted(files, key=lambda file: file.stat().st_mtime_ns)


def test_a_place_that_cannot_be_written_is_said_before_the_run(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(ShoalError, match="cannot write"):
        sinks_of(tmp_path, tensorboard=True)


ROWS = [
    {"prompt": "user: 2 + 3?", "completion": "5 <b>", "reward": 1.0, "advantage": 0.7},
    {"prompt": "user: 2 + 3?", "completion": "six\n", "reward": float("nan"), "advantage": -0.7},
]


def test_tensorboard_shows_a_table_of_completions(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = sinks_of(tmp_path, tensorboard=True)
    sink.write_completions(5, ROWS)
    sink.write_completions(6, [])
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("completions")
    assert event.step == 5 and [cell.decode() for cell in event.tensor_proto.string_val] == [
        "prompt",
        "completion",
        "reward",
        "advantage",
        "user: 2 + 3?",
        "5 <b>",
        "1.0",
        "0.7",
        "user: 2 + 3?",
        "six\n",
        "nan",
        "-0.7",
    ]


def group(rewards: list[float]) -> Group:
    texts, ids = tuple(map(str, rewards)), np.ones(1, np.int32)
    completions = tuple(
        Completion(0, i, ids, ids.astype(np.float32), ids > 0, ids, StopReason.EOS)
        for i in range(len(rewards))
    )
    return Group(
        Purpose.TRAIN,
        0,
        0,
        Example(0, [{"role": "user", "content": "?"}]),
        ids,
        completions,
        texts,
        np.array(rewards),
        {"correct": np.array(rewards)},
        np.ones(len(rewards), bool),
    )


def test_a_table_has_the_least_and_the_most_rewarded_completion_of_a_few_groups():
    rows = completion_rows(
        [group([0.5, 0.0, 1.0]), group([1.0])] * 9, np.arange(54.0).reshape(18, 3)
    )
    assert [(row["completion"], row["correct"], row["advantage"]) for row in rows] == [
        ("0.0", 0.0, 1.0),
        ("1.0", 1.0, 2.0),
        ("1.0", 1.0, 3.0),
        ("0.0", 0.0, 7.0),
        ("1.0", 1.0, 8.0),
        ("1.0", 1.0, 9.0),
    ]
    assert rows[0]["prompt"] == "user: ?" and len({tuple(row) for row in rows}) == 1


def test_the_terminal_shows_the_answers_to_one_prompt():
    out = io.StringIO()
    question = {"prompt": "user: How many?", "completion": "four\n" + "x" * 1000, "reward": 0.25}
    Console(out).answers(7, [question, question | {"completion": "4", "reward": 1.0}])
    head, worst, best = out.getvalue().splitlines()
    assert head == "step 7, prompt: user: How many?" and best == "    reward 1: 4"
    assert worst.startswith("    reward 0.25: four xxx") and len(worst) < 330
    Console(out).answers(8, [])
    Console(out).answers(9, [question, question | {"prompt": "user: Who?"}])
    assert len(out.getvalue().splitlines()) == 5


# ---- Weights & Biases


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No login, no settings, nothing of a home folder; the service process ends with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("HF_TOKEN", "hf_never_to_be_written")
    yield tmp_path / "run"
    import wandb

    wandb.teardown()


def records(file: Path) -> list[Any]:
    """The records of a `.wandb` file: blocks of 32 KiB of (checksum, length, kind) and bytes, after
    7 of a head."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def offline_rows(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """(run id, name -> JSON) of every row of every offline run, in the order of their start."""
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file):
            if record.HasField("history"):
                items = {}
                for item in record.history.item:
                    items[item.key or "/".join(item.nested_key)] = item.value_json
                rows.append(
                    (
                        file.stem.removeprefix("run-"),
                        {
                            key: value
                            for key, value in items.items()
                            if key not in ("_timestamp", "_runtime")
                        },
                    )
                )
    return rows


OFFLINE = """
import json, sys
from pathlib import Path
from shoal.config.sections.train import ReportSection, WandbSection
from shoal.report.sinks import make_sinks
from shoal.runs.notes import RunNotes
section = ReportSection(wandb=WandbSection(mode=sys.argv[4], project="fish"))
config = {"seed": 0, "batch": {"size": 8}}
labels = RunNotes("why", ("baseline", "warm-up"))
(sink,) = make_sinks(Path(sys.argv[1]), section, config, "first", None, print, print, labels)
for step, row in json.loads(sys.argv[2]):
    if step == 2:
        sink.write_completions(step, json.loads(sys.argv[3]))
    sink.write(step, row)
sink.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "auto"])
def test_wandb_offline_writes_everything_sends_nothing_and_says_so(alone, mode, monkeypatch):
    """As does auto without a login."""
    monkeypatch.setenv("HOME", str(alone.parent))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    alone.mkdir()
    rows = [
        (0, {"evaluate/held_out/accuracy": 0.5}),
        *enumerate([*STEPS, {ODD: 2}], 1),
        (4, {"evaluate/held_out/accuracy": 0.75}),
    ]
    with socket.create_server(("127.0.0.1", 0)) as service:
        url = f"http://127.0.0.1:{service.getsockname()[1]}"
        # a folder for tables, which the package removes when the process ends
        warnings = ["-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning"]
        words = [str(alone), json.dumps(rows), json.dumps(ROWS), mode]
        done = subprocess.run(
            [sys.executable, *warnings, "-c", OFFLINE, *words],
            env=os.environ | {"WANDB_BASE_URL": url},
            capture_output=True,
            timeout=60,
        )
        said = f"Weights & Biases: offline; `wandb sync {alone}/wandb/offline-*` sends it\n"
        assert (done.returncode, done.stdout.decode(), done.stderr) == (0, said, b"")
        assert [*alone.glob("wandb/offline-*")]
        service.settimeout(0.1)
        with pytest.raises(TimeoutError):
            service.accept()

    id = (alone / "wandb" / "run_id").read_text().strip()
    rows = offline_rows(alone)
    assert {row_id for row_id, _ in rows} == {id}
    assert rows[2][1].pop("completions/_type") == '"table-file"'
    (table,) = [
        json.loads(file.read_text())
        for file in alone.glob("wandb/offline-*/files/media/table/*.json")
    ]
    assert table["columns"] == ["step", *ROWS[0]] and table["data"][0] == [2, *ROWS[0].values()]
    assert [
        {k: v for k, v in row.items() if k != "_step" and "completions" not in k} for _, row in rows
    ] == [
        {"evaluate/step": "0", "evaluate/held_out/accuracy": "0.5"},
        {"reward/mean": "0.25", "lr": "0.001"},
        {"reward/mean": "0.5", "lr": "0.0005"},
        {"reward/mean": "NaN"},
        {ODD: "2"},
        {"evaluate/step": "4", "evaluate/held_out/accuracy": "0.75"},
    ]
    assert [row["_step"] for _, row in rows] == ["0", "1", "2", "3", "4", "5"]
    (run,) = [
        record.run
        for record in records(next(alone.glob("wandb/offline-*/*.wandb")))
        if record.HasField("run")
    ]
    config = {item.key: item.value_json for item in run.config.update}
    assert (run.project, run.display_name) == ("fish", "first")
    assert (run.notes, sorted(run.tags)) == ("why", ["baseline", "warm-up"])
    assert config["seed"] == "0" and config["batch"] == '{"size":8}'
    written = [file for file in alone.parent.rglob("*") if file.is_file()]
    assert not [file for file in written if b"hf_never" in file.read_bytes()]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_at_wandb(alone):
    alone.mkdir()
    for steps in ((1, 2), (3, 4)):
        sink = WandbSink(alone, WandbSection(mode="offline"), {}, "")
        for step in steps:
            sink.write(step, {"lr": step})
        sink.close()
        # the next run in this process finds what it found alone
        assert "WANDB_ERROR_REPORTING" not in os.environ
    until = time.monotonic() + 60  # its own process writes, which on a busy machine ends later
    while len(rows := offline_rows(alone)) < 4 and time.monotonic() < until:
        time.sleep(0.2)
    assert len({id for id, _ in rows}) == 1 and len(list(alone.glob("wandb/offline-run-*"))) == 2
    assert [(row["_step"], row["lr"]) for _, row in rows] == [
        (str(step), str(step)) for step in (1, 2, 3, 4)
    ]


@pytest.mark.slow
def test_a_killed_process_loses_a_second_of_wandb_at_most(alone):
    alone.mkdir()
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "from shoal.config.sections.train import WandbSection\n"
        "from shoal.report.wandb import WandbSink, SECONDS_BETWEEN_FLUSHES\n"
        "sink = WandbSink(Path(sys.argv[1]), WandbSection(mode='offline'), {}, '')\n"
        "sink.write(1, {'lr': 1}); sink.write(2, {'lr': 2})\n"
        "time.sleep(2 * SECONDS_BETWEEN_FLUSHES)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(alone)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-9, b"", b"")
    assert [row["lr"] for _, row in offline_rows(alone)] == ["1", "2"]


@pytest.mark.slow
def test_wandb_whose_service_dies_is_switched_off_at_once(alone):
    alone.mkdir()
    code = (
        "import sys, time\nfrom pathlib import Path\nimport psutil\n"
        "from shoal.config.sections.train import ReportSection, WandbSection\n"
        "from shoal.report.sinks import make_sinks\n"
        "section = ReportSection(wandb=WandbSection(mode='offline'))\n"
        "(sink,) = make_sinks(Path(sys.argv[1]), section, {}, '', None, print, "
        "print)\nsink.write(1, {'lr': 1})\n"
        "for child in psutil.Process().children(recursive=True):\n    child.kill()\n    "
        "child.wait()\n"
        "for step in range(2, 22):\n    sink.write(step, {'lr': step})\n    "
        "time.sleep(0.02)\nsink.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(alone)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first.startswith("Weights & Biases: offline") and second.startswith(
        "Weights & Biases is switched off: "
    )


@pytest.mark.slow
def test_wandb_that_cannot_be_reached_is_an_error_at_the_start(alone, monkeypatch):
    alone.mkdir()
    monkeypatch.setattr("shoal.report.wandb.SECONDS_TO_START", 1.0)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(ShoalError, match=r"did not start: .*; set report\.wandb\.mode=offline"):
        sinks_of(alone, wandb=WandbSection(mode="online"))


@pytest.mark.slow
def test_wandb_without_a_login_is_an_error_at_the_start_and_not_a_question(alone, monkeypatch):
    alone.mkdir()

    def input(*_):
        return pytest.fail("asked")

    monkeypatch.setattr("builtins.input", input)
    online = WandbSection(mode="online")
    for call in (
        lambda: check_sinks(ReportSection(wandb=online)),
        lambda: sinks_of(alone, wandb=online),
    ):
        with pytest.raises(ShoalError, match="needs a login: run `wandb login`, set WANDB_API_KEY"):
            call()
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    with pytest.raises(ShoalError, match=r"did not start: .*API key"):
        sinks_of(alone, wandb=online)


@pytest.mark.parametrize(
    ("package", "section"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb": WandbSection(mode="offline")}),
        ("mlflow", {"mlflow": MlflowSection(mode="offline")}),
        ("trackio", {"trackio": TrackioSection(mode="offline")}),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path, monkeypatch, package, section
):
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for call in (
        lambda: check_sinks(ReportSection(**section)),
        lambda: sinks_of(tmp_path, **section),
    ):
        with pytest.raises(ShoalError, match=rf"pip install '\.\[{package}\]' in the clone"):
            call()


# ---- MLflow and Trackio, which a process of its own loads: their packages warn when imported


SERVICE = """
import json, sys
from pathlib import Path
from shoal.config.sections.train import MlflowSection, ReportSection, TrackioSection
from shoal.report.sinks import make_sinks
from shoal.runs.notes import RunNotes
name, folder, rows, table = sys.argv[1], Path(sys.argv[2]), *map(json.loads, sys.argv[3:5])
section = {"mlflow": MlflowSection, "trackio": TrackioSection}[name](mode="auto")
report = ReportSection(**{name: section})
config = {"seed": 0, "batch": {"size": len(rows)}}
labels = RunNotes("why", ("baseline",))
(sink,) = make_sinks(folder, report, config, "first", None, print, print, labels)
for step, row in rows:
    if step == 2:
        sink.write_completions(step, table)
    sink.write(step, row)
sink.close()
"""


def run_service(name: str, folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> str:
    """What a process prints that sends rows to a service as a run does, without an address."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "TRACKIO_", "HF_"))
    }
    environment |= {"HOME": str(folder.parent), "TRACKIO_DIR": str(folder.parent / "trackio")}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, name, str(folder), json.dumps(rows), json.dumps(ROWS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TWICE: list[list[tuple[int, dict[str, Any]]]] = [
    [(0, {"evaluate/held_out/accuracy": 0.5}), (1, STEPS[0]), (2, STEPS[1])],
    # killed, and resumed from version 1: step 2 comes again
    [(2, {"reward/mean": 7.0}), (3, STEPS[2] | {ODD: 2, "lr": 1e-4})],
]


@pytest.mark.slow
def test_mlflow_has_one_run_with_each_step_once(tmp_path):
    pytest.importorskip("mlflow"), pytest.importorskip("alembic")
    folder = tmp_path / "run"
    folder.mkdir()
    for rows in TWICE:
        said = run_service("mlflow", folder, rows)
        uri = f"sqlite:///{folder}/mlflow/mlflow.db"
        assert said == f"MLflow: offline; `mlflow ui --backend-store-uri {uri}` shows it\n"
    with sqlite3.connect(folder / "mlflow" / "mlflow.db") as database:
        runs = database.execute("select run_uuid, name, status from runs").fetchall()
        assert runs == [((folder / "mlflow" / "run_id").read_text().strip(), "first", "FINISHED")]
        found = database.execute("select key, step, value, is_nan from metrics").fetchall()
        assert sorted(found) == [
            ("evaluate/held_out/accuracy", 0, 0.5, 0),
            ("lr", 1, 1e-3, 0),
            ("lr", 2, 5e-4, 0),
            ("lr", 3, 1e-4, 0),
            ("reward/mean", 1, 0.25, 0),
            ("reward/mean", 2, 0.5, 0),
            ("reward/mean", 3, 0.0, 1),
            ("rewards/logged/größe _a___s.b", 3, 2.0, 0),
        ]
        # a parameter keeps the value that the run began with
        tags = dict(database.execute("select key, value from tags").fetchall())
        assert (tags["baseline"], tags["mlflow.note.content"]) == ("true", "why")
        params = database.execute("select key, value from params").fetchall()
        assert sorted(params) == [("batch.size", "3"), ("seed", "0")]
    (table,) = folder.rglob("completions/step_2.json")
    columns, data = json.loads(table.read_text()).values()
    assert columns == list(ROWS[0]) and data[0] == list(ROWS[0].values())


@pytest.mark.slow
def test_trackio_has_one_run_with_each_step_once(tmp_path):
    pytest.importorskip("trackio")
    folder = tmp_path / "run"
    folder.mkdir()
    for rows in TWICE:
        said = run_service("trackio", folder, rows)
        assert said == "Trackio: offline; `trackio show --project shoal` shows it\n"
    name = (folder / "trackio" / "run_name").read_text().strip()
    assert re.fullmatch("first-[0-9a-f]{6}", name)
    (file,) = list((tmp_path / "trackio").rglob("shoal*.db"))
    with sqlite3.connect(file) as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    assert {row[0] for row in rows} == {name} and [row[1] for row in rows] == [0, 1, 2, 3]
    figures = [json.loads(row[2]) for row in rows]
    assert figures[0] == {"evaluate/held_out/accuracy": 0.5}
    assert figures[1] == STEPS[0] and figures[2]["reward/mean"] == 0.5
    assert figures[2]["completions"]["_value"][0] == ROWS[0] and figures[3][ODD] == 2


@pytest.mark.parametrize(
    ("section", "environment", "part"),
    [
        (
            {"mlflow": MlflowSection(mode="online")},
            {},
            r"report\.mlflow\.mode=online needs an address: set MLFLOW_TRACKING_URI or report\.",
        ),
        (
            {"trackio": TrackioSection(mode="online")},
            {},
            r"report\.trackio\.mode=online needs a Space or a server: set report\.trackio",
        ),
        (
            {"trackio": TrackioSection(mode="offline")},
            {"TRACKIO_SPACE_ID": "me/curves"},
            r"report\.trackio\.mode=offline, but TRACKIO_SPACE_ID is set: remove it",
        ),
    ],
)
def test_an_address_that_is_missing_or_unwanted_is_said_before_the_run(
    monkeypatch, section, environment, part
):
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShoalError, match=part):
        check_sinks(ReportSection(**section))


@pytest.mark.parametrize(
    ("name", "permitted"),
    [
        ("reward/mean", "reward/mean"),
        (ODD, "rewards/logged/größe _a___s.b"),
        ("a//b", "a__b"),
        ("../up", "___up"),
        ("ends/", "ends_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_metric_has_a_name_that_mlflow_permits(name, permitted):
    assert permitted_name(name) == permitted


def test_nothing_is_made_unasked(tmp_path):
    check_sinks(ReportSection(tensorboard=True, wandb=WandbSection(mode="offline")))
    assert sinks_of(tmp_path) == [] and list(tmp_path.iterdir()) == []


# ---- sinks that fail


class Recording:
    """Keeps its rows; fails at a step, or hangs at one until it is let go."""

    def __init__(self, fails: int = -1, hangs: int = -1) -> None:
        self.rows: list[int] = []
        self.fails, self.hangs, self.closed = fails, hangs, 0
        self.let_go = threading.Event()

    def write(self, step, metrics):
        if step == self.fails:
            raise OSError(28, "No space left on device")
        if step == self.hangs:
            self.let_go.wait(60)
        self.rows.append(step)

    def write_completions(self, step, rows):
        raise AssertionError

    def close(self):
        self.closed += 1


def test_a_background_sink_gets_every_row_in_order():
    sink, warned = Recording(), Said()
    background = Background(sink, "It", warned)
    for step in range(200):
        background.write(step, {})
    background.close()
    background.close()
    assert sink.rows == list(range(200)) and sink.closed == 1 and warned == []


def test_a_row_is_what_it_was_when_written():
    seen, metrics = [], {"lr": 1.0}
    sink = Recording()
    sink.write = lambda step, row: seen.append((sink.let_go.wait(60), dict(row)))  # type: ignore
    background = Background(sink, "It", Said())
    background.write(1, metrics)
    metrics["lr"] = 2.0
    sink.let_go.set()
    background.close()
    assert seen == [(True, {"lr": 1.0})]


def test_a_sink_that_fails_is_switched_off_with_one_warning():
    sink, warned = Recording(fails=3), Said()
    background = Background(sink, "It", warned)
    for step in range(10):
        background.write(step, {})
        while step == 3 and background._fault is None:
            time.sleep(0.001)
    background.close()
    assert sink.rows == [0, 1, 2] and sink.closed == 1
    assert warned == [
        "It is switched off: OSError: [Errno 28] No space left on device; metrics.jsonl continues "
        "and holds every step"
    ]


def test_a_failure_of_the_last_row_is_said_at_the_end():
    sink, warned = Recording(fails=1), Said()
    background = Background(sink, "It", warned)
    background.write(1, {})
    background.close()
    assert len(warned) == 1 and "No space left" in warned[0]


def test_a_sink_that_hangs_holds_up_neither_the_run_nor_its_end():
    sink, warned = Recording(hangs=0), Said()
    background = Background(sink, "It", warned, most_pending=5)
    for step in range(20):
        background.write(step, {})
    assert len(warned) == 1 and "accepts no more rows, 5 are waiting" in warned[0]
    background.close()
    sink.let_go.set()

    sink, warned = Recording(hangs=0), Said()
    background = Background(sink, "It", warned, seconds_to_close=0.05)
    background.write(0, {})
    background.close()
    assert len(warned) == 1 and "has not ended within 0.05 s" in warned[0]
    sink.let_go.set()


# ---- the profiler


def traces(folder: Path) -> list[str]:
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*.xplane.pb")})


@pytest.mark.slow
def test_a_trace_appears_for_the_chosen_step_and_only_then(tmp_path):
    warned, seen = Said(), []
    profiler = Profiler((2, 4), tmp_path / "profile", warned)
    for step in range(1, 6):
        with profiler.step(step):
            jnp.ones(3).block_until_ready()
        seen.append(traces(tmp_path / "profile"))
    assert seen == [[], ["step_000002"], ["step_000002"], *[["step_000002", "step_000004"]] * 2]
    assert warned == []


@pytest.mark.slow
def test_a_step_that_fails_leaves_its_trace_and_the_profiler_free(tmp_path):
    warned = Said()
    profiler = Profiler((1, 2), tmp_path, warned)
    with pytest.raises(KeyError, match="in the step"), profiler.step(1):
        raise KeyError("in the step")
    with profiler.step(2):
        pass
    assert traces(tmp_path) == ["step_000001", "step_000002"] and warned == []


@pytest.mark.slow
def test_a_step_is_traced_once_and_again_where_its_trace_was_lost(tmp_path):
    (tmp_path / "step_000001").mkdir()  # a killed run had begun it
    files = []
    for _ in range(2):
        with Profiler((1,), tmp_path, Said()).step(1):
            pass
        files.append(sorted(tmp_path.rglob("*")))
    assert files[0] == files[1] and traces(tmp_path) == ["step_000001"]


def test_a_trace_that_cannot_be_made_costs_a_warning_and_no_more(tmp_path):
    warned, done = Said(), []
    with jax.profiler.trace(tmp_path / "own"), Profiler((1,), tmp_path / "profile", warned).step(1):
        done.append(1)
    (tmp_path / "file").write_text("")
    with Profiler((1,), tmp_path / "file", warned).step(1):
        done.append(2)
    assert done == [1, 2] and traces(tmp_path) == ["own"]
    assert len(warned) == 2 and all(
        text.startswith("no profiler trace of step 1: ") for text in warned
    )
    shutil.rmtree(tmp_path / "own")

"""Pushing an export to the hub, with a model card: against a server of this test's own."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_runs import Workshop

from shoal import cli
from shoal.commands.export import export
from shoal.config.commands import ExportConfig
from shoal.config.merge import compose
from shoal.records import ShoalError
from shoal.runs.card import _command, model_card
from shoal.runs.reader import StoredRun
from shoal.runs.writer import RunWriter
from shoal.weights import hub


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks for to push a folder; files are kept by their path."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.status = status
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.files: dict[str, bytes] = {}


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        page = f"http://127.0.0.1:{self.server.server_port}/me/brief"
        answer: dict[str, Any] = {}
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            answer = {"url": page}
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular"} for path in paths]}
            for file in answer["files"]:
                file["shouldIgnore"] = False
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            answer = {"commitUrl": f"{page}/commit/1", "commitOid": "1"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"sha": "0", "id": "me/brief", "siblings": []})

    def _answer(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hub]:
    import huggingface_hub.constants

    hub_server = Hub(getattr(request, "param", 200))
    threading.Thread(target=hub_server.serve_forever, daemon=True).start()
    # the library reads its address once, when it is imported
    address = f"http://127.0.0.1:{hub_server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    yield hub_server
    hub_server.shutdown()
    hub_server.server_close()


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    words = ("task.num_eval_questions=4", "checkpoint.every=1", "checkpoint.keep_last=3")
    return workshop.train("pushed", "steps=2", *words)


def test_an_export_is_pushed_with_its_card(run: Path, server: Hub, tmp_path: Path):
    assert export(ExportConfig(source=str(run), to=str(tmp_path / "model")))
    local = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    pushed = export(ExportConfig(source=str(run), to="hub:me/brief"))
    assert pushed == {"to": f"http://127.0.0.1:{server.server_port}/me/brief"}
    assert server.files == local
    (created,) = server.created
    assert created["name"] == "brief"
    assert created.get("visibility") == "private" or created.get("private") is True
    assert server.tokens == {"Bearer hf_mine"}


def test_the_card_says_what_the_run_was(run: Path, tmp_path: Path):
    export(ExportConfig(source=str(run), to=str(tmp_path / "model")))
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert "after 2 steps of reinforcement learning" in text
    assert "| held_out accuracy (greedy, 4 questions) |" in text
    assert "95% interval of the accuracy on `held_out`" in text
    assert "\nshoal train steps=2 " in text and "run_name" not in text
    rows = text[text.index("| step | mean reward |") :].splitlines()[2:4]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]


def test_the_card_of_a_run_from_python_has_its_call(tmp_path: Path):
    words = ["model=./brief", "reward.functions=[python:short,python:exact]", "task.name=rows"]
    words += ["batch.prompts_per_device=2", "optimizer.lr=1e-5"]
    config, _ = compose("train", words)
    code = _command(config).removeprefix("```python\n").removesuffix("\n```")
    given: dict[str, Any] = {}
    calls = SimpleNamespace(train=lambda **keywords: given.update(keywords))
    names = {"rows": [1], "short": "f", "exact": "g"}
    exec(code.removeprefix("import shoal\n"), {"shoal": calls, **names})
    # The task and the functions by their names, all else by its key: what the preset sets, too.
    assert (given["task"], given["reward"]) == ([1], ["f", "g"])
    assert (given["model.path"], given["optimizer.lr"]) == ("./brief", 1e-5)
    assert given["batch.prompts_per_device"] == 2 and "batch.prompts_per_step" not in given
    assert not {"task.name", "reward.functions"} & set(given)


def test_the_card_says_which_steps_ran_with_settings_that_a_resume_changed(tmp_path: Path):
    settings = {
        0: ["steps=8", "optimizer.lr=0.0005"],
        8: ["steps=9", "optimizer.lr=0.0005", "tags=[again]"],
        9: ["steps=11", "optimizer.lr=0.0002", "algorithm.loss=gspo"],
    }
    with RunWriter.create(tmp_path, "resumed") as made:
        for start, words in settings.items():
            made.write_config(compose("train", words)[1].text, "", start)
    run = StoredRun(made.path)
    card = model_card(run, 11, adapter=False)
    lr = "`optimizer.lr=0.0005`"
    loss = "`algorithm.loss=grpo`"
    lines = set(card.splitlines())
    first = next(line for line in lines if line.startswith("Steps 1 to 8 ran with "))
    second = next(line for line in lines if line.startswith("Step 9 ran with "))
    assert lr in first and loss in first and "`steps=8`" in first
    assert lr in second and loss in second and "`steps=9`" in second and "tags" not in second
    assert "The command has the settings of the steps from 10 on." in lines
    assert "the loss `gspo`" in card and "optimizer.lr=0.0002" in card
    # The first eight steps know nothing of what came later.
    earlier = model_card(run, 8, adapter=False)
    assert "optimizer.lr=0.0005" in earlier and "ran with" not in earlier
    assert "gspo" not in earlier and "0.0002" not in earlier


def test_the_card_of_an_earlier_checkpoint_has_nothing_of_later_steps(run: Path, tmp_path: Path):
    earlier = min(int(path.name) for path in (run / "checkpoints").iterdir())
    assert earlier < 2
    export(ExportConfig(source=str(run / "checkpoints" / str(earlier)), to=str(tmp_path / "model")))
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "## Evaluation" not in card and "| 2 |" not in card


def test_checkpoints_without_settings_are_exported_without_a_card(run: Path, tmp_path: Path):
    for name in ("checkpoints", "model"):
        shutil.copytree(run / name, tmp_path / "kept" / name)
    export(ExportConfig(source=str(tmp_path / "kept"), to=str(tmp_path / "model")))
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "model" / "README.md").exists()


def test_a_dry_run_shows_the_card(run: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["export", f"from={run}", "to=hub:me/brief", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# model card (README.md):" in out and "# | held_out accuracy" in out


def test_a_model_that_is_no_run_has_no_card(tmp_path: Path):
    export(ExportConfig(source="tiny", to=str(tmp_path / "model")))
    assert not (tmp_path / "model" / "README.md").exists()


@pytest.mark.parametrize(
    "server, advice", [(403, "may write"), (500, "later")], indirect=["server"]
)
def test_a_refusal_of_the_hub_says_what_to_do(server: Hub, tmp_path: Path, advice: str):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ShoalError, match=rf"to=hub:me/brief could not be pushed .*{advice}"):
        hub.push(tmp_path, "me/brief", private=True)


def test_what_can_not_be_pushed_is_named_before_weights_are_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("shoal.commands.export.open_model", None)
    with pytest.raises(ShoalError, match="needs a token of yours that may write: set HF_TOKEN"):
        export(ExportConfig(source=str(run), to="hub:me/brief"))
    with pytest.raises(ShoalError, match=r"to=hub:brief: expected hub:USER/NAME"):
        export(ExportConfig(source=str(run), to="hub:brief"))

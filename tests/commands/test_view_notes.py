"""The note and the tags of a run: written by the server of `shoal view`, read by the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored_runs import write_run

pytest.importorskip("duckdb", reason="shoal view needs the extra `view`")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from shoal import cli
from shoal.commands.view.server import MAX_NOTES_BODY, make_app
from shoal.commands.view.views import Viewer
from shoal.records import ShoalError
from shoal.runs.notes import MAX_NOTE_CHARS, MAX_TAGS, RunNotes, write_notes
from shoal.runs.reader import StoredRun
from shoal.runs.result import load_run

NONE = {"notes": "", "tags": []}
NOTE = {"notes": "as in the paper\nbut with 1 step of warm-up", "tags": ["baseline", "größe"]}


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "first", 2)


@pytest.fixture
def viewer(run) -> Iterator[Viewer]:
    viewer = Viewer([str(run)])
    yield viewer
    viewer.close()


@pytest.fixture
def client(viewer) -> Iterator[TestClient]:
    with TestClient(make_app(viewer), base_url="http://127.0.0.1:8700") as client:
        yield client


def posted(client: TestClient, record: Any, **headers: str) -> Any:
    return client.post("/api/notes", json=record, headers=headers)


def test_a_note_is_written_shown_everywhere_and_removed(run, client, capsys):
    before = {path.name for path in run.iterdir()}
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 200 and answer.json() == NOTE
    assert json.loads((run / "notes.json").read_text(encoding="utf-8")) == NOTE
    for view in ("home", "overview"):
        record = client.get(f"/api/{view}?run=first").json()
        row = record["rows"][0] if view == "home" else record
        assert {key: row[key] for key in NOTE} == NOTE, view
    result = load_run(run)
    assert result.notes == NOTE["notes"] and result.tags == ("baseline", "größe")
    assert cli.main(["diff", str(run), str(run)]) == 0
    said = capsys.readouterr().out
    assert "[baseline] [größe] as in the paper but with 1 step of warm-up" in said
    revision = client.get("/api/runs").json()["runs"][0]["notes_written"]
    answer = posted(client, {"run": "first", "before": NOTE, **NONE})
    assert answer.json() == NONE and {path.name for path in run.iterdir()} == before
    assert client.get("/api/overview?run=first").json()["notes"] == ""
    assert client.get("/api/runs").json()["runs"][0]["notes_written"] != revision


def test_a_note_that_somebody_else_changed_is_not_replaced(run, client):
    write_notes(run, RunNotes("mine"))
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 400 and "somebody has changed the note" in answer.json()["error"]
    assert StoredRun(run).notes() == RunNotes("mine")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"run": "second"}, "there is no run 'second'"),
        ({"notes": 3}, "`notes` is not text"),
        ({"notes": "x" * (MAX_NOTE_CHARS + 1)}, "more than 20,000 characters"),
        ({"tags": "baseline"}, "`tags` is not a list"),
        ({"tags": ["two words"]}, "'two words' is not a single word"),
        ({"tags": ["a,b"]}, "'a,b' is not a single word"),
        ({"tags": [""]}, "is not a single word"),
        ({"tags": ["x" * 65]}, "more than 64 characters"),
        ({"tags": [str(number) for number in range(MAX_TAGS + 1)]}, "more than 32 tags"),
        ({"before": None}, "expected an object"),
    ],
)
def test_a_note_that_is_not_allowed_is_refused_in_a_line(run, client, record, message):
    answer = posted(client, {"run": "first", "before": NONE, **NOTE} | record)
    assert answer.status_code == 400 and message in answer.json()["error"]
    assert not (run / "notes.json").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8700", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1:9000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),  # what a form of another site can send
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_only_this_page_writes(run, client, headers, status):
    answer = posted(client, {"run": "first", "before": NONE, **NOTE}, **headers)
    assert answer.status_code == status
    assert (run / "notes.json").exists() == (status == 200)


def test_a_token_is_asked_for_before_a_note_is_written(run, viewer):
    record = {"run": "first", "before": NONE, **NOTE}
    with TestClient(make_app(viewer, "secret"), base_url="http://elsewhere:8700") as client:
        assert posted(client, record).status_code == 401
        assert not (run / "notes.json").exists()
        assert posted(client, record, **{"x-shoal-token": "secret"}).status_code == 200


def test_nothing_else_is_written_to(client):
    for method, path in (("POST", "/api/runs"), ("PUT", "/api/notes"), ("DELETE", "/api/notes")):
        answer = client.request(method, path, json=NOTE)
        assert answer.status_code == 405 and "only reads" in answer.json()["error"]
    headers = {"content-type": "application/json"}
    for body, status in ((b"{", 400), (b"[1]", 400), (b" " * (MAX_NOTES_BODY + 1), 413)):
        assert client.post("/api/notes", content=body, headers=headers).status_code == status


def test_a_folder_that_cannot_be_written_is_one_sentence(run, client):
    # A folder in the file's place is refused to any user; a read-only one is not refused to root.
    (run / "notes.json").mkdir()
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 400
    assert answer.json()["error"] == (
        f"the note was not saved: {run} cannot be written (Is a directory)"
    )
    (run / "notes.json").rmdir()
    if os.geteuid() != 0:
        run.chmod(0o555)
        answer = posted(client, {"run": "first", "before": NONE, **NOTE})
        run.chmod(0o755)
        assert "cannot be written (Permission denied)" in answer.json()["error"]


def test_a_damaged_file_is_a_problem_and_is_not_replaced(run, client):
    (run / "notes.json").write_text('{"notes": "half')
    record = client.get("/api/overview?run=first").json()
    assert record["notes"] == "" and "notes.json: is damaged" in str(record["problems"])
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 400 and "notes.json: is damaged" in answer.json()["error"]
    with pytest.raises(ShoalError, match=r"notes\.json is damaged"):
        load_run(run).notes  # noqa: B018
    (run / "notes.json").unlink()
    assert posted(client, {"run": "first", "before": NONE, **NOTE}).status_code == 200
    assert client.get("/api/overview?run=first").json()["problems"] == []


def test_a_link_out_of_the_run_is_neither_read_nor_written(run, client, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text('{"notes": "of another"}')
    (run / "notes.json").symlink_to(outside)
    assert client.get("/api/overview?run=first").json()["notes"] == ""
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 400 and "leads out of the run" in answer.json()["error"]
    assert outside.read_text() == '{"notes": "of another"}'


def test_a_run_in_a_bucket_says_where_its_note_goes(run, client, monkeypatch):
    from shoal.commands.view import views

    monkeypatch.setattr(views, "area_of", lambda path: "copies")
    monkeypatch.setattr(views, "address", lambda path: "s3://mine/first")
    answer = posted(client, {"run": "first", "before": NONE, **NOTE})
    assert answer.status_code == 400 and "s3://mine/first/notes.json" in answer.json()["error"]

"""The note and the tags that the keys `notes` and `tags` give a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config.merge import compose
from shoal.config.stored import texts_of
from shoal.job.training import write_labels
from shoal.records import ShoalError
from shoal.report.mlflow import tags_of
from shoal.runs.notes import MAX_NOTE_CHARS, RunNotes, write_notes
from shoal.runs.reader import StoredRun
from shoal.runs.writer import RunWriter


def test_keys_are_notes_or_an_error_with_the_keys_name():
    config = compose("train", ["tags=baseline,warm-up,baseline", "notes= as in the paper "])[0]
    notes = RunNotes.of_keys(config.notes, config.tags)
    assert notes == RunNotes("as in the paper", ("baseline", "warm-up"))
    assert compose("train", ["tags=[a,b]"])[0].tags == ("a", "b")
    with pytest.raises(
        ShoalError, match=r"tags=\['two words'\]: .* is not a single word"
    ) as caught:
        RunNotes.of_keys("", ("two words",))
    assert caught.value.key == "tags"
    with pytest.raises(ShoalError, match="notes: the note has more than 20,000 characters"):
        RunNotes.of_keys("x" * (MAX_NOTE_CHARS + 1), ())


def test_a_resumed_run_leaves_what_people_wrote_unless_it_is_given_others(tmp_path):
    given = ["tags=a,b", "notes=why"]
    with RunWriter.create(tmp_path, "run") as folder:

        def started(*words: str, is_new: bool = False) -> RunNotes:
            """The notes after a start of the run with these words."""
            requested = compose("train", words)[0]
            job: Any = SimpleNamespace(requested=requested, resumed=None if is_new else folder.path)
            write_labels(job, folder)
            folder.write_config(*texts_of(requested))
            return StoredRun(folder.path).notes()

        assert started(*given, is_new=True) == RunNotes("why", ("a", "b"))
        written = RunNotes("because", ("a", "mine"))
        write_notes(folder.path, written)
        assert started(*given) == written
        assert started("tags=a,b", "notes=new") == RunNotes("new", ("a", "mine"))
        assert started("tags=c", "notes=new") == RunNotes("new", ("c",))
        # A key that is taken away takes its words away.
        assert started("tags=c") == RunNotes("", ("c",))


def test_a_run_that_nobody_wrote_about_has_no_file(tmp_path):
    with RunWriter.create(tmp_path, "run") as folder:
        job: Any = SimpleNamespace(requested=compose("train", [])[0], resumed=None)
        write_labels(job, folder)
        assert not (folder.path / "notes.json").exists()


def test_mlflow_has_tags_with_values_and_the_note_as_description():
    labels = RunNotes("why", ("baseline", "größe+1"))
    assert tags_of(labels) == {
        "baseline": "true",
        "größe_1": "true",
        "mlflow.note.content": "why",
    }
    assert tags_of(RunNotes()) == {}

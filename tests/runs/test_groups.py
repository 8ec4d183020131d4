"""Groups on disk: bit for bit, opened by pandas and polars, written by a thread; what is damaged is
named."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import numpy as np
import pandas
import polars
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import cli
from shoal.commands.groups import groups as list_groups
from shoal.commands.view import groups as view_groups
from shoal.config.commands import GroupsConfig
from shoal.records import Branch, Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.report import sinks
from shoal.report.sinks import MOST_PENDING, GroupWriter
from shoal.runs.group_table import Database, GroupTable
from shoal.runs.groups import from_table, group_record, read_file, to_table, write_file
from shoal.runs.lines import StepLine
from shoal.runs.reader import StoredRun
from shoal.runs.writer import RunWriter
from shoal.text import ranges

singles = st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32)
doubles = st.floats(allow_infinity=False)
names = st.text("abcxyz_/é", min_size=1, max_size=4)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 9), max_size=2),
)
texts = st.text(st.characters(codec="utf-8"), max_size=5)


@st.composite
def completions(draw, index: int, version: int) -> Completion:
    size = draw(st.integers(0, 4))

    def array(element, dtype):
        return np.array(draw(st.lists(element, min_size=size, max_size=size)), dtype)

    return Completion(
        0,
        index,
        array(st.integers(0, 2**31 - 1), np.int32),
        array(singles, np.float32),
        array(st.booleans(), bool),
        array(st.integers(version - 1, version), np.int32),
        draw(st.sampled_from(StopReason)),
    )


@st.composite
def groups(draw) -> Group:
    size, version = draw(st.integers(1, 3)), draw(st.integers(0, 9))

    def column(element):
        return draw(st.lists(element, min_size=size, max_size=size))

    prompt = draw(st.one_of(texts, st.just([{"role": "user", "content": "2 + 3"}])))
    return Group(
        purpose=draw(st.sampled_from(Purpose)),
        step=draw(st.integers(0, 99)),
        version=version,
        example=Example(
            draw(st.integers(0, 2**40)), prompt, {"answer": draw(values), "mixed/": draw(values)}
        ),
        prompt_ids=np.array(draw(st.lists(st.integers(0, 9), max_size=3)), np.int32),
        completions=tuple(draw(completions(i, version)) for i in range(size)),
        texts=tuple(column(texts)),
        rewards=np.array(column(doubles)),
        valid=np.array(column(st.booleans())),
        reward_components={"correct": np.array(column(doubles)), "form": np.array(column(doubles))},
        correct=draw(st.one_of(st.none(), st.just(np.array(column(st.booleans()))))),
        subset=draw(texts),
        extra={name: column(values) for name in draw(st.lists(names, max_size=2, unique=True))},
    )


def assert_same(a: Group, b: Group) -> None:
    """Equal, and to the bit where they hold arrays."""
    for field in ("purpose", "step", "version", "texts", "subset"):
        assert getattr(a, field) == getattr(b, field)
    assert a.example.row == b.example.row and a.example.prompt == b.example.prompt
    assert dict(a.example.columns) == dict(b.example.columns)
    for x, y in [
        (a.prompt_ids, b.prompt_ids),
        (a.rewards, b.rewards),
        (a.valid, b.valid),
        *((values, b.reward_components[name]) for name, values in a.reward_components.items()),
    ]:
        assert_same_bits(x, y)
    assert (a.correct is None) == (b.correct is None) and np.array_equal(a.correct, b.correct)
    for x, y in itertools.zip_longest(a.completions, b.completions):
        assert (x.index, x.stop_reason) == (y.index, y.stop_reason)
        for field in ("token_ids", "logprobs", "loss_mask", "versions"):
            assert_same_bits(getattr(x, field), getattr(y, field))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    # NaN has no one pattern of bits
    if a.dtype.kind == "f":
        known = ~np.isnan(a)
    else:
        known = np.ones(a.shape, bool)
    assert a[known].tobytes() == b[known].tobytes() and np.array_equal(
        np.isnan(b.astype(float)), ~known
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_come_back_to_the_bit(data):
    given_groups = data.draw(st.lists(groups(), min_size=0, max_size=3))
    advantages = []
    for group in given_groups:
        advantages.append(
            data.draw(
                st.lists(st.floats(allow_nan=False), min_size=group.size, max_size=group.size)
            )
        )
    logprobs = {}
    for p, group in enumerate(given_groups):
        for g, c in enumerate(group.completions):
            if data.draw(st.booleans()):
                logprobs[(p, g)] = np.array(
                    data.draw(st.lists(singles, min_size=len(c), max_size=len(c))), np.float32
                )
    back = from_table(to_table(given_groups, advantages, logprobs))
    assert len(back) == len(given_groups)
    for p, (stored, group) in enumerate(zip(back, given_groups, strict=True)):
        assert_same(stored.group, group)
        assert stored.advantages is not None
        assert_same_bits(stored.advantages, np.array(advantages[p], np.float64))
        for g, found in enumerate(stored.token_arrays):
            assert found.keys() == ({"trainer_logprobs"} if (p, g) in logprobs else set())
            for values in found.values():
                assert_same_bits(values, logprobs[p, g])
        for name, column in group.extra.items():
            assert stored.group.extra[name] == column or set(map(repr, column)) == {"None"}
        json.dumps(group_record(stored), allow_nan=False)


def completion(index: int, tokens: list[int], logprobs: list[float]) -> Completion:
    size = len(tokens)
    return Completion(
        0,
        index,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.ones(size, bool),
        np.full(size, 3, np.int32),
        StopReason.EOS,
    )


def make_group(row: int = 17, **changes) -> Group:
    group = Group(
        purpose=Purpose.TRAIN,
        step=11,
        version=3,
        example=Example(
            row,
            [{"role": "user", "content": "2 + 3 = ?"}],
            {"answer": "5", "level": 2, "parts": [1, 2]},
        ),
        prompt_ids=np.array([5, 8, 13], np.int32),
        completions=(completion(0, [7, 9], [-0.1, -0.7]), completion(1, [4], [-2.5])),
        texts=("5", "six \ud83d"),
        rewards=np.array([1.1, np.nan]),
        reward_components={"correct": np.array([1.0, np.nan])},
        valid=np.array([True, False]),
        extra={"parsed": ["5", None]},
    )
    return dataclasses.replace(group, **changes)


def with_experts(group: Group, dtype: str) -> Group:
    """The experts of each token of 2 layers, 3 of a token. The first completion has a branch, the
    last a prompt of its own."""
    rng = np.random.default_rng(0)

    def experts(size: int) -> np.ndarray:
        return rng.integers(0, np.iinfo(dtype).max, (size, 2, 3)).astype(dtype)

    of_prompt = experts(len(group.prompt_ids))
    own_prompt = np.array([5, 8], np.int32)
    first, *_, last = [
        dataclasses.replace(one, extra={"experts": experts(len(one))}, prompt_experts=of_prompt)
        for one in (*group.completions, completion(2, [1, 2, 3], [-1.0, -2.0, -3.0]))
    ]
    branch = Branch(1, np.array([5, 8, 13, 7, 1], np.int32), experts(5))
    first = dataclasses.replace(first, branches=(branch,))
    last = dataclasses.replace(last, prompt_ids=own_prompt, prompt_experts=experts(2), index=1)
    return dataclasses.replace(group, completions=(first, last))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_the_experts_of_tokens_come_back_to_the_bit(dtype):
    group = with_experts(make_group(texts=("5", "6")), dtype)
    without = make_group(18)
    back, plain = (entry.group for entry in from_table(to_table([group, without])))
    assert_same(back, group)
    for ours, theirs in zip(back.completions, group.completions, strict=True):
        assert_same_bits(ours.extra["experts"], theirs.extra["experts"])
    ours, theirs = back.experts_by_prompt(), group.experts_by_prompt()
    assert ours.keys() == theirs.keys() and len(ours) == 3
    for prompt, experts in theirs.items():
        assert_same_bits(ours[prompt], experts)
    # In the same file as others that have none.
    assert plain.experts_by_prompt() == {}
    assert all(not one.extra for one in plain.completions)
    json.dumps(group_record(from_table(to_table([group]))[0]), allow_nan=False)


def test_the_experts_of_a_prompt_are_stored_once():
    group = with_experts(make_group(), "uint8")
    alike = [dataclasses.replace(group.completions[0], index=index) for index in range(2)]
    table = to_table([dataclasses.replace(group, completions=tuple(alike))])
    first, second = table["prompt_experts"].to_pylist()
    assert len(first) == 3 * 2 * 3 and second is None
    assert [len(entry) for entry in table["experts"].to_pylist()] == [2 * 2 * 3] * 2


def test_the_page_of_a_group_reads_no_experts(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    with RunWriter(tmp_path) as run:
        run.write_groups(12, [with_experts(make_group(), "uint8")], [[0.7, 0.0]], {})
    index = GroupTable(StoredRun(tmp_path), Database([tmp_path]))
    index.refresh()
    queries = []
    read = view_groups._read

    def noted(index, file, columns, *rest):
        queries.append(columns)
        return read(index, file, columns, *rest)

    monkeypatch.setattr(view_groups, "_read", noted)
    detail = view_groups.group_detail(index, "step_000012", 0)
    assert [one["completion"] for one in detail["completions"]] == [0, 1]
    assert queries and "experts" not in queries[0]


def test_groups_without_experts_have_no_columns_of_them():
    assert not [name for name in to_table([make_group()]).column_names if "experts" in name]


def test_experts_of_other_tokens_are_refused():
    group = with_experts(make_group(), "uint8")
    first, second = group.completions
    short = dataclasses.replace(first, extra={"experts": first.extra["experts"][:1]})
    table = to_table([dataclasses.replace(group, completions=(short, second))])
    with pytest.raises(ValueError, match="2 tokens, but the experts of 1"):
        from_table(table)


def write(folder: Path, step: int = 12) -> Path:
    with RunWriter(folder) as run:
        logprobs = {(0, 0): np.array([-0.2, -0.6], np.float32)}
        return run.write_groups(
            step, [make_group(), make_group(18)], [[0.7, 0.0], [0.1, 0.2]], logprobs
        )


def test_a_parquet_file_is_one_row_a_completion_for_pandas_and_polars(tmp_path):
    path = write(tmp_path)
    assert path.name == "step_000012.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    p, d = polars.read_parquet(path), pandas.read_parquet(path)
    assert p.height == len(d) == 4
    assert p["group"].to_list() == d["group"].tolist() == [0, 0, 1, 1]
    assert p["completion"].to_list() == [0, 1, 0, 1] and p["row"].to_list() == [17, 17, 18, 18]
    assert p["text"].to_list() == d["text"].tolist() == ["5", "six \\ud83d"] * 2
    assert json.loads(p["prompt"][0])[0]["content"] == "2 + 3 = ?"
    assert p["column/answer"].to_list() == ["5"] * 4 and p["column/level"].dtype == polars.Int64
    assert json.loads(d["column/parts"][0]) == [1, 2]
    assert (
        p["reward"].to_list() == [1.1, None] * 2
        and d["reward"].isna().tolist() == [False, True] * 2
    )
    assert p["token_ids"].to_list()[:2] == [[7, 9], [4]] and p["logprobs"].dtype == polars.List(
        polars.Float32
    )
    assert p["trainer_logprobs"].to_list()[1:] == [None] * 3
    assert p.group_by("group", maintain_order=True).agg(polars.col("advantage").sum())[
        "advantage"
    ].to_list() == pytest.approx([0.7, 0.3])
    assert d.groupby("group")["advantage"].sum().tolist() == pytest.approx([0.7, 0.3])


def test_a_step_is_read_back_with_what_was_stored_beside(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    write(tmp_path)
    first, second = StoredRun(tmp_path).groups(12)
    assert first.advantages is not None and first.advantages.tolist() == [0.7, 0.0]
    assert first.token_arrays[0]["trainer_logprobs"].tolist() == [
        np.float32(-0.2),
        np.float32(-0.6),
    ]
    assert first.token_arrays[1] == {} and second.group.example.row == 18
    assert_same(
        StoredRun(tmp_path).groups(12)[0].group,
        dataclasses.replace(make_group(), texts=("5", "six \\ud83d")),
    )


@pytest.mark.slow
def test_values_by_turn_are_read_back_and_columns_of_others_are_as_they_were(tmp_path):
    by_turn = make_group(turn_rewards=(np.array([0.1, 1.0]), np.array([np.nan])))
    advantages = [[np.array([0.5, -0.25]), np.array([0.0])], [np.zeros(1), np.zeros(2)]]
    with RunWriter(tmp_path) as run:
        path = run.write_groups(
            12, [by_turn, make_group(18)], [[0.1, 0.0], [0.0, 0.0]], None, advantages
        )
    first, second = read_file(path)
    for got, want in zip(first.group.turn_rewards, by_turn.turn_rewards, strict=True):
        assert_same_bits(got, want)
    for got, want in zip(first.turn_advantages, advantages[0], strict=True):
        assert_same_bits(got, want)
    assert second.group.turn_rewards == () and len(second.turn_advantages) == 2
    record = group_record(first)["completions"][0]
    assert record["turn_rewards"] == [0.1, 1.0] and record["turn_advantages"] == [0.5, -0.25]
    other = tmp_path / "other"
    other.mkdir()
    assert not set(pq.read_schema(write(other)).names) & {"turn_rewards", "turn_advantages"}


def test_reading_a_file_starts_no_thread(tmp_path):
    """One that pyarrow starts may still be on its way when a short command ends, and aborts it
    (exit code 134)."""
    path = write(tmp_path)
    code = (
        "import os, sys, pyarrow.parquet\nfrom pathlib import Path\nfrom shoal.runs.groups "
        "import read_file\n"
        "before = os.listdir('/proc/self/task')\nassert len(read_file(Path(sys.argv[1]))) == 2\n"
        "assert os.listdir('/proc/self/task') == before, 'a thread was started'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_files_of_many_steps_have_one_schema(tmp_path):
    """polars.scan_parquet of the folder refuses files whose columns differ."""
    with RunWriter(tmp_path) as run:
        run.write_groups(1, [make_group()], [[0.0, 0.0]], {})  # no group was trained on
        run.write_groups(2, [make_group()], [[0.7, 0.0]], {(0, 0): np.zeros(2)})
    assert polars.scan_parquet(tmp_path / "groups" / "step_*.parquet").collect().height == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-30],
        lambda data: b"",
        lambda data: b'{"step": 3}\n',
        lambda data: data[:40] + b"\0" * 200 + data[240:],
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    path = write(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShoalError, match=r"step_000012\.parquet is damaged") as caught:
        StoredRun(tmp_path).groups(12)
    assert "\n" not in str(caught.value)


def test_lists_of_other_lengths_are_refused_both_ways(tmp_path):
    group = make_group()
    short = dataclasses.replace(
        group, completions=(completion(0, [7, 9], [-0.1]), group.completions[1])
    )
    with pytest.raises(ValueError, match="one a token"):
        write_file(tmp_path / "short.parquet", [short])
    with pytest.raises(ValueError, match="one a token"):
        write_file(tmp_path / "short.parquet", [group], None, {(0, 0): np.zeros(3)})
    with pytest.raises(ValueError, match="one for each completion"):
        write_file(tmp_path / "short.parquet", [group], [[0.0]])
    assert list(tmp_path.iterdir()) == []
    table = to_table([group])
    index, short_table = table.schema.get_field_index("logprobs"), to_table([short_logprobs()])
    other = table.set_column(index, "logprobs", short_table["logprobs"])
    with pytest.raises(ValueError, match="2 tokens, but logprobs has 1 entries"):
        from_table(other.replace_schema_metadata(table.schema.metadata))


def short_logprobs() -> Group:
    """A group like `make_group`'s with fewer tokens."""
    return make_group(completions=(completion(0, [7], [-0.1]), completion(1, [4], [-2.5])))


def test_no_flipped_bit_in_the_pages_of_a_parquet_file_goes_unseen(tmp_path):
    """What is read is what was written, or nothing: pages carry checksums."""
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    path = write(tmp_path)
    whole, good, seen = path.read_bytes(), StoredRun(tmp_path).groups(12), 0
    footer = 8 + int.from_bytes(whole[-8:-4], "little")
    for position in range(4, len(whole) - footer, 61):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            for found, wanted in itertools.zip_longest(StoredRun(tmp_path).groups(12), good):
                assert_same(found.group, wanted.group)
        except ShoalError:
            seen += 1
    assert seen > 20


def test_a_parquet_file_of_another_maker_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    path = write(tmp_path)
    polars.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(ShoalError, match="is damaged"):
        StoredRun(tmp_path).groups(12)


def test_steps_that_are_not_there_are_named_with_those_that_are(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    with pytest.raises(ShoalError, match="did not finish its first step"):
        StoredRun(tmp_path).groups(1)
    for step in (1, 2, 3, 7):
        write(tmp_path, step)
    with pytest.raises(
        ShoalError, match=r"step=5: .*has not finished has no groups of .*steps 1-3, 7"
    ):
        StoredRun(tmp_path).groups(5)
    (tmp_path / "config.yaml").write_text("report:\n  groups: false\n")
    (tmp_path / "groups").rename(tmp_path / "gone")
    with pytest.raises(ShoalError, match=r"report\.groups=false"):
        StoredRun(tmp_path).groups(1)
    assert ranges([]) == "" and ranges([4, 2, 3]) == "2-4"


def test_a_torn_last_line_of_metrics_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert StoredRun(tmp_path).metrics() == {1: {"loss": 0.5}}
    assert StoredRun(tmp_path).steps() == [StepLine(1, {"loss": 0.5})]
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
    assert list(StoredRun(tmp_path).metrics()) == [1, 2]
    path.write_text('{"step": 1, "lo\n{"step": 2, "loss": 0.4}\n')
    with pytest.raises(ShoalError, match=r"metrics\.jsonl, line 1 is damaged \(it is not JSON\)"):
        StoredRun(tmp_path).metrics()


# ---- the thread


def test_groups_are_on_disk_after_a_flush_in_order():
    written, may_go = [], threading.Event()

    def write(*arguments):
        may_go.wait(10)
        written.append(arguments)

    writer = GroupWriter(write)
    for step in range(MOST_PENDING):
        writer.put(step, "groups")
    assert written == []  # the loop was not held up
    may_go.set()
    for step in range(MOST_PENDING, 20):
        writer.put(step, "groups")
    writer.flush()
    assert written == [(step, "groups") for step in range(20)]
    writer.close()
    writer.close()


def test_a_full_queue_holds_the_loop_up_and_no_more_than_it_holds_is_kept():
    may_go = threading.Event()
    writer = GroupWriter(lambda *_: may_go.wait(10))
    for step in range(MOST_PENDING + 1):  # one is being written
        writer.put(step)
    late = threading.Thread(target=writer.put, args=("late",))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    may_go.set()
    late.join(10)
    assert not late.is_alive()
    writer.close()


def test_a_failure_is_raised_once_where_the_loop_next_calls():
    def write(step):
        if step == 1:
            raise ShoalError("cannot write step 1")
        written.append(step)

    written: list[int] = []
    writer = GroupWriter(write)
    writer.put(0)
    writer.put(1)
    with pytest.raises(ShoalError, match="cannot write step 1"):
        writer.flush()
    writer.put(3)
    writer.flush()
    assert written == [0, 3]
    writer.close()


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with RunWriter(tmp_path) as run:
        writer = GroupWriter(run.write_groups)
        monkeypatch.setattr("pyarrow.parquet.write_table", full)
        writer.put(1, [make_group()])
        with pytest.raises(
            ShoalError, match=r"step_000001\.parquet: No space left on device; make room"
        ):
            writer.flush()
        writer.close()
    assert list((tmp_path / "groups").iterdir()) == []


def test_a_disk_that_does_not_answer_is_one_error_in_bounded_time(monkeypatch):
    monkeypatch.setattr(sinks, "STUCK_SECONDS", 0.3)
    answers = threading.Event()
    for wait in (
        GroupWriter.flush,
        lambda writer: [writer.put(step) for step in range(MOST_PENDING + 1)],
    ):
        writer = GroupWriter(lambda *_: answers.wait(60), "/runs/a")
        writer.put(0)
        with pytest.raises(
            ShoalError,
            match=r"/runs/a: the disk has not answered for 0 s, and groups are not written",
        ):
            wait(writer)
        with pytest.raises(ShoalError):  # no checkpoint may be saved without them
            writer.flush()
        writer.close()
    answers.set()


# ---- shoal groups


def test_a_step_is_printed_for_reading_and_as_json(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    write(tmp_path)
    assert cli.main(["groups", str(tmp_path), "step=12", "group=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (
        shown[0]
        == "== step 12, group 1: row 18, 3 prompt tokens, sampled by the weights after step 3"
    )
    assert shown[1:3] == ["prompt:", "    user: 2 + 3 = ?"]
    assert shown[3:5] == [
        "completion 0: reward 1.1, correct 1, advantage 0.1, 2 tokens, ended by eos:",
        "    5",
    ]
    assert "unscorable" in shown[5] and len(shown) == 7
    assert cli.main(["groups", str(tmp_path), "step=12", "json=true"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert captured.err == ""
    assert printed["step"] == 12 and [group["row"] for group in printed["groups"]] == [17, 18]
    assert printed["groups"][0]["completions"][0]["token_ids"] == [7, 9]
    assert cli.main(["groups", str(tmp_path), "step=12", "group=2"]) == 2
    assert "has 2 groups, 0 to 1" in capsys.readouterr().err
    assert cli.main(["groups", str(tmp_path), "step=5"]) == 2
    assert "it has those of steps 12" in capsys.readouterr().err


def test_groups_of_an_evaluation_are_printed_in_full_by_a_filter(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    write(tmp_path)
    held_out = make_group(20, purpose=Purpose.EVALUATE, subset="held_out", step=12)
    with RunWriter(tmp_path) as run:
        run.write_groups(12, [held_out])
    assert cli.main(["groups", str(tmp_path), "step=12", "filter=set=held_out"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("== step 12, group 0 of held_out: row 20,") and shown.count("==") == 1
    assert cli.main(["groups", str(tmp_path), "step=12", "group=1", "filter=set=train"]) == 0
    assert capsys.readouterr().out.startswith("== step 12, group 1 of train: row 18,")
    assert cli.main(["groups", str(tmp_path), "step=12", "filter=reward>100"]) == 2
    error = capsys.readouterr().err
    assert "step 12 of" in error and "no such group" in error


@pytest.mark.parametrize("words", [60, 6000])
def test_the_end_of_a_long_prompt_is_listed_since_the_question_stands_there(tmp_path, words):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    prompt = [{"role": "user", "content": "word " * words + "How many are left?"}]
    with RunWriter(tmp_path) as run:
        run.write_groups(1, [make_group(example=Example(3, prompt, {}))])
    [row] = list_groups(GroupsConfig(run=str(tmp_path), json=True))["groups"]
    assert "How many are left?" in row["prompt"] and len(row["prompt"]) <= 170


def test_a_query_that_duckdb_gives_up_is_one_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    write(tmp_path)

    def rows(*_: object, **__: object) -> None:
        raise duckdb.OutOfMemoryException("could not allocate block\nLINE 1: SELECT")

    monkeypatch.setattr(GroupTable, "rows", rows)
    assert cli.main(["groups", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and "could not allocate block)" in error
        and "step=1 prints those" in error
    )

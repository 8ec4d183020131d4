"""The tools and environments of a run: by name from files, refused where they cannot work, and
their rewards."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import descendants, gone

from shoal.config.merge import compose
from shoal.config.sections.reward import RewardSection
from shoal.job import environments as job_environments
from shoal.job.environments import open_sessions
from shoal.job.job import Job
from shoal.records import Example, Failure, ShoalError
from shoal.report.console import Console
from shoal.rewards.ended_environment import EndedEnvironment, environment_rewards
from shoal.rewards.loading import load_functions, name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores, with_failed_environments
from shoal.tasks.task import Task

TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def times(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


def bare(a, b):
    return a


number = 5


class Game:
    def reset(self, answer: str, **columns) -> str:
        self.answer = answer
        return "Guess."

    def guess(self, text: str) -> str:
        """Guesses.

        Args:
            text: The guess.
        """
        return "yes" if text == self.answer else "no"

    def get_reward(self) -> float:
        return 0.25


class Narrow(Game):
    def reset(self, question: str) -> None: ...


class Demanding(Game):
    def reset(self, anser: str, **columns) -> None: ...


class Odd(Game):
    def reset(self, **columns) -> int:
        return 5


class Failing(Game):
    def __init__(self) -> None:
        raise OSError("no server")


class Silent(Game):
    def guess(self, text):
        return ""


GAMES = {"game": Game, "narrow": Narrow}
'''
ROWS = [
    Example(i, [{"role": "user", "content": "2 + 3?"}], {"question": "2 + 3?", "answer": "5"})
    for i in range(4)
]


def nothing(completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "acts.py").write_text(TOOLS)
    return path


def job(rows: Any = ROWS, **keys: Any) -> Job:
    task = Task("rows", rows, {"held_out": rows[:2]}, name_functions([nothing]))
    config, _ = compose("train", [f"{key}={value}" for key, value in keys.items()])
    return Job(config, Console(io.StringIO()), task=task)


def test_tools_and_an_environment_come_from_files(file: Path) -> None:
    with job(tools=f"{file}:add,times", environment=f"{file}:Game") as made:
        assert [tool.__name__ for tool in made.loaded_task.tools] == ["add", "times"]
        assert list(made.loaded_task.environments) == ["Game"]
        assert made.sessions is not None
        assert list(made.sessions.functions(ROWS[0].columns)) == ["add", "times", "guess"]
        assert [one.name for one in made.reward_functions] == ["nothing", "Game"]
        made.sessions.open("r", ROWS[0].columns)
        assert [reply.value for reply in made.sessions.collect(60.0)] == ["Guess."]
    with job() as made:
        assert made.sessions is None


def test_a_mapping_of_environments_is_chosen_from_by_a_column(file: Path) -> None:
    rows = [Example(0, ROWS[0].prompt, {"answer": "5", "environment": "game"})]
    with job(rows, environment=f"{file}:GAMES") as made:
        assert made.sessions is not None
        assert list(made.loaded_task.environments) == ["game", "narrow"]
        assert [one.name for one in made.reward_functions] == ["nothing", "Game", "Narrow"]
    with (
        job(environment=f"{file}:GAMES") as made,
        pytest.raises(
            ShoalError, match="column 'environment' holds None: expected one of game, narrow"
        ),
    ):
        _ = made.sessions


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"tools": "FILE:ad"}, "tool '.*acts.py:ad': acts.py defines no 'ad', did you mean add?"),
        ({"tools": "add"}, "tool ':add': expected `file.py:function`"),
        (
            {"tools": "FILE:number"},
            "tool '.*acts.py:number': expected a function, or an object .*, not a int",
        ),
        ({"tools": "FILE:bare"}, "[Tt]ool bare"),
        ({"tools": "FILE:add,add"}, "there are two tools of the name 'add'; rename one"),
        ({"environment": "none.py:Game"}, "environment 'none.py:Game': there is no file none.py"),
        (
            {"environment": "FILE:number"},
            "'int' raised TypeError: .*: it must make an environment, without arguments",
        ),
        ({"environment": "FILE:Silent"}, "[Tt]ool guess"),
        (
            {"environment": "FILE:Narrow"},
            "environment Narrow: reset failed for data row 0: TypeError: .*got an unexpected "
            r"keyword argument 'answer'; it must return .* of the columns question, answer; "
            r"\*\*columns takes what",
        ),
        (
            {"environment": "FILE:Demanding"},
            "environment Demanding: reset failed .* missing 1 required positional "
            "argument: 'anser'; .* of the columns question, answer",
        ),
        (
            {"environment": "FILE:Odd"},
            "environment Odd: reset failed for data row 0: TypeError: reset returned 5: exp",
        ),
        (
            {"environment": "FILE:Failing"},
            "environment Failing: reset failed for .*: OSError: no server",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_read(
    file: Path, keys: dict[str, str], text: str
) -> None:
    keys = {key: value.replace("FILE", str(file)) for key, value in keys.items()}
    with job(**keys) as made, pytest.raises(ShoalError, match=text):
        made.check()


def test_a_limit_that_no_answer_fits_is_an_error() -> None:
    examples = [Example(0, [{"role": "user", "content": "2 + 3?"}], {"answer": "5"})]
    config, _ = compose(
        "train", ["model=tiny-tools", "task=calculator", "sampling.max_completion_tokens=15"]
    )
    with (
        Job(config, Console(io.StringIO())) as made,
        pytest.raises(
            ShoalError,
            match=r"sampling\.max_completion_tokens=15: all tokens of a rollout .* takes at least "
            r"16",
        ),
    ):
        made.encode(examples[0])


def test_the_examples_answer_and_reward() -> None:
    examples = Path(__file__).parents[2] / "examples"
    rows = [Example(0, ROWS[0].prompt, {"answer": "#### 5", "code": 417})]
    with job(
        rows, tools=f"{examples}/tools.py:calculate", environment=f"{examples}/environment.py:Safe"
    ) as made:
        sessions = made.sessions
        assert sessions is not None
        sessions.open("r", rows[0].columns)
        for name, arguments in [
            ("calculate", {"expression": "12 * -(3 + 4)"}),
            ("calculate", {"expression": "open()"}),
            ("turn", {"code": 400}),
            ("turn", {"code": 417}),
        ]:
            sessions.call("r", name, arguments)
        sessions.end("r")
        replies = []
        while len(replies) < 6:
            replies += sessions.collect(1.0)
    values = [reply.value for reply in replies]
    assert values[:2] == [" Its code has 3 digits.", "-84"] and '"error"' in values[2]
    assert values[3:] == [
        "higher",
        "open",
        {"reward": 1.0, "state": {"code": 417, "tries": 2, "is_open": True}},
    ]
    turns = [
        {"role": "tool", "name": "calculate", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    names = [
        f"{examples}/tools.py:right",
        f"{examples}/tools.py:called",
        f"{examples}/environment.py:few_tries",
    ]
    with RewardPool(
        name_functions(load_functions(names)), RewardSection(timeout_seconds=20.0)
    ) as pool:
        pool.submit(
            0,
            rows,
            [["5"]],
            [[[1]]],
            1,
            messages=[[turns]],
            environments=[[EndedEnvironment("Safe", values[5]["state"], 1.0)]],
        )
        scores = pool.collect(wait=True)[0][1]
    assert {name: float(values[0, 0]) for name, values in scores.components.items()} == {
        "right": 1.0,
        "called": 0.1,
        "few_tries": 0.05,
    }
    for name in ("tools.py", "environment.py"):
        assert len((examples / name).read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("environment", "fault"), [("Game", ""), ("Rewardless", "it has no reward of its own")]
)
def test_an_environment_may_be_the_only_reward(
    file: Path, tmp_path: Path, environment: str, fault: str
) -> None:
    file.write_text(TOOLS + "\n\nRewardless = type('Rewardless', (), {'reset': Game.reset})\n")
    rows = []
    for i in range(300):
        rows.append({"prompt": [{"role": "user", "content": f"Number {i}?"}], "answer": str(i)})
    (data := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["task=custom", f"task.path={data}", f"environment={file}:{environment}"]
    with Job(compose("train", words)[0], Console(io.StringIO())) as made:
        _ = made.check_named_files
        if fault:
            with pytest.raises(ShoalError, match=fault):
                _ = made.reward_functions
        else:
            assert [one.name for one in made.reward_functions] == ["Game"]


# ---- the sandbox


PRYING = '''
import os, pathlib, socket, subprocess, tempfile

def write(path: str) -> str:
    """Writes.

    Args:
        path: Where.
    """
    pathlib.Path(path).write_text("x")
    return pathlib.Path(path).read_text()

def connect(port: int) -> str:
    """Connects.

    Args:
        port: Where.
    """
    socket.create_connection(("127.0.0.1", port), 5).close()
    return "connected"

def reach(path: str) -> str:
    """Connects to a socket of this machine.

    Args:
        path: Where.
    """
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
    return "connected"

def environments() -> str:
    """Reads the environments of all processes."""
    found = []
    for name in os.listdir("/proc"):
        try:
            found.append(pathlib.Path("/proc", name, "environ").read_text())
        except OSError:
            pass
    return str(any("SECRET" in one for one in found))

def opened() -> str:
    """Lists the open files."""
    return " ".join(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{name}"))

def look() -> str:
    """Looks around."""
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    seen = f"{os.environ.get('SECRET')} {len(processes) < 10} {tempfile.gettempdir()}"
    return f"{seen} {os.path.exists('prying.py')}"

def leave() -> str:
    """Leaves a child."""
    return str(bool(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))

class Game:
    def reset(self, **columns) -> str:
        return "Guess."
'''


@pytest.mark.system
@pytest.mark.skipif(
    not shutil.which("bwrap"), reason="bubblewrap is missing (apt install bubblewrap)"
)
def test_in_the_sandbox_there_is_no_network_nothing_to_write_and_no_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "prying.py").write_text(PRYING)
    monkeypatch.setenv("SECRET", "key")
    monkeypatch.chdir(tmp_path)
    keys = {"environment.sandbox": "bwrap", "environment.timeout_seconds": "30"}
    before = set(descendants())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        job(tools=f"{file}:write,connect,look,leave", environment=f"{file}:Game", **keys) as made,
    ):
        sessions = made.sessions
        assert sessions is not None
        found = {}
        sessions.open("r", {})
        for name, arguments in [
            ("write", {"path": str(tmp_path / "out")}),
            ("write", {"path": "/dev/shm/out"}),
            ("connect", {"port": server.getsockname()[1]}),
            ("look", {}),
            ("leave", {}),
        ]:
            sessions.call("r", name, arguments)
        replies = []
        while len(replies) < 6:
            replies += sessions.collect(1.0)
        found = []
        for reply in replies:
            found.append(reply.value if not reply.kind else reply.error)
        assert found[0] == "Guess." and not (tmp_path / "out").exists()
        assert "Read-only file system" in found[1] and found[2] == "x"
        assert found[3].startswith(("ConnectionRefusedError", "OSError"))
        assert found[4:] == ["None True /dev/shm True", "True"]
        processes = set(descendants()) - before
    assert processes and all(gone(pid) for pid in processes)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("bwrap"), reason="bubblewrap is missing (apt install bubblewrap)"
)
def test_in_the_sandbox_there_is_no_socket_no_environment_and_no_file_of_the_trainer(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "prying.py").write_text(PRYING)
    monkeypatch.setenv("SECRET", "key")
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path_factory.mktemp("agent") / "agent.sock"
    at_home = tmp_path / "agent.sock"  # beside the tools, in a folder that is shown
    spaced, relative = tmp_path / "an agent.sock", tmp_path / "near.sock"
    keys = {"environment.sandbox": "bwrap", "environment.timeout_seconds": "30"}
    with contextlib.ExitStack() as stack:
        for path in (elsewhere, at_home, spaced, relative):
            end = stack.enter_context(socket.socket(socket.AF_UNIX))
            end.bind(path.name if path == relative else str(path))
            end.listen()
        os.set_inheritable(stack.enter_context((tmp_path / "weights").open("w")).fileno(), True)
        made = stack.enter_context(job(tools=f"{file}:reach,environments,opened", **keys))
        sessions = made.sessions
        assert sessions is not None
        sessions.open("r", {})
        for path in (elsewhere, at_home, spaced, relative):
            sessions.call("r", "reach", {"path": str(path)})
        sessions.call("r", "environments", {})
        sessions.call("r", "opened", {})
        replies = []
        while len(replies) < 7:
            replies += sessions.collect(1.0)
        found = []
        for reply in replies:
            found.append(reply.value if not reply.kind else reply.error)
        assert found[1].startswith("FileNotFoundError")
        for one in found[2:5]:
            assert one.startswith(("ConnectionRefusedError", "PermissionError", "OSError"))
        assert found[5] == "False"
        assert "weights" not in found[6]


@pytest.mark.skipif(
    not shutil.which("bwrap"), reason="bubblewrap is missing (apt install bubblewrap)"
)
def test_a_socket_of_another_network_namespace_is_found(tmp_path: Path) -> None:
    """A file's socket is reached from every namespace, and /proc/net/unix lists those of one."""
    path = tmp_path.resolve() / "apart.sock"
    listening = (
        f"import socket; end = socket.socket(socket.AF_UNIX); end.bind({str(path)!r}); "
        "end.listen(); print('up', flush=True); input()"
    )
    words = [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--unshare-net",
        "--die-with-parent",
        sys.executable,
        "-c",
        listening,
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as apart:
        assert apart.stdout is not None and apart.stdout.readline() == "up\n"
        assert str(path) not in Path("/proc/net/unix").read_text()
        assert str(path) in set(job_environments._sockets())
        apart.communicate("\n", timeout=30)


def test_a_sandbox_needs_bwrap_and_files(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    keys = {"environment.sandbox": "bwrap"}
    local = replace(
        Task("rows", ROWS, {}, name_functions([nothing])),
        environments={
            "local": type(
                "Local", (), {"reset": lambda self: None, "__qualname__": "test.<locals>.Local"}
            )
        },
    )
    with pytest.raises(
        ShoalError, match=r"environment.sandbox=bwrap: 'Local' is not a function or class of a file"
    ):
        open_sessions(local, compose("train", ["environment.sandbox=bwrap"])[0])
    monkeypatch.setenv("PATH", "")
    with (
        job(tools=f"{file}:add", **keys) as made,
        pytest.raises(
            ShoalError, match=r"environment.sandbox=bwrap: this machine has no bwrap: install it"
        ),
    ):
        _ = made.sessions


# ---- rewards


def scored(*functions: Any, **given: Any) -> Scores:
    with RewardPool(functions, RewardSection(timeout_seconds=20.0)) as pool:
        pool.submit(0, ROWS[:1], [["one", "two"]], [[[1], [2]]], 1, **given)
        return pool.collect(wait=True)[0][1]


def game(reward: float | None = 0.25, **state: Any) -> EndedEnvironment:
    return EndedEnvironment("game", state, reward)


def test_an_environments_reward_is_a_component_of_weight_1(file: Path) -> None:
    with job(environment=f"{file}:Game") as made:
        own = environment_rewards({"game": made.loaded_task.environments["Game"]}, taken=["Game"])
    scores = scored(
        *name_functions([nothing]),
        *own,
        environments=[[game(), EndedEnvironment("other", {}, 0.5)]],
    )
    np.testing.assert_array_equal(scores.components["Game_2"], [[0.25, np.nan]])
    np.testing.assert_array_equal(scores.rewards, [[0.25, 0.0]])


def test_reward_functions_get_the_messages_and_the_environments(file: Path) -> None:
    def turns(completions: Any, environments: Any, **columns: Any) -> list[float]:
        result = []
        for messages, environment in zip(completions, environments, strict=True):
            result.append(len(messages) + environment.count)
        return result

    call = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "add", "content": "6"},
        {"role": "assistant", "content": "5"},
    ]
    given = {"messages": [[call, call[-1:]]], "environments": [[game(count=10), game(count=20)]]}
    np.testing.assert_array_equal(scored(*name_functions([turns]), **given).rewards, [[14, 21]])

    def verl(solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return (
            extra_info["num_turns"]
            + 10 * (solution_str in ("one", "two"))
            + 100 * (ground_truth == "5")
        )

    np.testing.assert_array_equal(scored(*name_functions([verl]), **given).rewards, [[114, 112]])
    np.testing.assert_array_equal(scored(*name_functions([verl])).rewards, [[112, 112]])


def test_an_ended_environment_can_be_read_alone_and_sent() -> None:
    ended = pickle.loads(pickle.dumps(game(turns=3)))
    assert (ended.turns, ended.get_reward()) == (3, 0.25)
    with pytest.raises(AttributeError, match="no attribute 'lock' of plain values"):
        _ = ended.lock
    failed = EndedEnvironment()
    assert failed.turns is None and failed.get_reward() is None


@pytest.mark.parametrize(
    ("policy", "rewards", "valid"),
    [("zero", [[0.0, 2.0]], [[True, True]]), ("skip", [[np.nan, 2.0]], [[False, True]])],
)
def test_a_failed_environment_is_scored_by_its_policy(
    policy: Any, rewards: Any, valid: Any
) -> None:
    scores = Scores(np.array([[1.0, 2.0]]), {}, np.array([[True, True]]))
    failure = Failure("environment", 7, 0, "died", "an environment failed")
    found = with_failed_environments(scores, [failure], policy)
    assert found.failures == (failure,)
    np.testing.assert_array_equal(found.rewards, rewards)
    np.testing.assert_array_equal(found.valid, valid)

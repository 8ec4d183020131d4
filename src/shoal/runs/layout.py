"""Where a run's folder is, how its files are called, its lock, and how the newest of several runs
is found."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.buckets import RUNS, address, fetch, is_bucket
from shoal.config.key import get_value, keys_of, with_values
from shoal.config.train import Config
from shoal.files import check_local, explain_write_errors, find_input
from shoal.records import ShoalError
from shoal.runs.lines import open_text

if TYPE_CHECKING:
    from shoal.config.merge import Resolved


def make_run_folder(
    base: str | os.PathLike[str], run_name: str = "", now: datetime | None = None
) -> Path:
    """Makes a run's folder and returns its path: `base/run_name`, which may exist and hold a run,
    or without a name a new one, `base/YYYY-MM-DD/HH-MM-SS` (with -1, -2, ... if that exists).
    `now`: the time for that name, by default the present. If `base` is in a bucket, the folder is
    the local one that the run works in. Writes nothing into the folder, and takes no lock.

    ShoalError if the folder cannot be made, if its path has a "[", or if a named one holds files
    but no run."""
    base = check_local(os.fspath(base), "base_output_directory", RUNS)
    if "[" in str((base / run_name).absolute()):
        raise ShoalError(
            f"the run folder {base / run_name} has a [ in its path, and checkpoints cannot be read "
            "from there: choose another run_name or base_output_directory"
        )
    if run_name:
        path = named_folder(os.fspath(base), run_name)
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            refuse_foreign(path)
        return path
    time = now or datetime.now()
    path = base / time.strftime("%Y-%m-%d") / time.strftime("%H-%M-%S")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    suffix = 0  # number behind the time; 0: none
    while True:
        free = path.with_name(f"{path.name}-{suffix}") if suffix else path
        # If the folder exists, also because another process has just made it, the next name is
        # tried.
        with explain_write_errors(path), contextlib.suppress(FileExistsError):
            free.mkdir()
            return free
        suffix += 1


def refuse_foreign(path: Path) -> None:
    """Raises ShoalError if a folder holds files, but no config.yaml, so that a run there would mix
    with something else. Hidden files and those in EMPTY do not count, and an empty folder is
    allowed. The folder must exist."""
    foreign = []
    for entry in path.iterdir():
        if entry.name not in EMPTY and entry.name[0] != ".":
            foreign.append(entry.name)
    if foreign and CONFIG not in foreign:  # with config.yaml the folder is a run
        raise ShoalError(
            f"the folder {path} holds something that is not a run ({min(foreign)}, no {CONFIG}): "
            "choose another run_name, or empty it",
            "run_name",
        )


def named_folder(base: str | os.PathLike[str], run_name: str) -> Path:
    """Returns the path of the folder of a run with this name, which need not exist; if `base` is
    in a bucket, that of the local folder in which the run works. ShoalError if the name is empty or
    leads out of `base`."""
    name = Path(run_name)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in run_name:
        raise ShoalError(
            f"run_name={run_name!r}: expected a name under base_output_directory, without '..' or "
            "a leading '/'"
        )
    return check_local(os.fspath(base), "base_output_directory", RUNS) / name


def find_named(base: str | os.PathLike[str], run_name: str) -> Path:
    """Returns the folder in which a run of this name can be read: `named_folder`, or, if `base` is
    in a bucket, a local copy without weights and groups. The folder need not exist."""
    folder = named_folder(base, run_name)
    if is_bucket(base):
        return fetch(
            address(folder), "base_output_directory", weights=False, groups=False, may_be_empty=True
        )
    return folder


def is_run(path: Path) -> bool:
    """True if a folder holds a run's settings."""
    return (path / CONFIG).is_file()


CONFIG = "config.yaml"


DECIDED = "decided.yaml"


RECIPE = "recipe.yaml"
"""The recipe that a run follows, with all its settings; absent if it follows none."""


SUMMARY = "summary.json"


LOCK = ".lock"


WORKER_PROOF = "worker_proof.json"


MODEL_FOLDER = "model"
"""Folder with the model's config and tokenizer, so that a checkpoint can be read without the
model's source."""


EMPTY = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", WORKER_PROOF)
"""Files that a run folder may hold before its configuration is written, apart from hidden files."""


class Lock:
    """Keeps a second process out of a run folder; released by `release`, or when the process that
    holds it ends, however it ends.

    `missing` says why a file system (some network ones) grants no locks, and no process is kept
    out; "" if the lock works."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock of a folder, which must exist, and writes who holds it to its file
        `.lock`. Does not wait: ShoalError, which names the holder, if another process has the
        lock."""
        import fcntl

        path, self.missing = folder / LOCK, ""
        with explain_write_errors(path):
            self._file = open_text(path, "a+")  # keeps the holder's name until the lock is taken
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.readline().strip() or "another process"
            self._file.close()
            raise ShoalError(
                f"the run folder {folder} is in use by {holder}: wait for it, stop it, or choose "
                "another run_name"
            ) from error
        except OSError as error:
            self.missing = error.strerror or str(error)
        with explain_write_errors(path):
            self._file.truncate(0)
            self._file.write(
                f"process {os.getpid()} on {socket.gethostname()}\n{process_start(os.getpid())}\n"
            )
            self._file.flush()

    def release(self) -> None:
        self._file.close()


LAST = "last"
"""The word for the run that was started last, and the file in base_output_directory that names that
run."""

RUN_KEYS = (
    "model.path",
    "model.lora.path",
    "teacher.path",
    "critic.path",
    "source",
    "run",
    "other",
    "runs",
)
"""Keys whose values may be runs, of all commands; `resume` is the one more, which
`shoal.job.resume` reads before there is a configuration."""


def last_run(name: str, base: str | os.PathLike[str] = "outputs") -> str:
    """Returns the path, or the address in a bucket, of the run that was started last, if `name`
    asks for it: `last` for the run under `base`, `FOLDER/last` for the one under another folder. ""
    for any other name, also for `last` if there is a folder of this name. ShoalError if no run was
    started there, or if it has been removed.

    >>> last_run("last"), last_run("elsewhere/last"), last_run("outputs/first")
    ('outputs/first', 'elsewhere/2026-07-30/19-29-57', '')
    """
    is_path = not is_bucket(name)
    if name.rpartition("/")[2] != LAST or (is_path and Path(name).is_dir()):
        return ""
    pointer_name = f"{os.fspath(base)}/{LAST}" if name == LAST else name
    folder = pointer_name.removesuffix(f"/{LAST}")
    if is_bucket(pointer_name):
        pointer = fetch(pointer_name, "base_output_directory")
    else:
        pointer = check_local(pointer_name, "base_output_directory")
    if not pointer.is_file():
        if name != LAST:
            return ""
        raise ShoalError(
            f"last: no run was started under {folder} yet; name a run folder, or FOLDER/last for "
            "the run that was started last under another base_output_directory"
        )
    run = pointer.read_text(encoding="utf-8").strip()
    if is_bucket(folder):
        return f"{folder}/{run}"
    path = pointer.parent / run
    if not path.is_dir():
        raise ShoalError(
            f"{name}: the run that was started last under {folder} is {path}, which is no longer "
            "there; name a run folder"
        )
    return str(path)


def with_last_runs(config: Any, resolved: Resolved) -> tuple[Any, Resolved]:
    """Returns a command's configuration with the path of the run in place of `last` in RUN_KEYS,
    so that its run stores the path, and the second with a line on each in its `notes`. In commands
    that do not train, `last` is the newest run under the default of `base_output_directory`.
    `resolved`: where the configuration comes from. ShoalError if there is no such run."""
    base = Config.base_output_directory
    if isinstance(config, Config):
        base = config.base_output_directory
    paths = {}
    notes = []
    for key in RUN_KEYS:
        if key not in keys_of(type(config)):
            continue
        value = get_value(config, key)
        names = list(value) if isinstance(value, tuple) else [value]
        for index, name in enumerate(names):
            shown = f"{'from' if key == 'source' else key}={name}"
            run = last_run(name, base)
            if run:
                names[index] = run
                notes.append(f"{shown} is {run}, the run that was started last")
            elif name == LAST:
                notes.append(f"{shown} is the folder `last` here, not the run started last")
        paths[key] = tuple(names) if isinstance(value, tuple) else names[0]
    if not notes:
        return config, resolved
    config = with_values(config, paths)
    return config, replace(resolved, config=config, notes=(*notes, *resolved.notes))


def find_run(name: str, base: str | os.PathLike[str] = "outputs", groups: bool = True) -> Path:
    """Returns the folder of a run. `name`: its path, or `last` for the run that was started last
    under `base`, as in `last_run`. A run in a bucket is copied to this machine, without the arrays
    of its checkpoints and with its groups if `groups`, and the copy is returned. ShoalError if
    there is no such folder, or if it has no config.yaml."""
    path = find_input(last_run(name, base) or name, "run", groups=groups)
    if not path.is_dir():
        raise ShoalError(
            f"{path}: there is no such folder; give a run folder, or `last` for the run started "
            "last"
        )
    if not is_run(path):
        raise ShoalError(f"{address(path)} is not a run folder: it holds no {CONFIG}")
    return path


def parts_of(run: Path) -> dict[int, Path]:
    """Returns version -> path of the files config_<version>.yaml, in no particular order. A run
    that was resumed with other settings has one for each of its parts: the settings that were
    requested when the part began, at this version, which for the first part is 0. {} for a run that
    never was resumed so."""
    parts = {}
    for file in run.glob("config_*.yaml"):
        digits = file.stem.removeprefix("config_")
        if digits.isdecimal() and len(digits) < 10:
            parts[int(digits)] = file
    return parts


def decided_file(config_file: Path) -> Path:
    """Returns the path of the file of decisions that belongs to config.yaml or config_40.yaml."""
    return config_file.with_name(config_file.name.replace("config", "decided", 1))


def process_start(pid: int) -> str:
    """Returns when a process of this machine started, in ticks since the machine started, as text;
    "" if the process has ended, or the system does not say. It distinguishes two processes that had
    the same id one after the other."""
    try:
        # The name of the program, in parentheses, may have spaces; the fields are those after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, start = fields[0], fields[19]  # the line's fields 3 and 22, see proc(5)
        has_ended = state in "ZX"  # a zombie, or dead
        return "" if has_ended else start
    except (OSError, IndexError):
        return ""

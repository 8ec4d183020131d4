"""The command line, `shoal <command> [key=value ...]`: finds the command, composes its
configuration and calls its function.

Nothing heavy is imported before a command runs."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.buckets import is_bucket
from shoal.commands.help import command_help, dry_run, options_of, overview
from shoal.config.arguments import POSITIONALS, suggest_argument, switch_of
from shoal.config.commands import COMMANDS
from shoal.config.key import keys_of
from shoal.config.stored import require_given
from shoal.config.token import redact_token
from shoal.job.cache import cache_by_environment
from shoal.job.interrupt import end_on_interrupt, raise_on_interrupt
from shoal.records import ShoalError
from shoal.text import did_you_mean

if TYPE_CHECKING:
    from shoal.config.merge import Resolved

FAILED_EXIT_CODE = 1
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141

HELP = ("-h", "--help")

MEMORY_EXPLAINED = ("train", "sft", "doctor", "eval", "generate", "serve")
"""Commands for which running out of memory becomes an error that names the keys to change, because
their keys decide how much memory they take."""


def program() -> int:
    """Runs `shoal` as typed in a shell and returns its exit code, that of `main`: prepares this
    process (Ctrl-C, a token that must not stay visible, huge pages), then calls `main`. Changes
    sys.argv if it has a token. May restart the process to get huge pages."""
    end_on_interrupt()
    # Other users of the machine can read the arguments, so a typed token is removed from them.
    with contextlib.suppress(ShoalError):
        sys.argv[:] = redact_token(sys.argv)
        sys.orig_argv[:] = redact_token(sys.orig_argv)
    if _computes(sys.argv[1:]):
        use_huge_pages()
    return main()


def _computes(words: Sequence[str]) -> bool:
    """True if the arguments, with the command first, are a command that does its work; False if
    they only ask for help or for what the command would do (`--dry-run`, `--plan`), or for a sweep,
    whose runs are processes of their own."""
    if not words or words[0] not in COMMANDS:
        return False
    return not any(word in HELP or switch_of(word) for word in words)


def run_as(name: str) -> int:
    """Runs `shoal` in place of another system's script and returns the exit code. `name`: the
    script's key in SHIMS (`commands/compat.py`); its arguments are taken from sys.argv, which gets
    Shoal's in their place. Arguments that cannot be converted print one line and return 2."""
    from shoal.commands.compat import shim_argv

    try:
        sys.argv[1:] = shim_argv(name, sys.argv[1:])
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return program()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0; 1 if a run of a sweep failed; 2 for a mistake
    that the user can fix, also one that `shoal doctor` found; 130 if interrupted; 141 if the reader
    of stdout has gone.

    A mistake is printed as one line on stderr; any other exception is a bug and keeps its
    traceback. `argv`: the arguments, sys.argv's by default."""
    try:
        return _run(redact_token(sys.argv[1:] if argv is None else argv))
    except ShoalError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except BrokenPipeError:  # the reader of stdout has gone, like `head` after ten lines
        # Without this, Python's own flush at its end would fail too, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE
    except KeyboardInterrupt as interrupt:
        print(f"{interrupt}" or "interrupted", file=sys.stderr)  # '' without a message
        return INTERRUPTED_EXIT_CODE


def _run(words: list[str]) -> int:
    """Prints help or the version if the arguments ask for it (then returns 0), otherwise runs the
    command; returns the exit code. `words`: all arguments, the command first. Without words the
    overview is printed. Raises ShoalError for a mistake of the user."""
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        from shoal.job.fingerprint import package_version

        print(f"shoal {package_version('shoal')}")
        return 0
    command, *rest = words
    if command == "help":
        if rest:
            print(command_help(_known(rest[0]), rest[1:]))
        else:
            print(overview())
        return 0
    job: list[str] = []
    if command == "launch" and "--" in rest:
        # The words of `launch` end at `--`; a --dry-run or --help after it is the job's.
        end = rest.index("--")
        job = rest[end + 1 :]
        rest = rest[:end]
    help_positions = [position for position, word in enumerate(rest) if word in HELP]
    if help_positions:
        after_help = rest[help_positions[0] :]
        topics = [word for word in after_help if word not in HELP and "=" not in word]
        print(command_help(_known(command), topics))
        return 0
    return _run_command(_known(command), rest, job)


def _known(word: str) -> str:
    """Returns `word`, the first argument, if it is a command. Otherwise raises ShoalError with the
    command line that was probably meant, and all commands.

    The command line in the error is a hint: `shoal train` with an argument, or the nearest command;
    there is none if nothing is near."""
    if word in COMMANDS:
        return word
    if "=" in word or word.startswith("-"):
        argument = word
    else:
        argument = suggest_argument("train", word)
    if argument:
        reason = f"the command comes first: `shoal train {argument}`."
    else:
        reason = f"there is no such command{did_you_mean(word, COMMANDS) or '.'}"
    raise ShoalError(f"{word}: {reason} Commands: {', '.join(COMMANDS)}")


def _run_command(command: str, words: list[str], job: Sequence[str] = ()) -> int:
    """Runs a command, or its dry run or sweep, and returns the exit code: 0; 1 if a run of a sweep
    failed; 2 if the command's result is a mapping with `ok` False. With `--plan`, `shoal plan` runs
    in place of the command. With `json=true` the result is printed as JSON, alone on stdout. Raises
    ShoalError for a mistake of the user. `words`: the arguments after the command; `job`: for
    `launch`, the arguments after `--`."""
    switches = {switch_of(word) for word in words}
    words = [word for word in words if not switch_of(word)]
    is_dry_run = "dryrun" in switches
    for name in switches & {"plan", "multirun"}:
        if f"--{name}" not in options_of(command):
            raise ShoalError(f"--{name}: only shoal train has it; this is shoal {command}")
    if "plan" in switches:
        command = "plan"
    if "multirun" in switches:
        from shoal.commands.multirun import multirun
        from shoal.report.console import Console

        raise_on_interrupt()
        sweep = multirun(command, words, Console(), is_dry_run)
        return FAILED_EXIT_CODE if sweep["num_failed"] else 0
    config, resolved = _compose(command, words)
    if command == "launch":
        config = replace(config, job=(*config.job, *job), dry_run=config.dry_run or is_dry_run)
    elif is_dry_run:
        # The check calls the reward function, which may print.
        with _stdout_is_stderr(), _explained(command, config, resolved):
            text = dry_run(config, resolved)
        print(text, end="")
        return 0
    for key in POSITIONALS.get(command, ()):
        if key != "runs":  # without any, `shoal view` shows the newest run
            require_given(config, key)
    cache_by_environment()
    as_json = "json" in keys_of(type(config)) and config.json
    output = _stdout_is_stderr() if as_json else contextlib.nullcontext()
    with output, _explained(command, config, resolved):
        result = _call(command, config, resolved)
    if as_json:
        from shoal.runs.lines import json_ready

        print(json.dumps(json_ready(result), indent=2, ensure_ascii=False, allow_nan=False))
    has_failed = isinstance(result, Mapping) and result.get("ok") is False
    return USAGE_EXIT_CODE if has_failed else 0


@contextlib.contextmanager
def _explained(command: str, config: Any, resolved: Resolved) -> Iterator[None]:
    """A context that adds to each ShoalError raised in it, for each key that the message mentions,
    the flag or the line of a file that set the key. An error because memory ran out becomes a
    ShoalError with the keys to change, for commands in MEMORY_EXPLAINED. Other exceptions pass
    unchanged."""
    try:
        yield
    except Exception as error:
        explained: Exception | None = None  # None: not to be explained
        if isinstance(error, ShoalError):
            explained = error
        elif command in MEMORY_EXPLAINED:
            from shoal.job.out_of_memory import explain_out_of_memory

            explained = explain_out_of_memory(error, config)
        if explained is None:
            raise
        from shoal.compat.front import add_typed_names

        raise ShoalError(add_typed_names(str(explained), resolved)) from error


def _compose(command: str, words: list[str]) -> tuple[Any, Resolved]:
    """Returns (configuration, Resolved) of a command's words, with the path of a run in place of
    `last`. With `resume`, which some commands have, the settings of the run that it names have less
    precedence than the words and more than the defaults; likewise for `eval` with `model=` a run's
    folder or bucket. Raises ShoalError for a mistake of the user."""
    from shoal.runs.layout import with_last_runs

    if "resume" in keys_of(COMMANDS[command]):
        from shoal.job.resume import config_for_resume

        return with_last_runs(*config_for_resume(COMMANDS[command], words))
    from shoal.config.merge import compose

    config, resolved = with_last_runs(*compose(command, words))
    if command != "eval":
        return config, resolved
    model = config.model.path
    is_folder = model != "" and Path(model).is_dir()
    if is_folder or is_bucket(model):
        from shoal.job.own_task import config_for_eval_of_run

        return config_for_eval_of_run(config, resolved)
    return config, resolved


def _call(command: str, config: Any, resolved: Resolved) -> Any:
    """Prints the notes about the configuration, then calls the command's function and returns its
    result. The function has the name of its module in `commands`, which is the command's with `_`
    for `-`; but `eval` calls `evaluate`, `sft` calls `train`, and `eval` with `responses` calls
    `score_responses`. From here on Ctrl-C raises KeyboardInterrupt."""
    from shoal.compat.front import print_notes

    if command in ("train", "sft"):
        from shoal.job.process import open_console

        config, console = open_console(config)
    else:
        from shoal.report.console import Console

        console = Console()
    print_notes(resolved, console)
    if command == "eval" and config.responses:
        module = "responses"
        name = "score_responses"
    else:
        name = {"eval": "evaluate", "sft": "train"}.get(command, command.replace("-", "_"))
        module = name
    run = getattr(importlib.import_module(f"shoal.commands.{module}"), name)
    raise_on_interrupt()
    if name == "train":
        return run(config, console=console, recipe=resolved.recipe)
    return run(config, console=console)


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Sends stdout, of this process and of the processes that it starts, to stderr during the
    `with` block, because stdout is reserved for the result. After the block stdout is what it
    was."""
    sys.stdout.flush()
    kept = os.dup(1)  # 1 is stdout, 2 stderr, also for processes that this one starts
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def use_huge_pages(pages: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> None:
    """Restarts this process with glibc's allocator on huge pages, if Linux grants them on request.
    Does not return if it restarts the process. Does nothing if it is not Linux or GLIBC_TUNABLES is
    set, as after the restart. `pages`: the file in which Linux says how it grants them.

    On CPU every compiled step allocates and frees its buffers; with small pages the kernel takes a
    third of an update to map them (docs/decisions/0003). The allocator reads the setting only when
    a process starts."""
    if "GLIBC_TUNABLES" in os.environ or not sys.platform.startswith("linux"):
        return
    if not pages.is_file() or "[madvise]" not in pages.read_text():
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

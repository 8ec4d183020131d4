"""The command line: `shoal <command> [key=value ...]`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.arguments import aliases_of
from shoal.config.keys import COMMANDS, Key, keys_of, nearest
from shoal.types import ShoalError

if TYPE_CHECKING:
    from shoal.config.compose import Resolved
    from shoal.report.console import Console

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

_EXAMPLES = """\
shoal train                                        a tiny model, word problems, about two minutes on a CPU
shoal train model=Qwen/Qwen2.5-1.5B-Instruct task=gsm8k
shoal train --help                                 every key, with its default and meaning"""


def program() -> int:
    """`shoal` as it is typed: `main`, in a process whose memory is set up for it."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS and not {"-h", "--help"} & set(sys.argv):
        use_huge_pages()
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 2 for a mistake that the user can mend, 130 when interrupted.

    Such a mistake is one line on stderr; any other exception is a bug and keeps its traceback.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ShoalError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"shoal {_version()}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        raise ShoalError(f"{command}: there is no such command, did you mean {nearest(command, COMMANDS)}? "
                         f"Commands: {', '.join(COMMANDS)}")
    if "-h" in rest or "--help" in rest:
        print(command_help(command))
        return 0
    from shoal.config.compose import compose
    from shoal.report.console import Console

    config, resolved = compose(command, rest)
    use_compilation_cache()
    console = Console()
    for note in resolved.notes:
        console.note(note)
    _HANDLERS[command](config, resolved, console)
    return 0


def use_compilation_cache() -> None:
    """Lets JAX keep compiled programs between runs, unless the environment says otherwise; before jax is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def use_huge_pages(pages: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> None:
    """Starts this process again with glibc's allocator on huge pages, where Linux grants them on request.

    On CPU every compiled step takes and returns its buffers; with small pages a third of an update goes into the
    kernel's filling them in (docs/decisions/0003). The allocator reads the setting only when a process starts.
    """
    if "GLIBC_TUNABLES" in os.environ or not sys.platform.startswith("linux"):
        return
    if not pages.is_file() or "[madvise]" not in pages.read_text():
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# ---- commands


def _train(config: Any, resolved: Resolved, console: Console) -> None:
    from shoal.runtime.job import train

    train(config, (resolved.text, resolved.difference), console=console)


def _evaluate(config: Any, resolved: Resolved, console: Console) -> None:
    from shoal.runtime.job import evaluate

    evaluate(config, console=console)


def _generate(config: Any, resolved: Resolved, console: Console) -> None:
    from shoal.runtime.job import generate

    generate(config, console=console)


def _export(config: Any, resolved: Resolved, console: Console) -> None:
    from shoal.runtime.job import export

    export(config, console=console)


def _pretrain(config: Any, resolved: Resolved, console: Console) -> None:
    from shoal.runtime.pretrain import pretrain

    pretrain(config, console=console)


_HANDLERS: Mapping[str, Callable[[Any, Resolved, Console], None]] = {
    "train": _train, "eval": _evaluate, "generate": _generate, "export": _export, "pretrain": _pretrain,
}


# ---- help


def overview() -> str:
    """The text of `shoal --help`."""
    lines = [f"  {command:<10}{_purpose(config_type)}" for command, config_type in COMMANDS.items()]
    return "\n".join([
        "Post-trains language models by reinforcement learning from verifiable rewards.", "",
        "usage: shoal COMMAND [PRESET.yml] [key=value ...]", "", *lines, "",
        textwrap.indent(_EXAMPLES, "  ")])


def _purpose(config_type: type) -> str:
    """What a command does: the first line of its dataclass's docstring, without the command's name."""
    text = (config_type.__doc__ or "").strip().splitlines()[0]
    text = (text.partition(": ")[2] or text).partition(". ")[0]
    return text[:1].lower() + text[1:].rstrip(".")


def command_help(command: str) -> str:
    """The text of `shoal COMMAND --help`: every key by section with type, default and meaning; the short forms."""
    config_type = COMMANDS[command]
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 140))
    lines = [f"shoal {command}: {_purpose(config_type)}", "",
             f"usage: shoal {command} [PRESET.yml | --config-name PRESET] [key=value ...]"]
    for section, keys in groupby(keys_of(config_type).values(), key=lambda key: key.section):
        lines += ["", section] if section else [""]
        lines += [line for key in keys for line in _key_lines(key, width)]
    lines += ["", "short forms"]
    for name, alias in aliases_of(config_type).items():
        lines.append(f"  {name}= is {alias.key}=" + (f"  ({alias.note})" if alias.note else ""))
    return "\n".join(lines)


def _key_lines(key: Key, width: int) -> list[str]:
    head = f"  {key.name}={_shown(key.default)}"
    text = f"{key.help} [{key.type_text}]"
    return [head, *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6,
                                 break_on_hyphens=False)]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{','.join(map(str, default))}]"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(program())

"""Shell completion: the candidates for an unfinished word, and the scripts that ask for them.

    shoal completion bash    prints the script
    shoal __complete train optimizer.sch    prints a candidate a line: optimizer.schedule=
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal.commands.help import options_of, topics_of
from shoal.config.arguments import is_file_option, key_of, names_of
from shoal.config.files import presets_of
from shoal.config.foreign import translator
from shoal.config.keys import COMMANDS, Key
from shoal.config.layers import PACKAGED
from shoal.tasks.task import TASKS
from shoal.text import did_you_mean
from shoal.types import ShoalError

COMPLETE = "__complete"
"""The hidden command by which the scripts ask."""

_FIRST_WORDS = ("help", "completion", "--help", "--version")


def script(shell: str) -> str:
    """The completion script of a shell."""
    if shell not in SCRIPTS:
        raise ShoalError(f"completion: expected one of {', '.join(SCRIPTS)}, came {shell or 'nothing'}"
                         + did_you_mean(shell, SCRIPTS).replace(",", ";"))
    return SCRIPTS[shell].replace("ASK", COMPLETE)


def candidates(words: Sequence[str]) -> list[str]:
    """Candidates for the last of the words after `shoal`. One that ends in `=` or `.` can be completed further.

    >>> candidates(["train", "optimizer.schedule=c"])
    ['optimizer.schedule=constant', 'optimizer.schedule=cosine']
    """
    *before, word = words or [""]
    return [found for found in _offers(before, word) if found.startswith(word)]


def _offers(before: list[str], word: str) -> list[str]:
    if not before:
        return [*COMMANDS, *_FIRST_WORDS]
    command, *given = before
    if command == "completion":
        return [] if given else list(SCRIPTS)
    if command == "help":
        command, given = (given[0], ["--help"]) if given else ("", [])
        if not command:
            return list(COMMANDS)
    if command not in COMMANDS:
        return []
    if given and is_file_option(given[-1]):
        return presets_of(command)
    if given and given[-1] in ("-h", "--help"):
        return topics_of(COMMANDS[command])
    name, equals, _ = word.partition("=")
    if equals and is_file_option(word):
        return [f"{name}={preset}" for preset in presets_of(command)]
    presets = [f"{preset}.yml" for preset in presets_of(command)] if not given else []
    options = list(options_of(command)) if word.startswith("-") else []
    return [*presets, *options, *_key_offers(COMMANDS[command], word)]


def _key_offers(config_type: type, word: str) -> list[str]:
    """Keys with `=`, sections with `.`, and the values of a key that is named; where no key of ours begins so, the
    flags of other systems that set one."""
    bare = word.lstrip("-+")
    lead = word[:len(word) - len(bare)]
    name, equals, _ = bare.partition("=")
    if equals:
        key = key_of(config_type, name)
        return [f"{lead}{name}={value}" for value in (_values(key) if key else [])]
    depth = bare.count(".")

    def offers(names: Iterable[str]) -> list[str]:
        return [".".join(parts[:depth + 1]) + ("=" if len(parts) == depth + 1 else ".")
                for parts in (known.split(".") for known in names) if len(parts) > depth]

    found = offers(names_of(config_type))
    if not any(offer.startswith(bare) for offer in found):
        found = offers(name for name, flag in translator().flags(config_type).items() if flag.keys)
    return [lead + offer for offer in dict.fromkeys(found)]


def _values(key: Key) -> list[Any]:
    if key.type is bool:
        return ["true", "false"]
    if key.name in PACKAGED:
        return presets_of(PACKAGED[key.name])
    return list(TASKS if key.name == "task.name" else key.choices)


_BASH = r"""# shoal's completion for bash: source <(shoal completion bash)
_shoal() {
    local line="${COMP_LINE:0:COMP_POINT}" words word head candidate
    read -ra words <<< "$line"
    if [[ "$line" == *[[:space:]] ]]; then words+=(""); fi
    word="${words[${#words[@]}-1]}"
    head=""
    # bash completes what stands after the last = only
    if [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]]; then head="${word%=*}="; fi
    COMPREPLY=()
    while IFS= read -r candidate; do
        candidate="${candidate#"$head"}"
        case "$candidate" in
            *=|*.) COMPREPLY+=("$candidate") ;;
            *) COMPREPLY+=("$candidate ") ;;
        esac
    done < <("${words[0]}" ASK "${words[@]:1}" 2>/dev/null)
}
complete -o nospace -o default -F _shoal shoal
"""

_ZSH = r"""#compdef shoal
# shoal's completion for zsh: source <(shoal completion zsh), or a file _shoal in a folder of $fpath
_shoal() {
    local -a found
    found=("${(@f)$("${words[1]}" ASK "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    found=(${found:#})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    else
        compset -P '*='
        _files
    fi
}
if [[ "$funcstack[1]" == _shoal ]]; then _shoal "$@"; else compdef _shoal shoal; fi
"""

_FISH = r"""# shoal's completion for fish: shoal completion fish | source
function __shoal_candidates
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    set -l program $words[1]
    set -e words[1]
    $program ASK $words "$last" 2>/dev/null
end
complete -c shoal -f -a '(__shoal_candidates)'
complete -c shoal -F -n 'not __shoal_candidates | string length -q'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

"""`docs/migrating.md`, made of the tables of flags: `python -m shoal.compat.document > docs/migrating.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.compat.differences import DIFFERENCES
from shoal.compat.flags import Flag
from shoal.compat.translation import SYSTEMS

_HEAD = """\
# Migrating

<!-- made by `python -m shoal.compat.document`; change the tables in `src/shoal/compat/` instead -->

`shoal train` and `shoal doctor` accept the flags of MaxText, TorchRL, TRL, Tunix and verl under their own names, and so
do `shoal eval` and `shoal convert` if the flag has a use there. They work on the command line (`name=value`,
`--name=value`, `--name value`), in files, in sweeps and in Python. A flag with the value `None`, or none, keeps its
default. The run reports each flag whose meaning differs; `--dry-run` lists what every flag becomes:

```bash
shoal train --model_name_or_path Qwen/Qwen3-8B --dataset_name openai/gsm8k --num_generations 4 --beta 0.04 --dry-run
shoal train grpo.yml --model_name=llama3.1-8b --num_generations=4 --grpo_beta=0.04 --dry-run
shoal train --help num_generations
```

A flag changes only what it names. All other settings keep Shoal's defaults. For another system's defaults use its
preset or recipe:

@@

A configuration file of these systems loads unchanged: `shoal train their.yml`, or with an entry point
`python examples/compat/grpo_demo.py --config_file=their.yml`, over that entry point's preset. Keys with a counterpart
work. One line lists the keys that have no effect here. Keys that matter but have no counterpart are errors, all in one
message; override such a key on the command line (`train_model.lora.enabled=false`).

`hf_access_token=` sets `HF_TOKEN` for the process; Shoal never writes it anywhere. If two flags set one key, the last
one counts, and a line says so; in a file this is an error.

TRL's `delta` below 1 + `epsilon_high` is an error: TRL then also bounds the ratio of completions with a positive
advantage, which `algorithm.clip_dual` does not.

Shoal accepts these flags and recipes, but the numbers differ:

%%"""

_PLACES = (
    ("MaxText's `grpo.yml`, `rl.yml`, `base.yml`", "the presets `grpo`, `rl`, `base`; also with a path, if "
     "no such file exists: `shoal train grpo.yml`"),
    ("TorchRL's `--config-name grpo_gsm8k`, `grpo_ifeval`", "the presets of these names"),
    ("all defaults of a system, with your own model and data", "`recipe=maxtext`, `recipe=tunix`, `recipe=torchrl`, "
     "`recipe=trl`, `recipe=verl`, `recipe=scalerl`"),
    ("a paper's settings", "`algorithm=dapo`, `algorithm=gspo` and others: `shoal train --help algorithm`"),
    ("`grpo_demo.py`, `train_rl`, `grpo.py`, `grpo-async.py`, `to_maxtext`, `test_grpo.sh`", "files of these names "
     "under `examples/compat/`"),
)


def document() -> str:
    """The whole page, as Markdown."""
    places = "\n".join(f"| {had} | {here} |" for had, here in (("what you had", "here"), ("---", "---"), *_PLACES))
    rows = [("", "setting", "there", "here"), ("---",) * 4, *DIFFERENCES.values()]
    differences = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [_HEAD.replace("@@", places).replace("%%", differences)]
    for system, rows in sorted(SYSTEMS.items(), key=lambda pair: pair[0].lower()):
        parts += [f"\n## {system}\n", *_table(rows)]
    return "\n".join(parts) + "\n"


def _table(rows: Iterable[Flag]) -> Iterator[str]:
    yield "| flag | becomes | |"
    yield "| --- | --- | --- |"
    idle: dict[str, list[str]] = {}
    for row in rows:
        if (row.idle or (row.late and not row.keys)) and not row.is_pattern:
            idle.setdefault(row.meaning, []).append(row.name)
        elif not row.is_pattern:
            keys = ", ".join(f"`{key}`" for key in row.keys) or "not supported: an error if it is switched on"
            keys = f"only {row.expected}" if row.expected else keys
            yield f"| `{row.name}` | {keys} | {row.meaning} |"
    for meaning, names in idle.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | nothing | {meaning} |"


if __name__ == "__main__":
    print(document(), end="")

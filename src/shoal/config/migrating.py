"""`docs/migrating.md`, made of the table of flags: `python -m shoal.config.migrating > docs/migrating.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.config.aliases import FOREIGN
from shoal.config.foreign import Foreign

SYSTEMS = ("MaxText", "TorchRL", "TRL", "verl")

_HEAD = """\
# Migrating

<!-- made by `python -m shoal.config.migrating`; change `src/shoal/config/aliases.py` instead -->

Flags of MaxText, TorchRL, TRL and verl are taken under their own names by `shoal train` and `shoal doctor`, and by
`shoal eval` and `shoal convert` where they have a use there; on the command line (`name=value`, `--name=value`,
`--name value`), in files, in sweeps and in Python. One that is given `None` or nothing stays at its default. A flag
whose meaning differs says at the start what it became; `--dry-run` lists them all:

```bash
shoal train grpo.yml --model_name=llama3.1-8b --num_generations=4 --grpo_beta=0.04 --dry-run
shoal train --help num_generations
```

A flag changes only what it names. All other settings stay Shoal's own, unless a preset brings the other system's:

@@

`hf_access_token=` is taken as `HF_TOKEN` of the process, and written nowhere. Of two flags for one key the later one
stands, and that is said."""

_PLACES = (
    ("MaxText's `grpo.yml`, `rl.yml`, `base.yml`", "the presets `grpo`, `rl`, `base`, also with a path in front, "
     "where there is no such file (one that is there is read): `shoal train grpo.yml`"),
    ("TorchRL's `--config-name grpo_gsm8k`, `grpo_ifeval`", "the presets of these names"),
    ("all defaults of a system, with your own model and data", "`recipe=maxtext`, `recipe=tunix`, `recipe=torchrl`, "
     "`recipe=trl`, `recipe=verl`, `recipe=scalerl`"),
    ("a paper's settings", "`algorithm=dapo`, `algorithm=gspo` and others: `shoal train --help algorithm`"),
    ("`grpo_demo.py`, `train_rl`, `grpo.py`, `grpo-async.py`, `to_maxtext`, `test_grpo.sh`", "files of these names "
     "under `examples/compat/`"),
)

_KINDS = {"accepted": "nothing", "missing": "not there yet: an error where it is switched on"}


def document() -> str:
    """The whole page, as Markdown."""
    places = "\n".join(f"| {had} | {here} |" for had, here in (("what you had", "here"), ("---", "---"), *_PLACES))
    parts = [_HEAD.replace("@@", places)]
    for system in SYSTEMS:
        rows = [row for row in FOREIGN.values() if system in row.systems.split(", ")]
        parts += [f"\n## {system}\n", *_table(rows)]
    return "\n".join(parts) + "\n"


def _table(rows: Iterable[Foreign]) -> Iterator[str]:
    yield "| flag | becomes | |"
    yield "| --- | --- | --- |"
    for row in rows:
        keys = ", ".join(f"`{key}`" for key in row.keys) or _KINDS.get(row.kind, "part of another flag")
        yield f"| `{row.name}` | {keys} | {row.meaning} |"


if __name__ == "__main__":
    print(document(), end="")

"""`shoal export`: writes the newest weights of a run, or one checkpoint, as a folder that
transformers loads, or pushes that folder to the hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shoal.buckets import address
from shoal.budget.memory import parameter_count
from shoal.checks.settings import check_model
from shoal.config.commands import ExportConfig
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.stored import require_given
from shoal.files import check_new_folder, explain_write_errors, find_input
from shoal.mesh import Role, make_roles
from shoal.model import adapters
from shoal.model.architecture import Architecture
from shoal.model.config_json import read_config
from shoal.model.families import is_multimodal
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.runs.card import model_card
from shoal.runs.layout import is_run
from shoal.runs.reader import StoredRun
from shoal.text import gib
from shoal.weights import huggingface, peft
from shoal.weights.checkpoints import find_checkpoint
from shoal.weights.hub import check_may_push, push, repository_of
from shoal.weights.maxtext import find_tree
from shoal.weights.orbax import orbax_silenced
from shoal.weights.source import ModelSource, open_model


def export(config: ExportConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes a run's or a folder's weights as a Hugging Face folder, completely or not at all, or
    pushes that folder to the hub (`to=hub:USER/NAME`), and returns {"to": its path or address}.

    Of a model with an adapter only the adapter is written, in PEFT's format, unless `merge` asks
    for a whole model. Of a run the newest weights are written, with a model card (README.md). The
    values are of the type `config.dtype`. ShoalError if `from` or `to` is missing, if the folder
    holds files already, if the source is a MaxText checkpoint, with `merge` if there is no adapter,
    or if nothing can be pushed. A `console` that is given can be used afterwards; None: one for
    this command."""
    require_given(config, "source", "to")
    repository = repository_of(config.to)
    if not repository:
        to = check_new_folder(config.to, "to")
        with console or Console() as console, orbax_silenced():
            _write(config, to, console)
            console.note(f"wrote {config.to}")
        return {"to": address(to)}
    check_may_push(repository)
    with (
        console or Console() as console,
        orbax_silenced(),
        tempfile.TemporaryDirectory() as temporary,
    ):
        folder = Path(temporary) / "model"
        _write(config, folder, console)
        page = push(folder, repository, config.private)
        console.note(f"pushed to {page}")
    return {"to": page}


def run_of(config: ExportConfig) -> tuple[StoredRun, int] | None:
    """Returns the run whose weights are exported, and the number of steps they have made; None if
    they are no run's, or of checkpoints without the run's settings."""
    found = find_checkpoint(find_input(config.source, "from"))
    if found is None or not is_run(found[0]):
        return None
    folder, step = found
    return StoredRun(folder), step


def card_of(config: ExportConfig, adapter: bool) -> str:
    """Returns the model card of the weights that are exported; "" if they are no run's. `adapter`:
    an adapter alone is written. ShoalError if the run cannot be read."""
    found = run_of(config)
    if found is None:
        return ""
    run, step = found
    return model_card(run, step, adapter)


def card_lines(config: ExportConfig) -> list[str]:
    """Returns the lines of the model card that an export would write, for a dry run; [] without a
    run. ShoalError if the run cannot be read."""
    found = run_of(config)
    if found is None:
        return []
    run, _ = found
    trains_adapter = run.config.model.lora.rank > 0
    card = card_of(config, adapter=trains_adapter and not config.merge)
    return ["model card (README.md):", *card.splitlines()]


def writes_adapter_alone(config: ExportConfig, architecture: Architecture) -> bool:
    """True if of the model's weights the adapter alone is written. ShoalError if `merge` asks for
    an adapter in the model, and there is none."""
    if config.merge and not architecture.adapter:
        raise ShoalError(f"merge=true: {config.source} has no adapter; leave merge out")
    return architecture.adapter is not None and not config.merge


def _write(config: ExportConfig, to: Path, console: Console) -> None:
    """Writes the folder `to`, which is new or empty."""
    source = find_input(config.source, "from")
    check_model(ModelSection(path=config.source), key="from")
    if find_tree(source):
        raise ShoalError(
            f"from={config.source} is a MaxText checkpoint: use `shoal convert "
            "format=huggingface`, which writes it as a folder that transformers loads"
        )
    model = open_model(ModelSection(path=config.source), console, as_stored=True)
    role = make_roles(MeshSection()).trainer  # the devices here, on which weights are loaded
    if writes_adapter_alone(config, model.architecture):
        _write_adapter(config, model, role, to, console)
    else:
        _write_model(config, model, role, to, console)


def _write_adapter(
    config: ExportConfig, model: ModelSource, role: Role, to: Path, console: Console
) -> None:
    architecture = model.architecture
    itemsize = np.dtype(jnp.dtype(config.dtype)).itemsize  # bytes of a weight in the files
    num_parameters = parameter_count(architecture) - parameter_count(architecture.base)
    console.note(
        f"reads {config.source}; writes {gib(num_parameters * itemsize)} as {config.dtype}: the "
        f"adapter on {model.base} alone; merge=true writes a whole model"
    )
    adapter = model.read_adapter(role, np.float32, 0)  # 0: the seed, not used
    described = model.config or read_config(model.folder)
    with explain_write_errors(to, "to"):
        peft.save(
            to,
            adapter,
            architecture,
            model.base,
            model.folder,
            config.dtype,
            is_multimodal(described),
            card_of(config, adapter=True),
        )
    base = Path(model.base).expanduser()
    is_packaged = model.base == ModelSection.path
    is_of_other_format = base.is_dir() and not (base / "config.json").is_file()
    if is_packaged or is_of_other_format:
        console.note(
            "PEFT needs base_model_name_or_path to be a folder or hub id in Hugging Face "
            f"format: export from={model.base} too, and write that folder into "
            f"{config.to}/{peft.CONFIG}"
        )


def _write_model(
    config: ExportConfig, model: ModelSource, role: Role, to: Path, console: Console
) -> None:
    architecture = model.architecture
    itemsize = np.dtype(jnp.dtype(config.dtype)).itemsize  # bytes of a weight in the files
    num_bytes = parameter_count(architecture.base) * itemsize
    console.note(f"reads {config.source}; writes {gib(num_bytes)} as {config.dtype}")
    described = model.config or read_config(model.folder)
    base_dtype = described.get("dtype") or described.get("torch_dtype")
    if base_dtype == "bfloat16" and config.dtype == "float32":
        console.note("the model's own files are bfloat16: dtype=bfloat16 writes half the bytes")
    origin = model.origin()
    if origin is None and is_multimodal(described):
        console.note(
            f"the weights that {config.source} began with are not here, and with them the "
            "towers for its other kinds of input: only the text model is written"
        )
    params = adapters.merge(architecture, model.load(role, np.float32), role)
    with explain_write_errors(to, "to"):
        huggingface.save(
            to,
            params,
            architecture.base,
            model.folder,
            config.dtype,
            config=model.config,
            origin=origin,
            card=card_of(config, adapter=False),
        )

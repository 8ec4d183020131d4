"""`shoal export`: writes the newest weights of a run, or one checkpoint, as a folder that
transformers loads."""

from __future__ import annotations

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
from shoal.mesh import make_roles
from shoal.model import adapters
from shoal.model.config_json import read_config
from shoal.model.families import is_multimodal
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.text import gib
from shoal.weights import huggingface, peft
from shoal.weights.maxtext import find_tree
from shoal.weights.orbax import orbax_silenced
from shoal.weights.source import open_model


def export(config: ExportConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes a run's or a folder's weights as a Hugging Face folder, completely or not at all, and
    returns {"to": its path}. Of a model with an adapter only the adapter is written, in PEFT's
    format, unless `merge` asks for a whole model. Of a run the newest weights are written. The
    values are of the type `config.dtype`. ShoalError if `from` or `to` is missing, if the folder
    holds files already, if the source is a MaxText checkpoint, or with `merge` if there is no
    adapter. A `console` that is given can be used afterwards; None: one for this command."""
    require_given(config, "source", "to")
    to = check_new_folder(config.to, "to")
    source = find_input(config.source, "from")
    check_model(ModelSection(path=config.source), key="from")
    if find_tree(source):
        raise ShoalError(
            f"from={config.source} is a MaxText checkpoint: use `shoal convert "
            "format=huggingface`, which writes it as a folder that transformers loads"
        )
    with console or Console() as console, orbax_silenced():
        model = open_model(ModelSection(path=config.source), console, as_stored=True)
        role = make_roles(MeshSection()).trainer  # the devices here, on which weights are loaded
        architecture = model.architecture
        if config.merge and not architecture.adapter:
            raise ShoalError(f"merge=true: {config.source} has no adapter; leave merge out")
        adapter_alone = architecture.adapter is not None and not config.merge
        described = model.config or read_config(model.folder)
        itemsize = np.dtype(jnp.dtype(config.dtype)).itemsize  # bytes of a weight in the files
        if adapter_alone:
            num_bytes = (
                parameter_count(architecture) - parameter_count(architecture.base)
            ) * itemsize
            console.note(
                f"reads {config.source}; writes {gib(num_bytes)} as {config.dtype}: the adapter on "
                f"{model.base} alone; merge=true writes a whole model"
            )
            adapter = model.read_adapter(role, np.float32, 0)  # 0: the seed, not used
            with explain_write_errors(to, "to"):
                peft.save(
                    to,
                    adapter,
                    architecture,
                    model.base,
                    model.folder,
                    config.dtype,
                    is_multimodal(described),
                )
        else:
            num_bytes = parameter_count(architecture.base) * itemsize
            console.note(f"reads {config.source}; writes {gib(num_bytes)} as {config.dtype}")
            origin = model.origin()
            if origin is None and is_multimodal(described):
                console.note(
                    f"the weights that {config.source} began with are not here, and with them the "
                    "towers for its other kinds of input: the text model alone is written"
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
                )
        console.note(f"wrote {config.to}")
        base = Path(model.base).expanduser()
        is_packaged = model.base == ModelSection.path
        is_of_other_format = base.is_dir() and not (base / "config.json").is_file()
        if adapter_alone and (is_packaged or is_of_other_format):
            console.note(
                "PEFT wants base_model_name_or_path to be a folder or hub id in Hugging Face "
                f"format: export from={model.base} too, and write that folder into "
                f"{config.to}/{peft.CONFIG}"
            )
    return {"to": address(to)}

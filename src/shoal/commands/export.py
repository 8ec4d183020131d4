"""`shoal export`: the newest weights of a run, or one checkpoint, as a folder that transformers loads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from shoal.config.schema import ExportConfig, MeshSection, ModelSection
from shoal.config.text import require_given
from shoal.files import check_local, check_new_folder, writing
from shoal.mesh import make_roles
from shoal.model import hf
from shoal.report.console import Console
from shoal.report.findings import gib
from shoal.run.loading import open_model
from shoal.run.maxtext_checkpoint import find_tree
from shoal.run.preflight.settings import check_model
from shoal.run.size import parameter_count
from shoal.trainer.orbax import orbax_silenced
from shoal.types import ShoalError


def export(config: ExportConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes the folder whole or not at all, and returns its path."""
    require_given(config, "source", "to")
    to, source = check_new_folder(config.to, "to"), check_local(config.source, "from")
    check_model(ModelSection(path=config.source), key="from")
    if find_tree(source):
        raise ShoalError(f"from={config.source} is a MaxText checkpoint: use `shoal convert format=huggingface`, "
                         "which writes it as a folder that transformers loads")
    with console or Console() as console, orbax_silenced():
        model = open_model(ModelSection(path=config.source), console)
        size = parameter_count(model.architecture) * np.dtype(jnp.dtype(config.dtype)).itemsize
        console.note(f"reads {config.source}; writes {gib(size)} as {config.dtype}")
        params = model.load(make_roles(MeshSection()).trainer, np.float32)
        with writing(to, "to"):
            hf.save(to, params, model.architecture, model.folder, config.dtype, config=model.config)
        console.note(f"wrote {to}")
    return {"to": str(to)}

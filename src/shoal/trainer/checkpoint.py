"""Saves a run's state with Orbax and reads it back; the only file that knows Orbax."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shoal.mesh import Role
from shoal.model.transformer import Architecture, declare, is_declared, shardings
from shoal.trainer.step import TrainState
from shoal.types import Params, ShoalError

MODEL_FOLDER = "model"
"""In a run folder: the model's config and tokenizer, so that a checkpoint can be read without its source."""


class Checkpoints:
    """Checkpoints of one run under `<run>/checkpoints/<version>`; the newest `keep_last` stay."""

    def __init__(self, folder: Path, keep_last: int):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep_last, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._args = ocp.args

    def save(self, version: int, state: TrainState, extra: Mapping[str, Any]) -> None:
        """Parameters, optimizer state and update counter; `extra` is what JSON can hold."""
        tree = {"trainable": state.trainable, "optimizer": state.optimizer, "updates": state.updates}
        self._manager.save(version, args=self._args.Composite(
            state=self._args.StandardSave(tree), extra=self._args.JsonSave(dict(extra))))
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def find_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """(run folder, version) of a run folder (its newest checkpoint), `<run>/checkpoints` or one of its numbers."""
    folder = folder.resolve()  # `.` and `..` have names of their own
    if folder.name.isdigit() and folder.parent.name == "checkpoints" and folder.is_dir():
        return folder.parent.parent, int(folder.name)
    folder = folder.parent if folder.name == "checkpoints" else folder
    if not (folder / "checkpoints").is_dir():
        return None
    numbers = [int(entry.name) for entry in (folder / "checkpoints").iterdir() if re.fullmatch(r"\d+", entry.name)]
    if not numbers:
        raise ShoalError(f"{folder / 'checkpoints'} holds no checkpoint: the run did not get to its first one")
    return folder, max(numbers)


def load_parameters(run: Path, version: int, architecture: Architecture, role: Role,
                    dtype: Any = jnp.float32) -> Params:
    """The parameters of one checkpoint, each laid out for this role as it is read, in `dtype`."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    places = shardings(architecture, role)
    wanted = jax.tree.map(
        lambda d, sharding: jax.ShapeDtypeStruct(d.shape, dtype, sharding=sharding),
        declare(architecture), places, is_leaf=is_declared)
    path = (run / "checkpoints" / str(version) / "state").absolute()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(
                item={"trainable": wanted}, partial_restore=True,
                restore_args=ocp.checkpoint_utils.construct_restore_args({"trainable": wanted})))
    except Exception as error:  # what Orbax finds wrong with a file, it raises as anything, bare Exception included
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShoalError(f"checkpoint {path.parent} cannot be read ({cause:.200}): choose another of {run}") from error
    return restored["trainable"]

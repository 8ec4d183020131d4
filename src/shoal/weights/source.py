"""Loads the model that `model.path` names: a folder in Hugging Face format, a hub id, a run, or
another system's checkpoint."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shoal.buckets import address
from shoal.chat.tokenizer import Tokenizer
from shoal.chat.tokenizer_files import write_date
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.sampling import SamplingSection
from shoal.files import find_input, waits_for_hub, write_text
from shoal.mesh import Role
from shoal.model import adapters, families
from shoal.model.architecture import Architecture
from shoal.model.attention.selector import kernel_fault
from shoal.model.linear import QUANTISED
from shoal.model.parameters import as_frozen, joined, quantiser
from shoal.model.published import MODELS, check_name, model_named
from shoal.model.transformer import Model
from shoal.protocols import Printer
from shoal.records import Params, ShoalError
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.reader import read_requested
from shoal.stop import NotHere
from shoal.weights import huggingface, maxtext, peft
from shoal.weights.checkpoints import FOLDER as CHECKPOINTS
from shoal.weights.checkpoints import find_checkpoint, load_parameters, read_extra
from shoal.weights.checksum import types_text, weights_text
from shoal.weights.hub import HUB_ID, PACKAGED, cached_folder, locate
from shoal.weights.tensor_files import digests as tensor_digests

MATMUL_PRECISION = "jax_default_matmul_precision"


def no_weights(role: Role, dtype: Any, seed: int = 0) -> Params:
    raise RuntimeError("a model of sizes alone has no weights to read")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, without its weights: what it is, and how to read them.

    >>> spec = open_model(ModelSection(path="Qwen/Qwen3-0.6B"), console)
    >>> params = spec.load(roles.trainer, jnp.float32)
    """

    folder: Path  # holds the tokenizer, and config.json unless there is `config`
    architecture: Architecture
    read: Callable[..., Params] = (
        no_weights  # (role, dtype, keep) -> the weights without an adapter, as `hf.load`
    )
    config: dict[str, Any] | None = None  # a config.json in place of the folder's
    notes: tuple[str, ...] = ()
    template: str = ""  # a chat template in place of the folder's
    date: datetime | None = (
        None  # that the chat template writes; None for the folder's, else the present one
    )
    read_adapter: Callable[[Role, Any, int], Params] = no_weights  # of a seed, if it has none yet
    base: str = ""  # folder or hub id of the weights without the adapter
    check: Callable[[], Any] = dict  # ShoalError for files whose headers are not those of the model
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the adapter's checkpoint, by `fingerprint`
    digests: Callable[[], Mapping[str, str]] = (
        dict  # of samples of all weights that are read, by name
    )

    def load(self, role: Role, dtype: Any, frozen_dtype: Any = None, seed: int = 0) -> Params:
        """The weights in a role's layout: in `dtype`, those that an adapter freezes in
        `frozen_dtype` (None: too)."""
        if not self.architecture.adapter:
            return self.read(role, dtype)
        frozen = self.load_frozen(role, dtype if frozen_dtype is None else frozen_dtype)
        return joined(self.read_adapter(role, dtype, seed), frozen)

    def load_frozen(self, role: Role, dtype: Any) -> Params | None:
        """The weights that an adapter freezes, None in place of its own; None without one.
        ShoalError where they are not those that it was trained on, of the same types."""
        if not self.architecture.adapter:
            return None
        frozen = as_frozen(self.architecture, self.read(role, dtype))
        if (
            self.facts.get("base_types") == types_text(frozen)
            and (now := weights_text(frozen)) != self.facts["base"]
        ):
            raise ShoalError(
                f"the weights in {self.base} are not those that this adapter was trained on "
                f"(checksum {self.facts['base']}, now {now}): restore them, or export the adapter "
                "(shoal export from=RUN) to use it on others"
            )
        return frozen

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder, self.template, self.date)


def open_model(
    section: ModelSection, console: Printer | None, as_stored: bool = False
) -> ModelSource:
    """The model that the settings name, checked against its tokenizer. Prints notes about both to
    `console`. `as_stored`: without the type of weights that a run was trained with."""
    return _noted(_resolve(with_run(section)) if as_stored else resolve_model(section), console)


def _noted(spec: ModelSource, console: Printer | None) -> ModelSource:
    """The same; ShoalError if the tokenizer has ids that the model does not."""
    spec.tokenizer.check_vocabulary(spec.architecture.vocab_size)
    if console is not None:
        for note in (*spec.notes, *spec.tokenizer.notes):
            console.note(note)
    return spec


def open_run_model(section: ModelSection, run: Path | None, console: Printer | None) -> ModelSource:
    """The model of a training run. A resumed run loads the files in its folder, and `model.path`
    only for the first weights."""
    if run is None or not (run / MODEL_FOLDER / "config.json").is_file():
        return open_model(section, console)
    # The run's own files: what `model.path` names may have changed since, or be gone.
    stored = resolve_model(
        replace(section_of(section, str(run / MODEL_FOLDER)), quantise=section.quantise)
    )
    first = functools.cache(lambda: open_model(section, console))
    # What an adapter was trained on is what its file names: where `model.path` is a run, it may
    # have gone on since.
    read = (
        stored.read
        if stored.architecture.adapter
        else lambda role, dtype: first().read(role, dtype)
    )
    digests = stored.digests if stored.architecture.adapter else lambda: first().digests()
    return _noted(
        replace(
            stored,
            read=read,
            check=dict,
            read_adapter=lambda *to: first().read_adapter(*to),
            digests=digests,
        ),
        console,
    )


def section_of(section: ModelSection, path: str) -> ModelSection:
    """A section for another path, of which the files say all."""
    return replace(
        section, path=path, name="", tokenizer="", template="", lora=LoraSection(), quantise="none"
    )


def with_run(section: ModelSection) -> ModelSection:
    """The section with how the run that it names read the base of its adapter, where it says
    nothing else."""
    local = find_input(section.path, "model.path")
    if not local.is_dir() or not (found := find_checkpoint(local)):
        return section
    try:
        stored = read_requested(found[0]).model
    except ShoalError:  # of another version, or gone: its weights can be read all the same
        return section
    return replace(
        section,
        scan_layers=section.scan_layers and stored.scan_layers,
        quantise=stored.quantise if section.quantise == "none" else section.quantise,
    )


def resolve_model(section: ModelSection) -> ModelSource:
    """Finds the model that the settings name; a model on the hub is downloaded."""
    section = with_run(section)
    spec = _with_lora(section.lora, _resolve(section))
    return spec if section.quantise == "none" else _quantised(section, spec)


def _quantised(section: ModelSection, spec: ModelSource) -> ModelSource:
    """The model with its products' frozen weights in one byte an element, from when each is
    read."""
    a = quantised(section, spec.architecture)
    return replace(
        spec,
        architecture=a,
        read=lambda role, dtype: spec.read(role, dtype, keep=quantiser(a.base, role)),
    )


def _with_lora(lora: LoraSection, spec: ModelSource) -> ModelSource:
    """The model with the adapter of the settings, if they have one."""
    if not (lora.rank or lora.path):
        return spec
    if spec.architecture.adapter:
        raise ShoalError(
            f"model.path has an adapter on {spec.base} already, which is what is trained on: leave "
            f"out model.lora.*, or give model.path={spec.base}"
        )
    if not lora.path:
        a = adapted(lora, spec.architecture)
        return replace(spec, architecture=a, read_adapter=functools.partial(peft.begin, a))
    try:
        given = _resolve(ModelSection(path=lora.path), base=spec)
    except ShoalError as error:
        raise ShoalError(f"model.lora.path={lora.path}: {error}", "model.lora.path") from error
    if not (adapter := given.architecture.adapter):
        raise ShoalError(f"model.lora.path={lora.path} is no adapter: it holds no {peft.CONFIG}")
    if lora.rank not in (0, adapter.rank):
        raise ShoalError(
            f"model.lora.rank={lora.rank}: the adapter in {lora.path} has rank {adapter.rank}; "
            "leave it out"
        )
    return replace(
        spec,
        architecture=given.architecture,
        read_adapter=given.read_adapter,
        digests=given.digests,
    )


def adapted(lora: LoraSection, a: Architecture) -> Architecture:
    """The architecture with the adapter that the settings describe, if they do."""
    if lora.path:
        folder, _ = _find_files(lora.path, find_input(lora.path, "model.lora.path"))
        return replace(a, adapter=peft.read_adapter(folder, a))
    adapter = (
        adapters.make_adapter(a, lora.rank, lora.alpha, lora.targets, lora.rslora)
        if lora.rank
        else None
    )
    return replace(a, adapter=adapter or a.adapter)


def quantised(section: ModelSection, a: Architecture) -> Architecture:
    """The architecture with the type of weights of `model.quantise`."""
    return replace(a, quantised=QUANTISED[section.quantise])


def check_quantised(section: ModelSection, a: Architecture) -> None:
    """ShoalError for a model in training whose weights of 8 bits would be trained."""
    if a.quantised and not a.adapter:
        raise ShoalError(
            f"model.quantise={section.quantise}: expected none, or model.lora.rank=16 with it: "
            "weights that are trained are float32",
            "model.quantise",
        )


def _find_files(path: str, local: Path) -> tuple[Path, tuple[Path, int] | None]:
    """The folder with the files of a model, and the checkpoint with its weights if it is a
    run's."""
    if checkpoint := find_checkpoint(local) if local.is_dir() else None:
        return checkpoint[0] / MODEL_FOLDER, checkpoint
    if (small := locate(path, weights=False)).joinpath("config.json").is_file():
        families.architecture_of(
            small
        )  # a model that is not supported is refused before its weights are downloaded
    return locate(path), None


def _resolve(section: ModelSection, base: ModelSource | None = None) -> ModelSource:
    """The model of the path; `base`: the one that an adapter there belongs to, in place of what its
    files name."""
    path = model_path(section)
    local = find_input(path, "model.path")
    # First: another system's folder may hold a config.json too.
    if found := maxtext.find_tree(local):
        return _maxtext_model(section, found)
    folder, checkpoint = _find_files(path, local)
    is_untied = False  # its files hold another head than the embedding that config.json names
    spec = _adapter_model(section, folder, checkpoint, base) if peft.is_adapter(folder) else None
    if spec is None:
        a = (
            families.architecture_of(folder)
            if checkpoint
            else huggingface.stored_architecture(folder)
        )
        load = (
            functools.partial(load_parameters, *checkpoint, a)
            if checkpoint
            else functools.partial(huggingface.load, folder, a)
        )
        # The checkpoint itself, not its run, which may go on: an adapter belongs to these weights.
        source = (
            address(checkpoint[0] / CHECKPOINTS / str(checkpoint[1]))
            if checkpoint
            else path
            if path in PACKAGED or not local.is_dir()
            else address(local.resolve())
        )
        digests = (
            functools.partial(_checkpoint_digests, *checkpoint)
            if checkpoint
            else lambda: tensor_digests(huggingface.open_tensors(folder, a))
        )
        spec = ModelSource(folder, a, load, None, base=source, digests=digests)
        is_untied = not a.tie_embeddings and families.architecture_of(folder).tie_embeddings
        if is_untied:
            note = (
                f"the config.json of {path} says that the head is the embedding, and its files "
                "hold another head, which is used, as transformers 5 does"
            )
            # Written into the run and its exports: there the head is a parameter.
            config = {**families.read_config(folder), "tie_word_embeddings": False}
            spec = replace(spec, config=config, notes=(*spec.notes, note))
        if not checkpoint:
            spec = replace(spec, check=functools.partial(_check_tensors, path, folder, a))
    if path == section.path and section.name and "/" not in section.name:
        named = (
            replace(spec.architecture.base, tie_embeddings=True)
            if is_untied
            else spec.architecture.base
        )
        check_name(section.name, named, path, "model.name")
    spec = replace(spec, template=section.template)
    if not section.tokenizer:
        return spec
    tokenizer = locate(section.tokenizer, weights=False)
    config = spec.config or families.read_config(spec.folder)
    return replace(
        spec, folder=tokenizer, config=families.make_config(spec.architecture, tokenizer, config)
    )


def _checkpoint_digests(run: Path, version: int) -> dict[str, str]:
    """The checksum of the weights of a checkpoint, which they are compared with when they are
    read."""
    checksum = read_extra(run, version, "checksums").get("trainable")
    return {
        f"the weights of {run.name}/{CHECKPOINTS}/{version}": "none"
        if checksum is None
        else f"{checksum:#010x}"
    }


def _check_tensors(path: str, folder: Path, a: Architecture) -> None:
    """ShoalError for weights whose headers are not the model's. NotHere where a run would download
    them first."""
    is_hub_id = HUB_ID.fullmatch(path) and not Path(path).is_dir()  # `models/mine` may be either
    if (
        is_hub_id
        and waits_for_hub()
        and folder == cached_folder(path)
        and not huggingface.has_weights(folder)
    ):
        raise NotHere(path)
    huggingface.open_tensors(folder, a)


def _adapter_model(
    section: ModelSection,
    folder: Path,
    checkpoint: tuple[Path, int] | None,
    base: ModelSource | None,
) -> ModelSource:
    """The model of a folder with an adapter: PEFT's, or a run's, whose weights are in a
    checkpoint."""
    named = peft.read_base(folder) if base is None else base.base
    is_whole = (
        folder / "config.json"
    ).is_file()  # a run's: the base is asked for when its weights are read
    find = functools.cache(lambda: base or _base_of(section, folder, named))
    a = (
        base.architecture
        if base
        else families.architecture_of(folder)
        if is_whole
        else find().architecture
    )
    a = replace(a, adapter=peft.read_adapter(folder, a))
    read = (
        functools.partial(load_parameters, *checkpoint, a)
        if checkpoint
        else functools.partial(peft.load, folder, a)
    )
    if not checkpoint and not is_whole:
        peft.open_tensors(
            folder, a
        )  # wrong files are refused now: the base's weights are read first
    if not (folder / "tokenizer.json").is_file():
        place, config = find().folder, find().config
    else:
        place, config = (
            folder,
            None if is_whole else find().config or families.read_config(find().folder),
        )

    def digests() -> dict[str, str]:
        own = (
            _checkpoint_digests(*checkpoint)
            if checkpoint
            else tensor_digests(peft.open_tensors(folder, a))
        )
        return {**find().digests(), **own}

    return ModelSource(
        place,
        a,
        lambda *to, **keep: find().read(*to, **keep),
        config,
        digests=digests,
        read_adapter=lambda role, dtype, _: read(role, dtype),
        base=named,
        facts=read_extra(*checkpoint, "facts") if checkpoint else {},
    )


def _base_of(section: ModelSection, folder: Path, named: str) -> ModelSource:
    try:
        # A MaxText checkpoint says no sizes: a run's folder does.
        return _resolve(
            ModelSection(
                path=named,
                scan_layers=section.scan_layers,
                tokenizer=str(folder) if (folder / "config.json").is_file() else "",
            )
        )
    except ShoalError as error:
        raise ShoalError(f"the adapter in {folder} was trained on {named}: {error}") from error


def _maxtext_model(section: ModelSection, found: Path) -> ModelSource:
    name = section.name
    source = section.tokenizer or (
        name if "/" in name else model_named(name).hub_id if name else ""
    )
    try:
        tokenizer = locate(source, weights=False) if source else None
    except ShoalError as error:
        if section.tokenizer:
            raise
        raise ShoalError(
            f"{found} has no tokenizer, and that of model.name={name} is not here: {error} Or give "
            "model.tokenizer=FOLDER, a folder that has it",
            "model.tokenizer",
        ) from error
    checkpoint = maxtext.open_checkpoint(found, name, tokenizer, section.scan_layers)
    assert tokenizer is not None
    a = checkpoint.architecture
    config = None if families.describes(tokenizer, a) else families.make_config(a, tokenizer)
    return ModelSource(
        tokenizer,
        a,
        checkpoint.load,
        config,
        (checkpoint.describe(),),
        section.template,
        base=address(found.resolve()),
        digests=checkpoint.digests,
    )


def model_path(section: ModelSection) -> str:
    """`model.path`; if it is the default or empty, the hub's model of `model.name`."""
    if not section.name or section.path not in ("", ModelSection.path):
        return section.path
    return section.name if "/" in section.name else model_named(section.name).hub_id


def known_architecture(section: ModelSection) -> Architecture | None:
    """The sizes of a model that is a folder or has a well-known name, with its adapter; None for
    others, which the hub knows."""
    path = model_path(section)
    if Path(path).expanduser().is_dir() or path in PACKAGED:
        return resolve_model(section).architecture
    if section.name and "/" not in section.name:
        return _with_settings(section, model_named(section.name).architecture)
    known = next(
        (known.architecture for known in MODELS.values() if known.hub_id.lower() == path.lower()),
        None,
    )
    return known and _with_settings(section, known)


def _with_settings(section: ModelSection, a: Architecture) -> Architecture:
    """The architecture of a base with the adapter and the type of weights of the settings."""
    return quantised(section, adapted(section.lora, a))


def planned_architecture(section: ModelSection) -> Architecture:
    """The model's sizes, from its name or a config.json alone; ShoalError if neither can be had."""
    if known := known_architecture(section):
        return known
    return _with_settings(
        section, huggingface.stored_architecture(locate(model_path(section), weights=False))
    )


def check_positions(a: Architecture, sampling: SamplingSection, whose: str) -> None:
    """ShoalError where sequences may be longer than a model's positions reach. `whose`: the key and
    value that name it."""
    prompt, completion = sampling.max_prompt_tokens, sampling.max_completion_tokens
    if 0 < a.max_positions < prompt + completion:
        raise ShoalError(
            f"{whose}: it has positions for {a.max_positions:,} tokens (max_position_embeddings), "
            f"but sampling.max_prompt_tokens={prompt} and "
            f"sampling.max_completion_tokens={completion} are {prompt + completion:,}; lower one",
            "sampling.max_completion_tokens",
        )


def compute_dtype(name: str, platform: str) -> Any:
    """The dtype of `model.dtype`: for `auto`, float32 on CPU and bfloat16 on accelerators."""
    if name == "auto":
        # Most CPUs have no bfloat16 products: XLA converts to float32 and back, which is slower.
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def multiply_exactly(dtype: Any, stack: ExitStack) -> None:
    """Until `stack` closes, float32 is multiplied as float32, of which accelerators keep fewer bits
    by default."""
    if dtype != jnp.float32:
        return
    # For all threads, some of which sample: `jax.default_matmul_precision` is for its own alone.
    stack.callback(jax.config.update, MATMUL_PRECISION, jax.config.values[MATMUL_PRECISION])
    jax.config.update(MATMUL_PRECISION, "highest")


def make_model(section: ModelSection, a: Architecture, role: Role) -> Model:
    """The `Model` on a role's devices; one that is trained is `trained_model`'s."""
    dtype = compute_dtype(section.dtype, role.platform)
    remat = "dots" if section.remat == "auto" else section.remat
    model = Model(a, role, dtype, remat, section.attention)
    return replace(model, attention="blocked") if kernel_fault(model) else model


def copy_model_files(model: ModelSource, target: Path) -> None:
    """Copies tokenizer, chat template and config.json, so that checkpoints need nothing else.
    config.json comes last: it marks the folder as complete."""
    target.mkdir(parents=True, exist_ok=True)
    # The template may be the user's own; exported, the model must be asked as it was trained.
    model.tokenizer.write_templates(target)
    if model.tokenizer.date is not None and model.tokenizer.writes_date:
        write_date(model.tokenizer.date, target)
    if model.architecture.adapter:
        peft.write_config(target, model.architecture.adapter, model.base)
    names = [name for name in huggingface.TOKENIZER_FILES if name != "chat_template.jinja"]
    for name in names if model.config else (*names, "config.json"):
        if (model.folder / name).is_file():
            shutil.copy2(model.folder / name, target / name)
    if model.config:
        write_text(
            target / "config.json",
            json.dumps(model.config, indent=2) + "\n",
            "base_output_directory",
        )


PREFIX = "model:"
"""Begins the name of a reward model in `reward.functions`."""


def reward_architectures(section: RewardSection) -> dict[str, Architecture]:
    """The sizes of the reward models whose files are on this machine, by path."""
    paths = [spec.removeprefix(PREFIX) for spec in section.functions if spec.startswith(PREFIX)]
    return {
        path: families.architecture_of(folder) for path in paths if (folder := cached_folder(path))
    }

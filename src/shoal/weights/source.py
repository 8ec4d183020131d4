"""Finds and loads the model that `model.path` names: a folder in Hugging Face format, a hub id, a
run, or another system's checkpoint."""

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
from shoal.config.train import Config
from shoal.files import find_input, waits_for_hub, write_text
from shoal.findings import Finding
from shoal.mesh import Role
from shoal.model import adapters, families
from shoal.model.architecture import Architecture
from shoal.model.attention.selector import kernel_fault
from shoal.model.config_json import read_config
from shoal.model.config_writer import make_config
from shoal.model.experts import kernel_fault as kernel_fault_of_experts
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
from shoal.weights.checkpoints import (
    checkpoint_named,
    find_checkpoint,
    load_parameters,
    read_extra,
)
from shoal.weights.checksum import same_weights, types_text, weights_text
from shoal.weights.hub import HUB_ID, PACKAGED, cached_folder, config_on_hub, locate, no_model
from shoal.weights.tensor_files import digests as tensor_digests

MATMUL_PRECISION = "jax_default_matmul_precision"


def no_weights(role: Role, dtype: Any, seed: int = 0) -> Params:
    """Raises RuntimeError: the `read` of a source that has no weights."""
    raise RuntimeError("a model of sizes alone has no weights to read")


def no_origin() -> Path | None:
    """Returns None: the `origin` of a source without files in Hugging Face's format."""
    return None


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, without its weights: what it is, and how to read them.

    >>> source = open_model(ModelSection(path="Qwen/Qwen3-0.6B"), console)
    >>> params = source.load(roles.trainer, jnp.float32)
    """

    folder: Path
    """Folder with the tokenizer, and with config.json unless `config` is given."""
    architecture: Architecture
    read: Callable[..., Params] = no_weights
    """(role, dtype, keep) -> the weights without an adapter, like `huggingface.load`."""
    config: dict[str, Any] | None = None
    """A config.json that is used in place of the folder's; None for the folder's."""
    notes: tuple[Finding, ...] = ()
    """What the user should know about the files, as findings of the check `tokenizer`."""
    template: str = ""
    """A chat template that is used in place of the folder's; "" for the folder's."""
    template_variables: tuple[str, ...] = ()
    """Variables that the chat template is given, as NAME=VALUE."""
    date: datetime | None = None
    """The date that the chat template writes; None for the folder's date, or today if the folder
    has none."""
    read_adapter: Callable[[Role, Any, int], Params] = no_weights
    """(role, dtype, seed) -> the adapter's weights; a new adapter, which has none yet, is made from
    the seed."""
    base: str = ""
    """Folder or hub id of the weights without the adapter."""
    check: Callable[[], Any] = dict
    """Raises ShoalError if the headers of the weight files do not fit the model."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the inputs of the adapter's training, from its checkpoint (`fingerprint`)."""
    digests: Callable[[], Mapping[str, str]] = dict
    """Returns digests of samples of all weights that are read, by name."""
    origin: Callable[[], Path | None] = no_origin
    """Returns the folder whose files the weights without an adapter came from, also if they have
    been trained since; None if it is not on this machine, or has another format. Exports have the
    names of its tensors, and its towers."""

    def load(self, role: Role, dtype: Any, frozen_dtype: Any = None, seed: int = 0) -> Params:
        """Reads the weights and returns them on a role's devices: trained ones in `dtype`, those
        that an adapter freezes in `frozen_dtype` (None: also `dtype`). A new adapter, which no file
        has, is made from `seed`. Without an adapter `frozen_dtype` and `seed` are not used."""
        if not self.architecture.adapter:
            return self.read(role, dtype)
        frozen = self.load_frozen(role, dtype if frozen_dtype is None else frozen_dtype)
        return joined(self.read_adapter(role, dtype, seed), frozen)

    def load_frozen(self, role: Role, dtype: Any) -> Params | None:
        """Reads the weights that an adapter freezes, and returns them with None in place of the
        adapter's own; returns None if the model has no adapter. ShoalError if the adapter's run
        recorded another checksum of its frozen weights (compared only if their types are the
        same)."""
        if not self.architecture.adapter:
            return None
        frozen = as_frozen(self.architecture, self.read(role, dtype))
        if self.facts.get("base_types") == types_text(frozen):
            checksum = weights_text(frozen)
            if same_weights(checksum, self.facts["base"]) is False:
                raise ShoalError(
                    f"the weights in {self.base} are not those that this adapter was trained on "
                    f"(checksum {self.facts['base']}, now {checksum}): restore them, or export the "
                    "adapter (shoal export from=RUN) to use it on others"
                )
        return frozen

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read from `folder` at the first use."""
        return Tokenizer.load(self.folder, self.template, self.date, self.template_variables)


def open_model(
    section: ModelSection, console: Printer | None, as_stored: bool = False
) -> ModelSource:
    """Finds the model that the settings name, checks it against its tokenizer, and returns it
    without its weights. Prints notes about both to `console`; None: prints nothing. A model on the
    hub is downloaded. ShoalError if there is no such model. With `as_stored` the model is as its
    files have it: without the adapter of `model.lora.*` and the type of weights of `model.quantise`
    (an adapter in the files stays)."""
    source = _resolve(with_run(section)) if as_stored else resolve_model(section)
    return _checked(source, console)


def _checked(source: ModelSource, console: Printer | None) -> ModelSource:
    """Returns the same source, after printing its notes; ShoalError if the tokenizer has ids that
    the model does not have."""
    source.tokenizer.check_vocabulary(source.architecture.vocab_size)
    if console is not None:
        for note in source.notes:
            console.note(note.text)
        for note in source.tokenizer.notes:
            console.note(note.text)
    return source


def open_run_model(section: ModelSection, run: Path | None, console: Printer | None) -> ModelSource:
    """Finds the model of a training run, and prints notes about it. `run`: the folder of a run that
    is resumed, or None.

    A resumed run uses config, tokenizer and adapter in its own folder, because `model.path` may
    have changed since. Its weights at the beginning, and their digests, still come from
    `model.path`, which is opened only when they are read.
    """
    if run is None or not (run / MODEL_FOLDER / "config.json").is_file():
        return open_model(section, console)
    # The run's own files, because what `model.path` names may have changed since, or be gone.
    own_section = section_of(section, str(run / MODEL_FOLDER))
    # `section_of` leaves out the type of weights; that of the settings counts
    stored = resolve_model(replace(own_section, quantise=section.quantise))
    open_first = functools.cache(functools.partial(open_model, section, console))

    def read_first(role: Role, dtype: Any) -> Params:
        return open_first().read(role, dtype)

    def read_first_adapter(role: Role, dtype: Any, seed: int) -> Params:
        return open_first().read_adapter(role, dtype, seed)

    def digest_first() -> Mapping[str, str]:
        return open_first().digests()

    resumed = replace(
        stored,
        check=dict,
        read_adapter=read_first_adapter,
        # the run's own folder has no weights
        origin=functools.partial(_origin_of_run, run, stored.architecture),
    )
    # The base of an adapter is the one that the adapter's file names: if `model.path` is a run,
    # that run may have trained further since.
    if not stored.architecture.adapter:
        resumed = replace(resumed, read=read_first, digests=digest_first)
    return _checked(resumed, console)


def section_of(section: ModelSection, path: str) -> ModelSection:
    """Returns a section for another path, without settings that would override what its files say:
    name, tokenizer, template with its variables, adapter, type of weights."""
    return replace(
        section,
        path=path,
        name="",
        tokenizer="",
        template="",
        template_variables=(),
        lora=LoraSection(),
        quantise="none",
    )


def teacher_model(config: Config, path: str) -> ModelSection:
    """Returns the section of a teacher whose checkpoint is at `path`."""
    return replace(section_of(config.model, path), quantise=config.teacher.quantise)


def settings_of_run(section: ModelSection) -> Config | None:
    """Returns the settings that the run was given which `model.path` names; None if it names no
    run, or one whose settings cannot be read. A run in a bucket is fetched first."""
    checkpoint = checkpoint_named(section.path, "model.path")
    if checkpoint is None:
        return None
    run, _ = checkpoint
    try:
        return read_requested(run)
    except ShoalError:  # settings of another version, or gone: the weights can be read all the same
        return None


def with_run(section: ModelSection) -> ModelSection:
    """Returns the section with `scan_layers` and `quantise` of the run that `model.path` names
    (`settings_of_run`); a value of the section that is not the default stays. Returns the section
    itself if there are no such settings."""
    settings = settings_of_run(section)
    if settings is None:
        return section
    stored = settings.model
    quantise = stored.quantise if section.quantise == "none" else section.quantise
    return replace(
        section, scan_layers=section.scan_layers and stored.scan_layers, quantise=quantise
    )


def resolve_model(section: ModelSection) -> ModelSource:
    """Finds the model that the settings name, with their adapter and type of weights, and returns
    it without its weights. A model on the hub is downloaded (NotHere in a dry run, if it is not in
    the cache). ShoalError if there is no such model, or if the settings do not fit it."""
    section = with_run(section)
    source = _with_lora(section.lora, _resolve(section))
    if section.quantise == "none":
        return source
    return _quantised(section, source)


def _quantised(section: ModelSection, source: ModelSource) -> ModelSource:
    """Returns the source with the kernels that an adapter freezes in 8 bits. Each kernel is
    quantised as soon as it is read, so that no two are in memory in the wider type."""
    a = quantised(section, source.architecture)

    def read(role: Role, dtype: Any) -> Params:
        return source.read(role, dtype, keep=quantiser(a.base, role))

    return replace(source, architecture=a, read=read)


def _with_lora(lora: LoraSection, source: ModelSource) -> ModelSource:
    """Returns the source with the adapter of `model.lora.*`: a new one, or the one in
    `model.lora.path`; the source itself if the settings have none. ShoalError if the source has an
    adapter already, or if that of the settings does not fit."""
    if not (lora.rank or lora.path):
        return source
    if source.architecture.adapter:
        raise ShoalError(
            f"model.path already has an adapter on {source.base}, and training continues with it: "
            f"leave out model.lora.*, or give model.path={source.base}"
        )
    if not lora.path:
        a = adapted(lora, source.architecture)
        return replace(source, architecture=a, read_adapter=functools.partial(peft.begin, a))
    try:
        with_adapter = _resolve(ModelSection(path=lora.path), base=source)
    except ShoalError as error:
        raise ShoalError(f"model.lora.path={lora.path}: {error}", "model.lora.path") from error
    adapter = with_adapter.architecture.adapter
    if not adapter:
        raise ShoalError(
            f"model.lora.path={lora.path} is not an adapter: it holds no {peft.CONFIG}"
        )
    if lora.rank not in (0, adapter.rank):
        raise ShoalError(
            f"model.lora.rank={lora.rank}: the adapter in {lora.path} has rank {adapter.rank}; "
            "leave it out"
        )
    return replace(
        source,
        architecture=with_adapter.architecture,
        read_adapter=with_adapter.read_adapter,
        notes=(*source.notes, *with_adapter.notes),
        digests=with_adapter.digests,
    )


def adapted(lora: LoraSection, a: Architecture) -> Architecture:
    """Returns the architecture with the adapter that the settings describe: the one whose config is
    in `lora.path` (from the hub it is downloaded), else a new one of `lora.rank`; the same
    architecture if both are unset. ShoalError if the adapter does not fit."""
    if lora.path:
        folder, _ = _find_files(lora.path, find_input(lora.path, "model.lora.path"))
        return replace(a, adapter=peft.read_adapter(folder, a))
    if not lora.rank:
        return a
    adapter = adapters.make_adapter(a, lora.rank, lora.alpha, lora.targets, lora.rslora)
    return replace(a, adapter=adapter)


def quantised(section: ModelSection, a: Architecture) -> Architecture:
    """Returns the architecture with the type of weights that `model.quantise` asks for."""
    return replace(a, quantised=QUANTISED[section.quantise])


def check_quantised(section: ModelSection, a: Architecture) -> None:
    """Raises ShoalError if a model for training would have trained weights in 8 bits."""
    if a.quantised and not a.adapter:
        raise ShoalError(
            f"model.quantise={section.quantise}: expected none, or model.lora.rank=16 with it: "
            "weights that are trained are float32",
            "model.quantise",
        )


def _find_files(path: str, local: Path) -> tuple[Path, tuple[Path, int] | None]:
    """Returns (folder with the model's config and tokenizer files, checkpoint): for a run its model
    folder and (run folder, version); for another model the folder that also has the weights, and
    None. A model on the hub is downloaded; in a dry run its config.json alone is read, if the hub
    can be reached, before NotHere is raised. `local`: where a local folder called `path` would be.
    ShoalError if there is no such model, or its family is not supported."""
    if local.is_dir():
        checkpoint = find_checkpoint(local)
        if checkpoint is not None:
            run, _ = checkpoint
            return run / MODEL_FOLDER, checkpoint
    # Looks at config.json first, so that a model that is not supported is refused before its
    # weights are downloaded.
    try:
        without_weights = locate(path, weights=False)
    except NotHere:
        config = config_on_hub(path) if HUB_ID.fullmatch(path) else None
        if config is not None:
            # called for its error alone
            families.architecture_in(config, path)
        raise
    if (without_weights / "config.json").is_file():
        families.architecture_of(without_weights)
    return locate(path), None


def _resolve(section: ModelSection, base: ModelSource | None = None) -> ModelSource:
    """Finds the model of `model.path` (or `model.name`) as its files have it, without the settings'
    adapter and type of weights. If the path is an adapter's, `base` is used as its base model;
    None: the one that its files name. With `model.tokenizer` the source's `folder` is that of the
    tokenizer, and its `config` is made for both. ShoalError if there is no such model, or if
    `model.name` names one of other sizes."""
    path = model_path(section)
    if not path:
        raise no_model("model.path")
    local = find_input(path, "model.path")
    # MaxText comes first, because another system's folder may hold a config.json too.
    maxtext_tree = maxtext.find_tree(local)
    if maxtext_tree is not None:
        return _maxtext_model(section, maxtext_tree)
    folder, checkpoint = _find_files(path, local)
    # True if the files hold a head other than the embedding, which config.json names as the head
    is_untied = False
    if peft.is_adapter(folder):
        source = _adapter_model(section, folder, checkpoint, base)
    elif checkpoint is not None:
        run, version = checkpoint
        source = _checkpoint_model(folder, run, version)
    else:
        a = huggingface.stored_architecture(folder)
        is_untied = not a.tie_embeddings and families.architecture_of(folder).tie_embeddings
        source = _folder_model(path, local, folder, a, is_untied)
    # the name did not give the path, so it is compared with what was found there
    if path == section.path and section.name and "/" not in section.name:
        named = source.architecture.base
        if is_untied:
            named = replace(named, tie_embeddings=True)
        check_name(section.name, named, path, "model.name")
    source = replace(
        source, template=section.template, template_variables=section.template_variables
    )
    if not section.tokenizer:
        return source
    tokenizer = locate(section.tokenizer, weights=False)
    config = source.config or read_config(source.folder)
    config = make_config(source.architecture, tokenizer, config)
    return replace(source, folder=tokenizer, config=config)


def _checkpoint_model(folder: Path, run: Path, version: int) -> ModelSource:
    """Returns the model of a run's folder, with the weights of one of its checkpoints."""
    a = families.architecture_of(folder)
    return ModelSource(
        folder=folder,
        architecture=a,
        read=functools.partial(load_parameters, run, version, a),
        origin=functools.partial(_origin_of_run, run, a),
        # `base` is the checkpoint, not its run, which may train further: an adapter belongs to
        # these weights.
        base=address(run / CHECKPOINTS / str(version)),
        digests=functools.partial(_checkpoint_digests, run, version),
    )


def _origin_of_run(run: Path, a: Architecture) -> Path | None:
    """Returns the folder whose weights a run began with; if it began with those of another run,
    the folder that this one began with. None if it is not on this machine, or is no model folder of
    this architecture."""
    try:
        path = model_path(read_requested(run).model)
        local = Path(path).expanduser()
        checkpoint = find_checkpoint(local) if local.is_dir() else None
    except ShoalError:  # settings of another version, or a run that is gone
        return None
    if checkpoint is not None:
        earlier, _ = checkpoint
        return None if earlier == run else _origin_of_run(earlier, a)
    folder = cached_folder(path)
    if folder is None or not huggingface.describes_files(folder, a):
        return None
    return folder


def _folder_model(
    path: str, local: Path, folder: Path, a: Architecture, is_untied: bool
) -> ModelSource:
    """Returns the model of a folder in Hugging Face's format. `path`: what the settings name;
    `local`: where a local folder called so would be. `is_untied`: True if the files have a head
    although config.json says that it is tied; the source then has a corrected config and a note."""

    def digests() -> Mapping[str, str]:
        return tensor_digests(huggingface.open_tensors(folder, a))

    # a packaged name comes before a folder of that name (`locate`)
    is_folder = local.is_dir() and path not in PACKAGED
    source = ModelSource(
        folder=folder,
        architecture=a,
        read=functools.partial(huggingface.load, folder, a),
        base=address(local.resolve()) if is_folder else path,
        check=functools.partial(_check_tensors, path, folder, a),
        digests=digests,
        notes=_notes_of_files(path, folder),
        origin=lambda: folder,
    )
    if not is_untied:
        return source
    note = Finding(
        "tokenizer",
        "warning",
        f"the config.json of {path} says that the head is the embedding, and its files "
        "hold another head, which is used, as transformers 5 does",
        "model.path",
    )
    # This config is written into the run and its exports, because there the head is a parameter.
    config = {**read_config(folder), "tie_word_embeddings": False}
    return replace(source, config=config, notes=(*source.notes, note))


def _notes_of_files(path: str, folder: Path) -> tuple[Finding, ...]:
    """Returns findings about what is passed over and what is widened of a folder's files, if the
    files are here. `path`: what the settings name."""
    if not huggingface.has_weights(folder):
        return ()
    try:
        notes = huggingface.read_origin(folder).notes()
    except ShoalError:  # a damaged file, which `ModelSource.check` reports
        return ()
    return tuple(Finding("tokenizer", "ok", f"{path}: {note}") for note in notes)


def _checkpoint_digests(run: Path, version: int) -> dict[str, str]:
    """Returns the checksum of a checkpoint's weights as a digest, `none` if it is not stored, under
    a name for the weights. Nothing is read but the stored checksum, with which the weights are
    compared when they are read."""
    checksum = read_extra(run, version, "checksums").get("trainable")
    text = "none" if checksum is None else f"{checksum:#010x}"
    return {f"the weights of {run.name}/{CHECKPOINTS}/{version}": text}


def _check_tensors(path: str, folder: Path, a: Architecture) -> None:
    """Raises ShoalError if the headers of the weight files do not fit the model; NotHere if a run
    would download the weights first."""
    is_hub_id = HUB_ID.fullmatch(path) and not Path(path).is_dir()  # `models/mine` may be either
    if is_hub_id and waits_for_hub():
        if folder == cached_folder(path) and not huggingface.has_weights(folder):
            raise NotHere(path)
    huggingface.open_tensors(folder, a)


def _adapter_model(
    section: ModelSection,
    folder: Path,
    checkpoint: tuple[Path, int] | None,
    base: ModelSource | None,
) -> ModelSource:
    """Returns the model of a folder with an adapter: PEFT's, or a run's model folder, with its
    weights in `checkpoint` (run folder, version). `base`: the base model; None: the one that the
    adapter's files name, which is opened only when it is needed."""
    base_name = peft.read_base(folder) if base is None else base.base
    # A run's folder has the sizes, so its base is looked for only when the base's weights are read.
    has_config = (folder / "config.json").is_file()

    @functools.cache
    def find_base() -> ModelSource:
        """Finds the base model, once."""
        if base is not None:
            return base
        return _base_of(section, folder, base_name)

    if base is not None:
        a = base.architecture
    elif has_config:
        a = families.architecture_of(folder)
    else:
        a = find_base().architecture
    a = replace(a, adapter=peft.read_adapter(folder, a))
    if checkpoint is None and not has_config:
        # Wrong files are refused now, because the base's weights are read first.
        peft.open_tensors(folder, a)

    if not (folder / "tokenizer.json").is_file():
        tokenizer_folder = find_base().folder
        config = find_base().config
    elif has_config:
        tokenizer_folder = folder
        config = None
    else:
        tokenizer_folder = folder
        config = find_base().config or read_config(find_base().folder)

    def read_base(role: Role, dtype: Any, **options: Any) -> Params:
        return find_base().read(role, dtype, **options)

    def read_adapter(role: Role, dtype: Any, seed: int) -> Params:
        """Reads the adapter's weights from the run's checkpoint, or from PEFT's file; `seed` is not
        used."""
        if checkpoint is None:
            return peft.load(folder, a, role, dtype)
        run, version = checkpoint
        return load_parameters(run, version, a, role, dtype)

    def digests() -> dict[str, str]:
        """Returns the digests of the base and of the adapter."""
        all_digests = dict(find_base().digests())
        if checkpoint is None:
            all_digests |= tensor_digests(peft.open_tensors(folder, a))
        else:
            run, version = checkpoint
            all_digests |= _checkpoint_digests(run, version)
        return all_digests

    facts: Mapping[str, Any] = {}
    if checkpoint is not None:
        run, version = checkpoint
        facts = read_extra(run, version, "facts")
    return ModelSource(
        folder=tokenizer_folder,
        architecture=a,
        read=read_base,
        config=config,
        digests=digests,
        read_adapter=read_adapter,
        notes=tuple(Finding("tokenizer", "ok", note) for note in peft.notes(folder)),
        base=base_name,
        facts=facts,
        origin=lambda: find_base().origin(),
    )


def _base_of(section: ModelSection, folder: Path, base_name: str) -> ModelSource:
    """Finds the base model `base_name` of the adapter in a folder, and returns it. `section`: the
    adapter's, whose `scan_layers` the base gets. ShoalError, which names the folder, if it is not
    found."""
    # A MaxText checkpoint does not say its sizes: a run's folder does.
    tokenizer = str(folder) if (folder / "config.json").is_file() else ""
    base = ModelSection(path=base_name, scan_layers=section.scan_layers, tokenizer=tokenizer)
    try:
        return _resolve(base)
    except ShoalError as error:
        raise ShoalError(f"the adapter in {folder} was trained on {base_name}: {error}") from error


def _maxtext_model(section: ModelSection, tree: Path) -> ModelSource:
    """Returns the model of the MaxText checkpoint in `tree`. Its tokenizer is `model.tokenizer`, or
    else that of the hub model which `model.name` means. ShoalError if neither is given, if the
    tokenizer is not found, or if the checkpoint does not fit."""
    name = section.name
    if section.tokenizer:
        tokenizer_source = section.tokenizer
    elif name and "/" not in name:
        tokenizer_source = model_named(name).hub_id
    else:
        tokenizer_source = name
    tokenizer: Path | None = None
    if tokenizer_source:
        try:
            tokenizer = locate(tokenizer_source, weights=False)
        except ShoalError as error:
            if section.tokenizer:
                raise
            raise ShoalError(
                f"{tree} has no tokenizer, and that of model.name={name} is not here: {error} Or "
                "give model.tokenizer=FOLDER, a folder that has it",
                "model.tokenizer",
            ) from error
    checkpoint = maxtext.open_checkpoint(tree, name, tokenizer, section.scan_layers)
    # without a name and a tokenizer `open_checkpoint` has raised ShoalError
    assert tokenizer is not None
    a = checkpoint.architecture
    config = None
    if not families.describes(tokenizer, a):
        config = make_config(a, tokenizer)
    return ModelSource(
        folder=tokenizer,
        architecture=a,
        read=checkpoint.load,
        config=config,
        notes=(Finding("tokenizer", "ok", checkpoint.describe()),),
        template=section.template,
        template_variables=section.template_variables,
        base=address(tree.resolve()),
        digests=checkpoint.digests,
    )


def model_path(section: ModelSection) -> str:
    """Returns `model.path`; if that is the default or empty and `model.name` is set, the hub id of
    `model.name`: a published model's, or itself if it has a slash. ShoalError if no published model
    has that name."""
    if not section.name or section.path not in ("", ModelSection.path):
        return section.path
    return section.name if "/" in section.name else model_named(section.name).hub_id


def known_architecture(section: ModelSection) -> Architecture | None:
    """Returns the architecture of a local or packaged model, or of a published model whose sizes
    are known by name, with the adapter and type of weights of the settings. ShoalError if a local
    model's files do not fit. None for others, whose config only the hub has; nothing is
    downloaded."""
    path = model_path(section)
    is_folder = path != "" and Path(path).expanduser().is_dir()
    if is_folder or path in PACKAGED:
        return resolve_model(section).architecture
    if section.name and "/" not in section.name:
        return _with_settings(section, model_named(section.name).architecture)
    for published in MODELS.values():
        if path.lower() in (hub_id.lower() for hub_id in published.hub_ids):
            return _with_settings(section, published.architecture)
    return None


def _with_settings(section: ModelSection, a: Architecture) -> Architecture:
    """Returns the architecture of a base model with the adapter and the type of weights of the
    settings."""
    return quantised(section, adapted(section.lora, a))


def planned_architecture(section: ModelSection) -> Architecture:
    """Returns the architecture of a model with the adapter and the type of weights of the settings:
    `known_architecture` if it is known without a download, else that of the model's config.json,
    which is downloaded if need be (no weights). ShoalError if there is none."""
    known = known_architecture(section)
    if known is not None:
        return known
    path = model_path(section)
    if not path:
        raise no_model("model.path")
    folder = locate(path, weights=False)
    return _with_settings(section, huggingface.stored_architecture(folder))


def check_positions(
    a: Architecture, sampling: SamplingSection, whose: str, hint_tokens: int = 0
) -> None:
    """Raises ShoalError if a prompt and completion of the longest lengths have more tokens than a
    model has positions. A model with 0 positions has no limit. `whose` names the model in the
    message, as "key=value". `hint_tokens`: those by which a teacher's prompt is longer."""
    prompt, completion = sampling.max_prompt_tokens, sampling.max_completion_tokens
    longest = prompt + completion + hint_tokens
    if 0 < a.max_positions < longest:
        hint = f", teacher.hint_tokens={hint_tokens}" if hint_tokens else ""
        raise ShoalError(
            f"{whose}: it has positions for {a.max_positions:,} tokens (max_position_embeddings), "
            f"but sampling.max_prompt_tokens={prompt}{hint} and "
            f"sampling.max_completion_tokens={completion} are {longest:,}; lower one",
            "sampling.max_completion_tokens",
        )


def compute_dtype(name: str, platform: str) -> Any:
    """Returns the dtype for a value of `model.dtype`, a type's name or `auto`: for `auto`, float32
    on CPU and bfloat16 on accelerators."""
    if name == "auto":
        # Most CPUs have no bfloat16 products: XLA converts to float32 and back, which is slower.
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def check_experts(model: Model) -> None:
    """Raises ShoalError if the model has experts, and the kernels that multiply them do not work on
    its devices: every other way there multiplies each token by all experts."""
    if not model.architecture.experts:
        return
    dtype = model.dtype.name
    fault = kernel_fault_of_experts(model.role, dtype, model.architecture.quantised or dtype)
    if fault:
        raise ShoalError(
            "experts cannot be multiplied: our kernels do not work on this "
            f"{model.role.platform.upper()} ({fault})"
        )


def multiply_exactly(dtype: Any, stack: ExitStack) -> None:
    """Makes JAX multiply float32 with all bits in the whole process until `stack` closes, which
    sets the earlier precision again; if `dtype` is not float32, does nothing. By default
    accelerators keep fewer bits."""
    if dtype != jnp.float32:
        return
    # The global setting covers all threads, some of which sample; `jax.default_matmul_precision`
    # would cover the calling thread alone.
    stack.callback(jax.config.update, MATMUL_PRECISION, jax.config.values[MATMUL_PRECISION])
    jax.config.update(MATMUL_PRECISION, "highest")


def make_model(
    section: ModelSection, a: Architecture, role: Role, longest_sequence: int = 0
) -> Model:
    """Returns the `Model` of an architecture on a role's devices, with `blocked` attention if the
    kernels do not work on this device. `model.remat=auto` becomes `dots`: use `trained_model` for a
    model that is trained. `longest_sequence` is that of `Model`."""
    dtype = compute_dtype(section.dtype, role.platform)
    remat = "dots" if section.remat == "auto" else section.remat
    model = Model(a, role, dtype, remat, section.attention, longest_sequence=longest_sequence)
    if kernel_fault(model):
        return replace(model, attention="blocked")
    return model


def copy_model_files(model: ModelSource, target: Path) -> None:
    """Copies tokenizer, chat template with its date, adapter config and config.json (no weights) to
    `target`, a run's model folder, so that its checkpoints need nothing else. Creates the folder;
    files of the same names are replaced. config.json comes last, because it marks the folder as
    complete."""
    target.mkdir(parents=True, exist_ok=True)
    # The template may be the user's own, and an exported model must be asked as it was trained.
    model.tokenizer.write_templates(target)
    if model.tokenizer.date is not None and model.tokenizer.writes_date:
        write_date(model.tokenizer.date, target)
    if model.architecture.adapter:
        described = model.config or read_config(model.folder)
        peft.write_config(
            target, model.architecture.adapter, model.base, families.is_multimodal(described)
        )
    names = [name for name in huggingface.TOKENIZER_FILES if name != "chat_template.jinja"]
    # config.json is copied last, or written below if the source has a config of its own
    if not model.config:
        names.append("config.json")
    for name in names:
        if (model.folder / name).is_file():
            shutil.copy2(model.folder / name, target / name)
    if model.config:
        text = json.dumps(model.config, indent=2) + "\n"
        write_text(target / "config.json", text, "base_output_directory")


PREFIX = "model:"
"""Prefix of a reward model's path in `reward.functions`."""


def reward_architectures(section: RewardSection) -> dict[str, Architecture]:
    """Returns path -> architecture of the reward models in `reward.functions` (`model:PATH`); those
    whose files are not on this machine are left out; nothing is downloaded."""
    architectures: dict[str, Architecture] = {}
    for spec in section.functions:
        if not spec.startswith(PREFIX):
            continue
        path = spec.removeprefix(PREFIX)
        folder = cached_folder(path)
        if folder is not None:
            architectures[path] = families.architecture_of(folder)
    return architectures

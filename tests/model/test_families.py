"""Each family against transformers' own class, on random checkpoints in the form in which they are
published (`family_checkpoints.SUPPORTED`): logits, tokens, log-probs, gradients and files."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from family_checkpoints import (
    CHECKPOINTS,
    SUPPORTED,
    load_theirs,
    with_fused_experts,
    write_checkpoint,
)
from safetensors import safe_open
from small import random_groups, relative, roles, shoal_logits, whole
from small_engine import asked, play, played_groups, prompt

from shoal.model.architecture import Architecture
from shoal.model.families import architecture_of
from shoal.model.parameters import Parameters
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import Completion, Group, SamplingParams
from shoal.sampler.engine import Engine
from shoal.trainer.batch import BatchLayout, MicroBatch, TokenTerms, pack, unpack
from shoal.trainer.loss import batch_logprobs
from shoal.weights import huggingface
from shoal.weights.sampler_copy import publish_to

LOGITS = 1e-4  # most that a logit may differ from transformers'
LOGPROBS = 2e-5  # most that two of Shoal's log-probs of a token may differ
GRADIENT = 1e-5  # most that gradients may differ, by norm
PROMPT_LENGTHS = (20, 1, 70)  # windows are shorter; chunks of a recurrence are longer and shorter
NUM_TOKENS = 64

TokenValues = dict[tuple[int, int], np.ndarray]  # by (group, completion): a number for each token


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in both systems, and what several tests look at."""

    name: str
    folder: Path
    theirs: Any
    architecture: Architecture
    parameters: Parameters

    @property
    def trainer(self) -> Model:
        return Model(self.architecture, roles().trainer)

    @cached_property
    def groups(self) -> list[Group]:
        """Prompts longer and shorter than windows and chunks, with two completions each."""
        groups = random_groups(self.architecture, 3, 2, 75, 40)
        assert len(groups[0].prompt_ids) > CHECKPOINTS[self.name].window
        for group in groups:
            # torch gives the embedding of padding no gradient, of which the id may be 0
            group.prompt_ids[group.prompt_ids == 0] = 1
            for completion in group.completions:
                completion.token_ids[completion.token_ids == 0] = 1
        return groups

    @cached_property
    def token_weights(self) -> TokenValues:
        """What each token's log-prob is multiplied by in the loss; of both signs."""
        rng = np.random.default_rng(3)
        weights = {}
        for key, completion in completions_of(self.groups):
            weights[key] = rng.standard_normal(len(completion)).astype(np.float32)
        return weights

    @cached_property
    def learnt(self) -> tuple[TokenValues, Parameters]:
        """(log-probs, gradient) of all groups in one row."""
        batch = packed(self.groups, range(len(self.groups)))
        return learn(self.trainer, self.parameters, batch, self.token_weights)

    @cached_property
    def sampled(self) -> tuple[list[SampleRequest], dict[tuple[int, int], Completion]]:
        """Requests, greedy ones first, then at random; and completions by (row, index)."""
        model = Model(self.architecture, roles().sampler)
        engine = Engine(
            model,
            slots=16,
            group_size=4,
            max_prompt_tokens=max(PROMPT_LENGTHS),
            max_completion_tokens=NUM_TOKENS,
            eos_ids=(),
        )
        engine.load(0, publish_to(model, self.parameters))
        at_random = SamplingParams(max_tokens=NUM_TOKENS)
        requests = []
        for params in (at_random.as_greedy(), at_random):
            for length in PROMPT_LENGTHS:
                row = len(requests)
                ids = prompt(row, length, self.architecture.vocab_size)
                requests.append(replace(asked(row, length, params=params), prompt_ids=ids))
        return requests, play(engine, requests)

    @cached_property
    def greedy(self) -> list[Group]:
        requests, completions = self.sampled
        return played_groups(requests[: len(PROMPT_LENGTHS)], completions)

    @cached_property
    def random(self) -> list[Group]:
        requests, completions = self.sampled
        return played_groups(requests[len(PROMPT_LENGTHS) :], completions)


def completions_of(groups: list[Group]) -> Iterator[tuple[tuple[int, int], Completion]]:
    """((group, completion), the completion) of groups."""
    for number, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            yield (number, index), completion


def whole_sequences(groups: list[Group]) -> Iterator[tuple[tuple[int, int], np.ndarray, int]]:
    """((group, completion), tokens of both, where the completion starts)."""
    for (number, index), completion in completions_of(groups):
        prompt_ids = groups[number].prompt_ids
        tokens = np.concatenate([prompt_ids, completion.token_ids])
        yield (number, index), tokens, len(prompt_ids)


# ---- Shoal's values


def packed(groups: list[Group], include: Iterable[int], rows: int = 1) -> MicroBatch:
    """The groups numbered in `include` in rows that have room for all of them."""
    zeros = np.zeros((len(groups), groups[0].size))
    (batch,) = pack(
        groups, include, TokenTerms(zeros, zeros), BatchLayout([whole(groups, rows)], 1.0)
    )
    return batch


def _loss(
    model: Model, parameters: Parameters, batch: Any, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logprobs, _ = batch_logprobs(model, parameters, batch)
    return (weights * logprobs).sum(), logprobs


_loss_and_gradient = jax.jit(jax.value_and_grad(_loss, argnums=1, has_aux=True), static_argnums=0)
_logprobs = jax.jit(batch_logprobs, static_argnums=0)


def learn(
    model: Model, parameters: Parameters, batch: MicroBatch, token_weights: TokenValues
) -> tuple[TokenValues, Parameters]:
    """(log-probs, gradient of their weighted sum) of a batch."""
    weights = np.zeros(batch.arrays.tokens.shape, np.float32)
    for (group, completion, _), place in batch.positions.items():
        weights[place] = token_weights[group, completion]
    (_, logprobs), gradient = _loss_and_gradient(model, parameters, batch.arrays, weights)
    return unpack([batch], [np.asarray(logprobs)]), gradient


def score(model: Model, parameters: Parameters, groups: list[Group]) -> TokenValues:
    """The trainer's log-probs of all groups in one row."""
    batch = packed(groups, range(len(groups)))
    logprobs, _ = _logprobs(model, parameters, batch.arrays)
    return unpack([batch], [np.asarray(logprobs)])


# ---- transformers' values


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32[T, V] of tokens[T]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].float().numpy()


def their_logprobs(model: Any, groups: list[Group]) -> TokenValues:
    """From a pass over each sequence alone."""
    values = {}
    for key, tokens, start in whole_sequences(groups):
        values[key] = logprobs_of(their_logits(model, tokens), tokens, start)
    return values


def logprobs_of(logits: np.ndarray, tokens: np.ndarray, start: int) -> np.ndarray:
    """float64 log-probs of the tokens from `start` on, by logits[T, V] of all tokens."""
    before = logits[start - 1 : len(tokens) - 1].astype(np.float64)
    before -= before.max(axis=1, keepdims=True)
    chosen = before[np.arange(len(before)), tokens[start:]]
    return chosen - np.log(np.exp(before).sum(axis=1))


def write_their_gradient(loaded: Loaded, folder: Path) -> None:
    """Writes the gradient of the weighted sum of log-probs as a model's folder: transformers gives
    it the names and the layout of files. What has no gradient, as a tower, is 0."""
    import torch

    theirs = loaded.theirs
    theirs.zero_grad()
    for key, tokens, start in whole_sequences(loaded.groups):
        logits = theirs(torch.tensor(tokens)[None]).logits[0, start - 1 : -1]
        chosen = torch.tensor(tokens[start:], dtype=torch.int64)[:, None]
        logprobs = torch.log_softmax(logits, dim=1).gather(1, chosen)[:, 0]
        (torch.from_numpy(loaded.token_weights[key]) * logprobs).sum().backward()
    written = copy.deepcopy(theirs)
    if "quantization_config" in CHECKPOINTS[loaded.name].config:
        # widened weights would be written under the names of packed ones
        written._weight_conversions = []
    with torch.no_grad():
        for name, buffer in written.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.zero_()
        pairs = zip(written.parameters(), theirs.parameters(), strict=True)
        for target, parameter in pairs:
            target.zero_()
            if parameter.grad is not None:
                target.copy_(parameter.grad)
    written.save_pretrained(folder)


# ---- files


def file_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, torch tensor) of all tensors in a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                yield name, opened.get_tensor(name)


def text_tensors(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The tensors of a text model by names without a prefix, with all experts in one tensor."""
    read = {}
    for tensor_name, tensor in with_fused_experts(dict(file_tensors(folder))).items():
        if any(part in tensor_name for part in CHECKPOINTS[name].unused):
            continue
        plain = re.sub(r"^(model\.language_model|language_model\.model|model)\.", "", tensor_name)
        read[plain] = tensor.float().numpy()
    return read


def bits_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(type, shape, bytes) of each tensor in a folder."""
    import torch

    bits = {}
    for name, tensor in file_tensors(folder):
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        bits[name] = str(tensor.dtype), tuple(tensor.shape), content
    return bits


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of what one has and the other has not, or has differently."""
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if ours.get(name) != theirs.get(name)]


# ---- comparisons


def largest_difference(ours: TokenValues, theirs: TokenValues) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


def mean_difference(ours: TokenValues, theirs: TokenValues) -> float:
    assert ours.keys() == theirs.keys()
    differences = [np.abs(ours[key] - theirs[key]) for key in ours]
    return float(np.concatenate(differences).mean())


def tree_difference(ours: Parameters, theirs: Parameters) -> float:
    """|a - b| / |b| of two trees, by norm."""

    def flat(tree: Parameters) -> np.ndarray:
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves)

    return relative(flat(ours), flat(theirs))


# ---- the tests


@pytest.fixture(scope="module")
def torch(transformers: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torch")
    transformers.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="module", params=SUPPORTED)
def loaded(
    request: pytest.FixtureRequest, torch: Any, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """Each checkpoint once for all tests."""
    name: str = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp("family") / name, name)
    a = architecture_of(folder)
    parameters = huggingface.load(folder, a, roles().trainer)
    return Loaded(name, folder, load_theirs(folder, name), a, parameters)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_of_a_checkpoint_and_its_window_reach_the_logits(torch, tmp_path, name):
    """Of transformers alone: what the other tests could not see is found here."""
    folder = write_checkpoint(tmp_path / name, name)
    theirs = load_theirs(folder, name)
    tokens = np.random.default_rng(0).integers(1, theirs.get_input_embeddings().num_embeddings, 90)
    logits = theirs(torch.tensor(tokens)[None]).logits[0]
    assert logits.std() >= 1
    torch.log_softmax(logits[:-1], 1)[torch.arange(89), tokens[1:]].sum().backward()
    unreached = []
    for parameter_name, parameter in theirs.named_parameters():
        is_unused = any(part in parameter_name for part in CHECKPOINTS[name].unused)
        has_gradient = parameter.grad is not None and parameter.grad.abs().max() > 1e-4
        if not is_unused and not has_gradient:
            unreached.append(parameter_name)
    assert unreached == []
    window = CHECKPOINTS[name].window
    if window:
        unlimited = their_logits(load_theirs(folder, name, sliding_window=1000), tokens)
        gaps = np.abs(unlimited - logits.detach().numpy()).max(axis=1)
        # A query reads as many keys as the window has, itself included.
        assert gaps[:window].max() < LOGITS < gaps[window:].min()
    if name != "gpt_oss-mxfp4":
        saved = their_logits(load_theirs(folder / "saved", name), tokens)
        assert np.abs(saved - logits.detach().numpy()).max() < LOGPROBS


def test_logits(loaded):
    tokens = np.random.default_rng(0).integers(0, loaded.architecture.vocab_size, 150)
    ours = shoal_logits(loaded.architecture, loaded.parameters, tokens)
    assert np.abs(ours - their_logits(loaded.theirs, tokens)).max() < LOGITS


def test_files_that_transformers_saved_are_the_same_model(loaded):
    """They differ from published ones in names, experts and entries of config.json."""
    if "quantization_config" in CHECKPOINTS[loaded.name].config:
        pytest.skip("its packed numbers are not those of the saved file")
    saved = loaded.folder / "saved"
    a = architecture_of(saved)
    assert a == loaded.architecture
    parameters = huggingface.load(saved, a, roles().trainer)
    equal = jax.tree.map(np.array_equal, parameters, loaded.parameters)
    assert all(jax.tree.leaves(equal))


def test_greedy_tokens_are_theirs(loaded):
    for _, tokens, start in whole_sequences(loaded.greedy):
        assert len(tokens) - start == NUM_TOKENS
        before = their_logits(loaded.theirs, tokens)[start - 1 : -1]
        chosen = before[np.arange(NUM_TOKENS), tokens[start:]]
        # Logits that differ by less than the tolerance may change places.
        assert (chosen > before.max(axis=1) - LOGITS).all()


def test_decoding_with_caches_gives_the_log_probs_of_full_passes(loaded):
    longest = max(PROMPT_LENGTHS) + NUM_TOKENS
    for (group, index), tokens, start in whole_sequences(loaded.random):
        if index > 0:
            continue  # its siblings have the same caches; the trainer is asked about all
        padded = np.zeros(longest, np.int32)
        padded[: len(tokens)] = tokens
        logits = shoal_logits(loaded.architecture, loaded.parameters, padded)
        sampled = loaded.random[group].completions[index].logprobs
        expected = logprobs_of(logits[: len(tokens)], tokens, start)
        assert len(sampled) == NUM_TOKENS
        assert np.abs(sampled - expected).max() < LOGPROBS


def test_log_probs_of_sampler_and_trainer_agree(loaded):
    trained = score(loaded.trainer, loaded.parameters, loaded.random)
    sampled = {key: completion.logprobs for key, completion in completions_of(loaded.random)}
    assert len(sampled) == 4 * len(PROMPT_LENGTHS)
    assert largest_difference(trained, sampled) < LOGPROBS


def test_log_probs_in_a_packed_row_are_those_of_single_sequences(loaded):
    logprobs, _ = loaded.learnt
    assert largest_difference(logprobs, their_logprobs(loaded.theirs, loaded.groups)) < LOGITS


def test_the_gradient_is_that_of_autograd(loaded, tmp_path):
    _, gradient = loaded.learnt
    huggingface.save(tmp_path / "ours", gradient, loaded.architecture, loaded.folder)
    write_their_gradient(loaded, tmp_path / "theirs")
    ours = text_tensors(tmp_path / "ours", loaded.name)
    theirs = text_tensors(tmp_path / "theirs", loaded.name)
    assert ours.keys() >= theirs.keys()
    compared = [name for name in theirs if not name.endswith("layer_scalar")]
    for name in compared:
        assert relative(ours[name], theirs[name]) < 10 * GRADIENT, name
    all_of_ours = np.concatenate([ours[name].ravel() for name in compared])
    all_of_theirs = np.concatenate([theirs[name].ravel() for name in compared])
    assert relative(all_of_ours, all_of_theirs) < GRADIENT


def test_a_completion_does_not_depend_on_its_neighbours_in_the_row(loaded):
    """Its log-probs and its gradient, alone with its prompt and among all others."""
    key = (1, 1)
    weights = {other: values * 0 for other, values in loaded.token_weights.items()}
    weights[key] = loaded.token_weights[key]
    model, parameters = loaded.trainer, loaded.parameters
    among_others = packed(loaded.groups, range(len(loaded.groups)))
    logprobs, gradient = learn(model, parameters, among_others, weights)
    group = loaded.groups[key[0]]
    group.valid[1 - key[1]] = False
    try:
        alone = packed(loaded.groups, [key[0]])
    finally:
        group.valid[:] = True
    assert alone.arrays.tokens.shape == among_others.arrays.tokens.shape
    alone_logprobs, alone_gradient = learn(model, parameters, alone, weights)
    assert alone_logprobs.keys() == {key}
    assert np.abs(alone_logprobs[key] - logprobs[key]).max() < LOGPROBS
    assert tree_difference(gradient, alone_gradient) < GRADIENT


def test_an_export_of_what_was_not_trained_is_byte_equal(loaded, tmp_path):
    """Towers, draft heads and what no layer reads included; transformers loads it."""
    exported = tmp_path / "exported"
    huggingface.save(exported, loaded.parameters, loaded.architecture, loaded.folder)
    assert differing(bits_of(exported), bits_of(loaded.folder)) == []
    tokens = np.random.default_rng(1).integers(0, loaded.architecture.vocab_size, 40)
    theirs = their_logits(load_theirs(exported, loaded.name), tokens)
    assert np.abs(theirs - their_logits(loaded.theirs, tokens)).max() < LOGPROBS


def test_bfloat16_is_as_near_to_float32_as_theirs(loaded, tmp_path):
    """Files in bfloat16, some of whose tensors are float32; computed in bfloat16 by both."""
    name = loaded.name
    folder = write_checkpoint(tmp_path / "half", name, dtype="bfloat16")
    a = architecture_of(folder)
    parameters = huggingface.load(folder, a, roles().trainer)
    groups = loaded.groups
    exact = their_logprobs(load_theirs(folder, name), groups)
    theirs = mean_difference(their_logprobs(load_theirs(folder, name, "bfloat16"), groups), exact)
    model = Model(a, roles().trainer, jax.numpy.bfloat16)
    ours = mean_difference(score(model, parameters, groups), exact)
    assert 1e-3 < ours < 1.5 * theirs  # no float32 computation in disguise either
    exported = tmp_path / "exported"
    huggingface.save(exported, parameters, a, folder, dtype="bfloat16")
    assert differing(bits_of(exported), bits_of(folder)) == []


def test_eight_devices_give_what_one_gives(loaded):
    batch = packed(loaded.groups, range(len(loaded.groups)), rows=4)
    expected = learn(loaded.trainer, loaded.parameters, batch, loaded.token_weights)
    role = roles(data=2, fsdp=2, tensor=2).trainer
    parameters = huggingface.load(loaded.folder, loaded.architecture, role)
    model = Model(loaded.architecture, role)
    logprobs, gradient = learn(model, parameters, batch, loaded.token_weights)
    assert largest_difference(logprobs, expected[0]) < LOGPROBS
    assert tree_difference(gradient, expected[1]) < GRADIENT

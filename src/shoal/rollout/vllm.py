"""vLLM behind HTTP: a server that gets prompts as token ids, and reads each version of the weights
from a folder.

    POST /inference/v1/generate: a completion
    pause, reload_weights, update_weight_version, resume; or load_lora_adapter
    on a shared GPU sleep and wake_up

vLLM is never imported. Its calls (0.32) are in:
`entrypoints/scale_out/token_in_token_out/protocol.py`, `entrypoints/rl/online/api_router.py`,
`entrypoints/serve/lora`, `entrypoints/serve/dev/sleep`. Any fault of a server becomes a `HostLost`
that says what is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.records import HostLost, HostRefused, SamplingParams, ShoalError, StopReason
from shoal.rollout.http_engine import (
    CALL_SECONDS,
    AddedTokens,
    CompletionCall,
    HttpEngine,
    Server,
    Settings,
    TurnedDown,
    reading,
)
from shoal.text import exact
from shoal.weights.folder_store import FolderVersion

LOAD_SECONDS = 600.0
"""Longest time that reading weights may take."""
GENERATE, COMPLETE, ADAPTER = "/inference/v1/generate", "/v1/completions", "/v1/load_lora_adapter"
RELOAD = "/collective_rpc"
COUNTERS = re.compile(
    r"^vllm:(?:prompt_tokens|generation_tokens|iteration_tokens)_total(?:_count)?\{\S* (\S+)", re.M
)


def api_key() -> str:
    """Returns the secret of vLLM's servers, from the variable that `vllm serve` reads, too; "" if
    there is none."""
    return os.environ.get("VLLM_API_KEY", "")


def server_at(url: str) -> Server:
    """Returns a server that runs already."""
    return Server(url, api_key=api_key())


def takes_adapters(server: Server) -> bool:
    """True if the server has the call that loads adapters, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    enables. Makes the call without arguments, so that nothing is loaded. False for status 404 or
    405; any other answer means True. HostLost if the server does not answer."""
    try:
        server.call(ADAPTER, {})
    except TurnedDown as error:
        return error.status not in (404, 405)
    return True


class VllmEngine(HttpEngine):
    """The engine of an `EngineHost` whose completions a vLLM server samples."""

    def __init__(
        self,
        open_server: Callable[[FolderVersion], Server],
        settings: Settings,
        wake: Callable[[], None],
    ) -> None:
        """Makes the engine; `begin_opening` opens the server. `open_server`: called once, in a
        thread of its own, with the first version; reaches or starts the server and returns it.
        `settings`: those of the run's servers. `wake`: called from any thread when an answer has
        arrived, so that `step` is called."""
        super().__init__(open_server, settings, wake)
        self._path = GENERATE
        self._model_name = ""  # name that requests use: that of the model, or of the newest adapter
        # names of the adapters that the server has -> their versions
        self._adapters: dict[str, int] = {}
        # checksums of the server, and its log-probs of the probe, after the last load
        self._loaded_facts: tuple[Any, list[float]] = (None, [])

    # -- completions

    def completion_call(self, id: int, number: int) -> CompletionCall:
        """Returns the call for the rest of the current turn of completion `number` of request `id`,
        from its prompt and the tokens so far. KeyError if there is no such request."""
        active = self.requests[id]
        request = active.request
        partial = active.partials[number]
        # Each completion has its own seed, because the engines of a data-parallel server would use
        # the same; after a pause the rest has another.
        noise_key = request.noise_key.key(request.first + number)
        seed_bytes = noise_key.tobytes() + len(partial.tokens).to_bytes(8)
        digest = hashlib.blake2b(seed_bytes, digest_size=8).digest()
        max_tokens = partial.turn_end - len(partial.tokens)
        body = self._request_body(
            request.prompt_ids.tolist() + partial.tokens,
            str(self.version),
            {
                "max_tokens": max_tokens,
                **_distribution(request.params),
                "stop": list(request.params.stop),
                "stop_token_ids": list(self.settings.eos_ids),
                # 0: of the sampled token, and of no others
                "logprobs": 0,
                # 63 bits: a seed is a signed number of 64 bits
                "seed": int.from_bytes(digest) >> 1,
                "skip_special_tokens": False,
            },
        )
        return CompletionCall(self._path, body, max_tokens)

    def _request_body(self, ids: list[int], salt: str, params: dict[str, Any]) -> dict[str, Any]:
        """Returns the body of a request for one completion after the token ids `ids`, in the form
        of the call that the server has. `salt`: the server reuses cached keys of prompts only among
        requests with the same salt. `params`: sampling parameters by vLLM's names."""
        if self._path == GENERATE:
            return {
                "model": self._model_name,
                "token_ids": ids,
                "cache_salt": salt,
                "sampling_params": params,
            }
        return {
            "model": self._model_name,
            "prompt": ids,
            "return_token_ids": True,
            "cache_salt": salt,
            **params,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def read_completion(self, call: CompletionCall, reply: Any, version: int) -> AddedTokens:
        """Returns the tokens that an answer to `call` adds, after checking their number, log-probs
        and reason to stop. `version`: of the tokens whose version the answer does not say.
        LookupError, TypeError or ValueError if the answer cannot be right, ShoalError if it lacks
        the ids that truncation kept, or has too many."""
        (choice,) = reply["choices"]
        ids, logprobs = read_tokens(choice)
        reason = read_reason(choice, ids, self.settings.eos_ids)
        versions: list[int] = []
        # with adapters, the server's spans only name the version of the base model
        if not self._adapters:
            versions = read_versions(choice, len(ids))
        if not versions:
            versions = [version] * len(ids)
        support_ids = read_support(choice, len(ids), self.settings.max_support)
        check_length(choice, len(ids), call.max_tokens)
        return AddedTokens(ids, logprobs, versions, support_ids, reason)

    # -- the server

    def prepare(self, server: Server) -> None:
        """Checks that the server takes prompts of the needed length and has the needed calls, drops
        requests that a lost host left there, and chooses the call for completions (GENERATE, or
        COMPLETE for older versions). ShoalError that says how to start the server if something is
        missing; HostLost for any other fault."""
        models = server.ask("/v1/models")
        longest = self.settings.longest
        with reading("/v1/models", models):
            model = models["data"][0]
            self._model_name = model["id"]
            # a server that does not say its limit counts as long enough
            max_model_length = int(model.get("max_model_len") or longest)
        if max_model_length < longest:
            raise ShoalError(
                f"the server at {server.url} takes {max_model_length} tokens, and a prompt with "
                f"its completion may have {longest}: start it with --max-model-len={longest}"
            )
        try:
            # called for its error alone: a server without it lacks the calls that replace weights
            server.call("/is_paused")
            with contextlib.suppress(TurnedDown):
                # A host that was lost may have left the server paused, with requests.
                server.call("/resume", {})
                server.call("/abort_requests", {})
            join = self._request_body(list(self.settings.probe), "join", {"max_tokens": 1})
            # one token after the probe, for the error alone
            server.call(GENERATE, join)
        except TurnedDown as error:
            if error.status not in (403, 404, 405):
                raise
            if error.path != GENERATE or error.status == 403:
                raise ShoalError(
                    f"the server at {server.url} lacks what a sampler needs ({error}): start it "
                    "with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out"
                ) from error
            self._path = COMPLETE  # older versions have this call instead

    def read_counter_sum(self, server: Server) -> float:
        """Returns the sum of the server's counters of tokens, from /metrics; 0 if it has none or no
        such page; HostLost if it does not answer."""
        try:
            return read_counters(server.call("/metrics"))
        except TurnedDown:
            return 0.0

    def release_memory(self) -> None:
        """Makes the server sleep, if `settings.sleeps`; does nothing if it sleeps already or is not
        opened. The server keeps its weights in host memory only if versions differ in an adapter
        alone. HostLost if the call fails."""
        if self.settings.sleeps and self.server and not self.is_asleep:
            # 1 moves the weights to host memory; 2 drops them, because the next load brings others
            level = 1 if self._adapters else 2
            self.server.call(f"/sleep?level={level}", {})
            self.is_asleep = True

    def load(self, version: int, weights: FolderVersion) -> None:
        """Makes the server read a version of the weights, waking it first if it sleeps, and checks
        the result (`_check`). Waits for all of it, and at first until the server can be used.
        LookupError if the version does not exist any more, HostLost if loading failed, HostRefused
        if the server kept the weights before or does not show which it has, ShoalError if it takes
        no adapters."""
        server = self.begin_opening(weights).result()
        try:
            if self.is_asleep:
                server.call("/wake_up?tags=weights", {}, LOAD_SECONDS)
            if weights.base is None:
                self._reload(server, weights)
            else:
                self._load_adapter(server, weights)
            if self.is_asleep:
                server.call("/wake_up?tags=kv_cache", {})
            self.is_asleep = False
            # completions that are sampled during the check are not read before it has ended
            self._check(server, weights)
        except TurnedDown as error:
            if not weights.exists:
                raise LookupError(f"version {version} is no longer published") from error
            hint = ""
            if error.path in (RELOAD, ADAPTER):
                hint = (
                    f" (its files are in {weights.folder}: the server must see the folder "
                    "publish.folder under the same path)"
                )
            raise HostLost(f"version {version} could not be loaded: {error}{hint}") from error
        self.version, self.parameters = version, weights

    def _reload(self, server: Server, weights: FolderVersion) -> None:
        """Makes the server read a whole model. Unfinished completions wait and continue with the
        new weights. An older server does not say which tokens are of which version, so it returns
        its completions unfinished, and the rest is requested afterwards."""
        has_completions = self.under_way.total() > 0
        if has_completions and self._path == GENERATE:
            server.call("/pause?mode=keep", {})
        elif has_completions:
            self._take_back(server)
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        server.call(RELOAD, arguments, LOAD_SECONDS)
        server.call("/update_weight_version", {"new_version": str(weights.version)})
        # The keys of unfinished completions are computed again, so that their next tokens are of
        # the new version alone.
        resets = "true" if has_completions else "false"
        server.call(f"/reset_prefix_cache?reset_running_requests={resets}", {})
        if has_completions:
            server.call("/resume", {})

    def _load_adapter(self, server: Server, weights: FolderVersion) -> None:
        """Makes the server read an adapter, under a new name that later requests use. Unfinished
        completions continue with the adapter that they began with; adapters that no completion uses
        are unloaded first. TurnedDown (a HostLost) if a call fails otherwise. ShoalError if the
        server does not take adapters."""
        for name, version in list(self._adapters.items()):
            if not self.under_way[version]:
                server.call("/v1/unload_lora_adapter", {"lora_name": name})
                del self._adapters[name]
        # if a name were used twice, the server might use older keys and weights
        self._model_name = f"{weights.folder.name}-{secrets.token_hex(4)}"
        arguments = {"lora_name": self._model_name, "lora_path": str(weights.folder)}
        try:
            server.call(ADAPTER, arguments, LOAD_SECONDS)
        except TurnedDown as error:
            # `load` turns it into a LookupError or HostLost
            if "LoRA" not in str(error) or not weights.exists:
                raise
            raise ShoalError(
                f"the server at {server.url} does not take the adapter ({error}): start it with "
                "--enable-lora, --max-lora-rank of at least model.lora.rank, and --max-loras of at "
                "least train.max_staleness + 2; or without VLLM_ALLOW_RUNTIME_LORA_UPDATING, for "
                "whole models"
            ) from error
        self._adapters[self._model_name] = weights.version

    def _take_back(self, server: Server) -> None:
        """Makes the server return all unfinished completions with the tokens so far, and waits for
        them. HostLost if it does not within CALL_SECONDS. The server may be paused afterwards;
        `_reload` resumes it. Unfinished completions are queued for the rest."""
        deadline = time.monotonic() + CALL_SECONDS
        self.is_taking_back = True
        while self.under_way.total():
            server.call("/pause?mode=abort", {})
            self.wait_for_answers()
            # a request that arrived after the pause waits until the pause ends
            if self.under_way.total():
                server.call("/resume", {})
            if time.monotonic() > deadline:
                raise HostLost(
                    f"after pause?mode=abort it has not answered {self.under_way.total()} requests"
                )
        self.is_taking_back = False

    def _check(self, server: Server, weights: FolderVersion) -> None:
        """Checks the weights that the server has loaded. HostRefused if they are still the last
        ones although the trainer's changed, or nothing shows which they are. HostLost if the
        server's log-probs of the probe, or of tokens that it samples after its beginnings, differ
        from the trainer's by more than the tolerance."""
        checksums = None
        with contextlib.suppress(TurnedDown):
            reply = server.ask("/weight_checker", {"action": "checksum"})
            with reading("/weight_checker", reply):
                checksums = reply["checksums"]
        probe_logprobs = self._score_probe(server, weights)
        if not probe_logprobs and checksums is None:
            raise HostRefused(
                "it has no /weight_checker and no prompt_logprobs: nothing shows which weights it "
                "has"
            )
        facts_before = self._loaded_facts
        self._loaded_facts = (checksums, probe_logprobs)
        # vLLM on CPU frees the matrices that it packs, and its checksum lacks these: the weights
        # count as unchanged only if both facts are.
        is_unchanged = facts_before == self._loaded_facts
        if is_unchanged and self.parameters and self._must_differ(self.parameters, weights):
            call_name = "reload_weights" if weights.base is None else "load_lora_adapter"
            raise HostRefused(
                f"it answered {call_name} with 200 and still has the weights of version "
                f"{self.version}, not {weights.version}: it takes no weights over HTTP"
            )
        if probe_logprobs:
            gap = np.abs(np.array(probe_logprobs) - weights.probe.logprobs).max()
            self._check_gap(
                gap, weights, "its log-probs differ", "other weights, another model or another type"
            )
        self._check_sampling(server, weights)

    def _must_differ(self, last: FolderVersion, weights: FolderVersion) -> bool:
        """True if the server's checksums or log-probs of the probe must change when it loads
        `weights` in place of `last`. False if the trainer's checksums of both are equal, and for
        adapters if the trainer's log-probs of the probe under both differ by no more than a tenth
        of the tolerance."""
        if last.checksum == weights.checksum:
            return False
        if weights.base is None:
            return True
        # No checksum covers an adapter, and a small change of an adapter is less than the rounding
        # of the probe.
        change = np.abs(weights.probe.logprobs - last.probe.logprobs).max()
        return bool(change > self.settings.tolerance / 10)

    def _score_probe(self, server: Server, weights: FolderVersion) -> list[float]:
        """Returns the server's log-probs of the probe's tokens after the first; [] if it has no
        `prompt_logprobs`. They are at temperature 1. HostLost if the answer cannot be right."""
        ids = list(self.settings.probe)
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = self._request_body(ids, f"probe {weights.version}", params)
        reply = server.ask(self._path, body)
        logprobs: list[float] = []
        with reading(self._path, reply):
            # at the top of an answer to GENERATE, in the choice of one to COMPLETE
            scored = reply.get("prompt_logprobs")
            if not scored:
                scored = reply["choices"][0].get("prompt_logprobs") or []
            for id, candidates in zip(ids, scored, strict=False):
                if candidates:  # the first token of a prompt has none
                    logprobs.append(float(candidates[str(id)]["logprob"]))
            if logprobs and len(logprobs) != len(weights.probe.logprobs):
                raise ValueError(
                    f"prompt_logprobs of {len(logprobs)} tokens in place of "
                    f"{len(weights.probe.logprobs)}"
                )
        return logprobs

    def _check_sampling(self, server: Server, weights: FolderVersion) -> None:
        """Makes the server sample one token after each beginning of the probe, in the way that the
        run's tokens are sampled, and compares its log-prob with the trainer's. HostLost if they
        differ by more than the tolerance, or the answer is not one token. Checks nothing if there
        are no beginnings.

        The log-probs of given tokens can be right while those of sampled ones are wrong: taken
        before temperature and truncation, or for other tokens than those that are returned."""
        settings = self.settings
        params = {
            "max_tokens": 1,
            **_distribution(settings.params),
            "logprobs": 0,
            "skip_special_tokens": False,
        }
        for length, expected in zip(settings.beginnings, weights.probe.next_token, strict=True):
            beginning = list(settings.probe[:length])
            body = self._request_body(beginning, f"probe {weights.version}", params)
            reply = server.ask(self._path, body)
            with reading(self._path, reply):
                (choice,) = reply["choices"]
                ids, logprobs = read_tokens(choice)
                if len(ids) != 1 or not 0 <= ids[0] < len(expected):
                    raise ValueError(f"tokens {ids[:5]}: expected one, below {len(expected)}")
            gap = abs(logprobs[0] - float(expected[ids[0]]))
            self._check_gap(
                gap,
                weights,
                "the log-probs of tokens that it samples differ",
                "start it with --logprobs-mode=processed_logprobs and --generation-config=vllm",
            )

    def _check_gap(self, gap: float, weights: FolderVersion, what: str, cause: str) -> None:
        """Raises HostLost if a difference of log-probs exceeds the tolerance. `gap`: the largest
        difference. `what` ("its log-probs differ") and `cause` (what to look for, or to do) are the
        beginning and the end of the message."""
        tolerance = self.settings.tolerance
        if not gap <= tolerance:  # written so that NaN counts as a gap
            raise HostLost(
                f"{what} from the trainer's by up to {gap:.3g} at version {weights.version}, more "
                f"than vllm.tolerance={exact(tolerance)}: {cause}"
            )


def _distribution(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a request that set the distribution from which tokens are sampled:
    temperature, top_k, top_p and min_p."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }


def read_counters(text: Any) -> float:
    """Returns the sum of a server's counters of tokens. `text`: the answer of /metrics; 0 if it has
    none, for example a proxy's page or JSON."""
    if not isinstance(text, str):
        return 0.0
    try:
        return sum(float(value) for value in COUNTERS.findall(text))
    except ValueError:
        return 0.0


def read_tokens(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Returns (token ids, log-probs) of a choice, in any of vLLM's forms: log-probs as a list
    `token_logprobs`, or as `content` with an object for each token, which names the token by its id
    ("token_id": 7, or "token": "token_id:7"). ValueError if ids and log-probs do not match, or a
    number is out of range; KeyError if one is missing."""
    ids = [int(id) for id in choice["token_ids"]]
    stored = choice.get("logprobs") or {"content": []}
    entries = stored.get("content") or ()
    if "content" in stored:
        logprobs = [entry["logprob"] for entry in entries]
    else:
        logprobs = stored["token_logprobs"]
    named_ids: list[int] = []
    for entry in entries:
        if "token_id" in entry:
            named_ids.append(int(entry["token_id"]))
        else:
            named_ids.append(int(entry["token"].removeprefix("token_id:")))
    if len(logprobs) != len(ids) or (entries and named_ids != ids):
        raise ValueError(f"{len(logprobs)} log-probs that are not those of its {len(ids)} tokens")
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("a token id below 0 or beyond 2^31")
    if min(logprobs, default=0) <= -9999:
        raise ValueError("a log-prob of -9999, which stands for none")
    return ids, logprobs


def read_versions(choice: Mapping[str, Any], count: int) -> list[int]:
    """Returns the version of each token, from the spans in a choice, like {"version": "3", "start":
    0, "end": 8}; [] if there are no spans. ValueError if they do not cover `count` tokens one after
    the other, or a version is not a number from 0 and below 2^31."""
    spans = choice.get("weight_versions") or ()
    versions: list[int] = []
    for span in spans:
        # the limit protects from a wrong end, which may be any number
        length = min(span["end"] - span["start"], count + 1)
        version = int(span["version"])
        if span["start"] == len(versions):
            versions += [version] * length
    if spans and len(versions) != count:
        raise ValueError(f"weight_versions that do not cover {count} tokens")
    if versions and not 0 <= min(versions) <= max(versions) < 2**31:
        raise ValueError(f"weight_versions {versions[:5]}, which are not the run's")
    return versions


def read_reason(
    choice: Mapping[str, Any], ids: Sequence[int], eos_ids: Sequence[int]
) -> StopReason | None:
    """Returns why a completion ended; None if the server returned it unfinished (`finish_reason`
    "abort"). `ids`: its tokens in this answer. ValueError if it ended at a token that is not an end
    token, or has tokens after one; LookupError for an unknown `finish_reason`, or an end without a
    token."""
    for position, id in enumerate(ids[:-1]):
        if id in eos_ids:
            raise ValueError(
                f"the end token {id} at position {position} of {len(ids)}, and tokens after it"
            )
    if choice["finish_reason"] != "stop":
        # KeyError for any other reason
        return {"length": StopReason.LENGTH, "abort": None}[choice["finish_reason"]]
    if isinstance(choice.get("stop_reason"), str):
        # the stop string; an end token would be a number, or None
        return StopReason.STOP
    if ids[-1] not in eos_ids:
        raise ValueError(f"an end at token {ids[-1]}, which is none of {list(eos_ids)}")
    return StopReason.EOS


def check_length(choice: Mapping[str, Any], count: int, max_tokens: int) -> None:
    """Raises ValueError if a completion has more tokens than were requested (`count` in this
    answer, of `max_tokens`), or fewer although it ended by length: then the server has another
    limit."""
    is_cut = choice["finish_reason"] == "length" and count < max_tokens
    if is_cut or count > max_tokens:
        raise ValueError(
            f"finish_reason {choice['finish_reason']} at {count} tokens, and max_tokens was "
            f"{max_tokens}: has the server another limit, as by --max-model-len?"
        )


def read_support(choice: Mapping[str, Any], count: int, max_support: int) -> list[np.ndarray]:
    """Returns the ids that each token was sampled from, int32[max_support], padded with -1; [] if
    `max_support` is 0. `count`: the number of tokens. ShoalError if the server does not return
    them, or returns too many."""
    if not max_support:
        return []
    kept_by_token = choice.get("sampling_mask") or ()
    if len(kept_by_token) != count:
        raise ShoalError(
            "the server does not return what top_k, top_p and min_p kept: start it with "
            "--return-sampling-mask, or set algorithm.match_sampling_support=false"
        )
    largest = max((len(kept) for kept in kept_by_token), default=0)
    if largest > max_support:
        raise ShoalError(
            f"sampling.max_support={max_support}: the server sampled from {largest} tokens; raise "
            "it"
        )
    support_ids: list[np.ndarray] = []
    for kept in kept_by_token:
        padding = [-1] * (max_support - len(kept))
        support_ids.append(np.array(list(kept) + padding, np.int32))
    return support_ids

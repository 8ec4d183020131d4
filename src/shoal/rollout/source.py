"""The `RolloutSource` on the trainer's own devices: pending requests, published versions, groups in the order asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shoal.model.transformer import Model
from shoal.rollout.dealt import DealtPlayer
from shoal.rollout.player import Player
from shoal.rollout.publication import publish_to, published_shapes
from shoal.types import Group, GroupRequest, Params, Purpose, RolloutStats, ShoalError


@dataclass
class LocalSource:
    """Samples the groups of a step when that step takes them.

    Requests are only queued until then: which groups a step learns from is fixed by what it requested, not by what
    finishes first, so a restarted run samples the same tokens again.
    """

    model: Model
    player: Player | DealtPlayer
    pending: list[GroupRequest] = field(default_factory=list)
    versions: dict[int, Params] = field(default_factory=dict)
    keep_from: int = 0  # the oldest version that may yet be requested
    last: tuple[int, Any] | None = None  # the newest publication: its version, and an array of what was given
    unchanged: int = 0

    def request(self, requests: Sequence[GroupRequest]) -> None:
        self.pending.extend(requests)

    def cancel(self, purpose: Purpose, step: int) -> None:
        self.pending = [request for request in self.pending if (request.purpose, request.step) != (purpose, step)]

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        self.keep_from = version if keep_from is None else keep_from
        self._release()  # before the new version: on a device that is nearly full both may not fit
        self.versions[version] = publish_to(self.model, params)  # compares by checksum what it copies
        given = min(jax.tree.leaves(params), key=lambda leaf: leaf.nbytes)
        # An update makes new arrays, so those of the last version are its old weights.
        self.unchanged += self.last is not None and self.last[0] != version and self.last[1] is given
        self.last = version, given

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        wanted = [request for request in self.pending if request.purpose == purpose and request.step == step]
        if not wanted:
            raise ValueError(f"{purpose} at step {step} has requested no groups")
        batches: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for number, request in enumerate(wanted):
            batches[request.version, request.subset, request.num_completions].append(number)
        groups: dict[int, Group] = {}
        # Oldest version first: its weights can be dropped soonest. A batch samples from one version.
        for (version, _, _), numbers in sorted(batches.items(), key=lambda item: item[0][0]):
            if version not in self.versions:
                # A fault of the schedule: sampling from another version would break the bound on staleness unseen.
                raise RuntimeError(f"version {version} is requested, but only {sorted(self.versions)} are published")
            played = self.player.play([wanted[number] for number in numbers], version, self.versions[version])
            groups |= zip(numbers, played, strict=True)
        # By identity: with a lag two steps may request the same row, and equal requests are equal records.
        taken = {id(request) for request in wanted}
        self.pending = [request for request in self.pending if id(request) not in taken]
        self._release()
        return [groups[number] for number in range(len(wanted))]

    def _release(self) -> None:
        """Drops weights that no pending request names and no later one may name."""
        needed = {request.version for request in self.pending}
        self.versions = {version: params for version, params in self.versions.items()
                         if version in needed or version >= self.keep_from}

    def published_shapes(self) -> Params:
        return published_shapes(self.model)

    def read_stats(self) -> RolloutStats:
        unchanged, self.unchanged = self.unchanged, 0
        return replace(self.player.read_stats(), unchanged=unchanged)

    def state(self) -> dict[str, Any]:
        """Addresses of pending training groups (an evaluation is taken as soon as it is requested), and the weights
        that are still sampled from."""
        return {"pending": self._addresses(), "published": dict(self.versions)}

    def restore(self, state: dict[str, Any]) -> None:
        if self._addresses() != [tuple(address) for address in state["pending"]]:
            raise ShoalError("the groups that are pending in the checkpoint are not those that this run requests: "
                             "the data or its order has changed since; restore it, or start a run of another name "
                             f"(checkpoint {state['pending'][:3]}, now {self._addresses()[:3]})")

    def _addresses(self) -> list[tuple[str, int, int, str, int, int]]:
        return [(r.purpose.value, r.step, r.version, r.subset, r.example.row, r.num_completions) for r in self.pending
                if r.purpose is Purpose.TRAIN]

    def close(self) -> None:
        self.versions.clear()
        self.player.close()

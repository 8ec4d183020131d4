"""MFU (model FLOPs utilisation): a step's useful operations a second, over the peak rate of its devices."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.mesh import peak_flops
from shoal.model.architecture import Architecture
from shoal.model.flops import model_flops
from shoal.types import Group


@dataclass(frozen=True)
class Utilisation:
    """The figures from which MFU is computed; `peak` is in operations a second of all devices."""

    architecture: Architecture
    peak: float
    num_epochs: int
    num_scorings: int  # forward passes over the trained tokens besides the updates: old, reference, teacher

    @classmethod
    def on(cls, devices: Iterable[Any], architecture: Architecture, dtype: Any, num_epochs: int = 1,
           num_scorings: int = 0) -> Utilisation | None:
        """None if the peak rate of a device is unknown, as that of any CPU."""
        rates = [peak_flops(device.device_kind, dtype) for device in devices]
        known = [rate for rate in rates if rate is not None]
        if not rates or len(known) < len(rates):
            return None
        return cls(architecture, sum(known), num_epochs, num_scorings)

    def share(self, groups: Sequence[Group], entered: Container[tuple[int, int]], seconds: float) -> float:
        """MFU of a step of so many seconds; `entered` holds the (group, completion) pairs that entered the update."""
        sampled = [(len(group.prompt_ids), [len(c) for c in group.completions]) for group in groups]
        trained = []
        for number, (prompt, lengths) in enumerate(sampled):
            inside = [length for index, length in enumerate(lengths) if (number, index) in entered]
            if inside:  # else the prompt was not computed either
                trained.append((prompt, inside))
        flops = model_flops(self.architecture, sampled, trained, self.num_epochs, self.num_scorings)
        return flops / (self.peak * seconds)

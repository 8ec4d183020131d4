"""The groups of devices that exchange in a collective, from any of the forms in which XLA writes them."""

from __future__ import annotations

import math
import re

import numpy as np


def groups_text(attributes: str) -> str:
    """Which devices exchange, as the attributes of an operation say it."""
    for pattern in (r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\([^)]*(?:\([^)]*\)[^)]*)?\))?\s*\{[^}]*\})",
                    r"replica_groups=(\{\{[\d,{}]*\}\})",
                    r"replica_groups=(\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)",
                    r"source_target_pairs=(\{[\d,{}]*\})"):
        if found := re.search(pattern, attributes):
            return found[1]
    return ""


def device_groups(text: str) -> list[list[int]]:
    """The groups of devices that exchange, from any of the forms in which XLA writes them; empty if it is another.

    >>> device_groups("[2,2]<=[2,2]T(1,0)"), device_groups("mesh['a'=2,'b'=2] {'b'}")
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    if text.startswith("{{"):
        return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", text[1:-1])]
    if found := re.fullmatch(r"\[([\d,]*)\]<=(\[[\d,]*\](?:T\([\d,]*\))?)", text):
        return _order(found[2]).reshape([int(n) for n in found[1].split(",")]).tolist()
    return _mesh_groups(text)


def _order(text: str) -> np.ndarray:
    """The numbers of devices in the order of `[2,4]T(1,0)`: counted in a grid that is then transposed."""
    dims, _, order = text.partition("T")
    grid = np.arange(math.prod(map(int, re.findall(r"\d+", dims)))).reshape([*map(int, re.findall(r"\d+", dims))])
    return (grid.transpose([*map(int, re.findall(r"\d+", order))]) if order else grid).reshape(-1)


def _mesh_groups(text: str) -> list[list[int]]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}`: axes of a grid of devices in this order, or parts of
    axes (after 2, of size 2)."""
    found = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))?\s*\{([^}]*)\}", text)
    if found is None:
        return []
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])]
    taken = {name: (int(before or 1), int(size) if size else dict(axes)[name])
             for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found[3]) if name in dict(axes)}
    shape, inside = [], []
    for name, size in axes:
        before, part = taken.get(name, (size, 1))
        shape += [before, part, size // before // part]
        inside.append(len(shape) - 2)
    order = [n for n in range(len(shape)) if n not in inside] + inside
    numbers = np.arange(math.prod(shape))
    if found[2]:
        numbers = _order(found[2]) if found[2].startswith("[") else np.array([*map(int, found[2].split(","))])
    grid = numbers.reshape(shape).transpose(order)
    return grid.reshape(-1, math.prod(shape[n] for n in inside)).tolist()


def group_size(text: str) -> int:
    """Devices that exchange with one another."""
    groups = device_groups(text)
    if text.startswith("{{") and groups and all(len(pair) == 2 for pair in groups):
        return len(groups[0]) if len({n for pair in groups for n in pair}) == 2 * len(groups) else len(groups)
    return len(groups[0]) if groups else 1

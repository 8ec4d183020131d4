"""FLOPs of a traced program: what it computes, recomputation and padding included, on all devices together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def jaxpr_flops(jaxpr: Any, assumed_trips: Sequence[float] = (), of_kernels: bool = False) -> float:
    """Operations of a jaxpr's matrix products, two for each multiplication; with `of_kernels` of those in kernels.
    `assumed_trips`: of `while` loops, whose number of rounds a jaxpr does not say, the outermost first."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(equation.outvars[0].aval.shape) * math.prod(shape[n] for n in contracted)
            total += 0.0 if of_kernels else 2.0 * size
            continue
        times, trips, skip = 1.0, assumed_trips, of_kernels
        if equation.primitive.name == "scan":
            times = float(equation.params["length"])
        elif equation.primitive.name == "while":
            times, trips = (assumed_trips[0], assumed_trips[1:]) if assumed_trips else (1.0, ())
        elif equation.primitive.name == "pallas_call":  # for each block of queries, the blocks of keys that it reads
            grid, cost = equation.params["grid_mapping"].grid, equation.params["cost_estimate"]
            if cost is not None:  # for all blocks of keys, of which a share is read
                total += cost.flops * (assumed_trips or [0.5])[0]
                continue
            times, skip = math.prod(grid) / max(grid[-2:]) * (assumed_trips or [max(grid[-2:]) / 2])[0], False
        elif equation.primitive.name == "shard_map":  # its body is of one device
            mesh = equation.params["mesh"].shape
            times = float(math.prod(mesh[axis] for axis in equation.params["newly_manual_axes"]))
        inside = [jaxpr_flops(inner, trips, skip) for inner in inner_jaxprs(equation.params)]
        total += times * (max(inside, default=0.0) if equation.primitive.name == "cond" else sum(inside))
    return total


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                found.append(one)
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                found.append(one.jaxpr)
    return found

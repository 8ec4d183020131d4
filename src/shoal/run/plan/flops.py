"""FLOPs of a traced program: what it computes, recomputation and padding included, on all devices together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def jaxpr_flops(jaxpr: Any, assumed_trips: Sequence[float] = ()) -> float:
    """Operations of a jaxpr's matrix products, two for each multiplication. `assumed_trips`: of `while` loops, whose
    number of rounds a jaxpr does not say, the outermost first."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[n] for n in contracted)
            continue
        times, trips = 1.0, assumed_trips
        if equation.primitive.name == "scan":
            times = float(equation.params["length"])
        elif equation.primitive.name == "while":
            times, trips = (assumed_trips[0], assumed_trips[1:]) if assumed_trips else (1.0, ())
        elif equation.primitive.name == "shard_map":  # its body is of one device
            mesh = equation.params["mesh"].shape
            times = float(math.prod(mesh[axis] for axis in equation.params["newly_manual_axes"]))
        inside = [jaxpr_flops(inner, trips) for inner in _jaxprs(equation.params)]
        total += times * (max(inside, default=0.0) if equation.primitive.name == "cond" else sum(inside))
    return total


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                found.append(one)
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                found.append(one.jaxpr)
    return found

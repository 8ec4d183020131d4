"""Which groups dynamic sampling keeps: those whose completions differ in a value that is compared.

DAPO, arXiv 2503.14476, eq. 11: a group that is all right or all wrong has no gradient and is replaced.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from shoal.algorithm.advantage import nonzero_std


def has_variance(valid: Bool[np.ndarray, "G"], values: Float[np.ndarray, "N G"]) -> bool:
    """True if the valid siblings of one group differ in any of N values; a NaN leaves its sibling out of that value."""
    return bool(nonzero_std(values, valid & ~np.isnan(values)).any())

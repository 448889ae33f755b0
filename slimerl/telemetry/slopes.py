"""How fast a figure grows, told apart from its noise."""

from collections.abc import Sequence

import numpy as np


def robust_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil–Sen: the median of the slopes between all pairs of points; a third of wild points do not move it.

    Raises ValueError for fewer than two different x.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(xs), k=1)
    run = xs[second] - xs[first]
    if not run.any():
        raise ValueError("a slope needs points at two different places")
    rise = ys[second] - ys[first]
    return float(np.median(rise[run != 0] / run[run != 0]))

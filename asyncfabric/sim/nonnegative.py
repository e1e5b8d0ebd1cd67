"""Least squares with coefficients that cannot be negative, by active sets (Lawson and Hanson, 1974, ch. 23). Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Solution(NamedTuple):
    """Coefficients and their standard errors: those that are 0 by force have none, which is stated as nan."""

    values: Floats
    errors: Floats


def nonnegative_least_squares(matrix: Floats, measured: Floats) -> Solution:
    """Return the x >= 0 for which matrix @ x is closest to what was measured.

    Args:
        matrix: (rows, columns), of full column rank.
        measured: (rows,).

    Raises:
        ValueError: fewer rows than columns, or columns that these rows cannot distinguish.
    """
    rows, columns = matrix.shape
    if rows < columns:
        raise ValueError(f"{rows} measurements are too few for {columns} costs")
    scale = np.linalg.norm(matrix, axis=0)
    if not (scale > 0).all() or np.linalg.matrix_rank(matrix / np.where(scale > 0, scale, 1.0)) < columns:
        raise ValueError(f"{rows} measurements do not distinguish {columns} costs: their columns depend on each other")
    scaled = matrix / scale
    values, free = np.zeros(columns), np.zeros(columns, bool)
    for _ in range(10 * columns + 10):
        gain = scaled.T @ (measured - scaled @ values)
        held = np.flatnonzero(~free & (gain > 1e-10 * max(1.0, float(np.abs(measured).max()))))
        if not len(held):
            break
        free[held[np.argmax(gain[held])]] = True
        while True:
            wanted = np.zeros(columns)
            wanted[free] = np.linalg.lstsq(scaled[:, free], measured, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                values = wanted
                break
            part = float((values[below] / (values[below] - wanted[below] + 1e-300)).min())
            values = values + part * (wanted - values)
            free &= values > 1e-15
            values[~free] = 0.0
    errors = np.full(columns, np.nan)
    if free.any():
        left = measured - scaled @ values
        variance = float(left @ left) / max(1, rows - int(free.sum()))
        errors[free] = np.sqrt(np.diag(np.linalg.inv(scaled[:, free].T @ scaled[:, free])) * variance)
    return Solution(values / scale, errors / scale)

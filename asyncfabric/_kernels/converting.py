"""What compiled conversions of matrices of weights take and give. Types only, made by cython_ext/converting.pxi.

Matrices are bytes, shape [rows, bytes of a row], rows any distance apart; `kind` states what elements they have, as in
`rows`. With `turned` the rows of a target are the columns of its source. The GIL is released meanwhile. All raise
ValueError, before anything is written, when sizes do not fit each other.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
CASTS = frozenset((source, target) for source in KINDS for target in KINDS if source != target)
"""What is cast so."""


class Converting(Protocol):
    """Casting, quantising and measuring; the bits are those of asyncfabric.weights.arithmetic."""

    def cast(self, source: Bytes, kind: int, to: int, target: Bytes, turned: bool) -> None:
        """Cast each element to another kind, one of CASTS; others raise ValueError too."""

    def quantise(
        self, source: Bytes, kind: int, row: int, column: int, scales: Floats, target: Bytes, turned: bool
    ) -> None:
        """Divide each element by the scale of its block of 128 x 128, and store it as float8_e4m3fn.

        The source begins at (row, column) of its first block; `scales` are of exactly the blocks that it touches.
        """

    def measure(self, source: Bytes, kind: int, row: int, column: int, maxima: Floats) -> None:
        """Write the largest absolute value of each block that the source touches; NaN where an element is NaN."""

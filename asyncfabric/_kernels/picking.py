"""What the compiled pass over positions takes and gives. Types only, made by cython_ext/picking.pxi."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PAGES, JOINED = 0, 1


class Picking(Protocol):
    """Choosing pages by their positions in two lists; holds the GIL, at about a nanosecond for each."""

    def pick_pairs(
        self,
        first: object,
        first_offsets: NDArray[np.int64],
        second: object,
        second_offsets: NDArray[np.int64],
        page_bytes: int,
        chosen: NDArray[np.int64],
    ) -> int:
        """Write the offsets at positions `first` and `second` into the two rows of `chosen`.

        Positions are lists of int, or contiguous arrays of integers of 32 or 64 bits, as many as a row has room for.
        Returns JOINED if both rows are one piece, each offset `page_bytes` behind the one before, otherwise PAGES;
        and -1, with anything in `chosen`, for positions of another form or number, or outside their list.
        """

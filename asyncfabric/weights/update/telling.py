"""Rows and checksums as messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncfabric.weights.update.messages import MOST_ROWS, Written


def rows_told(version: int, rows: list[int], sums: list[int]) -> Iterator[Written]:
    """Yield the messages that say that these rows are written."""
    for low in range(0, len(rows), MOST_ROWS):
        part = slice(low, low + MOST_ROWS)
        yield Written(version, np.array(rows[part], "<i8").tobytes(), np.array(sums[part], "<u8").tobytes())

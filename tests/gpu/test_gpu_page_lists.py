"""Page lists of every shape: what the kernels take and what not, alone, many at once, more than there is room for."""

from __future__ import annotations

import pytest
import sanitized_pages

pytestmark = pytest.mark.anyio


async def test_lists_of_every_shape() -> None:
    assert await sanitized_pages.wrong_lists() == 0

"""What tests of experts share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["float32", "bfloat16"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the default dtype of the program, as vLLM and Megatron do."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(before)

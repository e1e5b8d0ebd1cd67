"""Conversions of weights have the bits of vLLM's own quantisers in torch, which its kernels are tested against."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import pytest
import torch

from asyncfabric.weights.sessions.conversions import fp8_per_channel, fp8_per_tensor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's modules import what torch gives up


@pytest.fixture(scope="module", autouse=True)
def configured() -> Iterator[None]:
    """Have the configuration that vLLM's operators look for."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


def random(dtype: torch.dtype) -> torch.Tensor:
    """Return weights of sizes that differ by row, zeros, and numbers whose scale would vanish."""
    torch.manual_seed(3)
    found = torch.randn(256, 384) * 10.0 ** torch.randint(-7, 4, (256, 1))
    found[0], found[1] = 0, 1e-30
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("by_row", [True, False])
def test_fp8_has_the_bits_of_vllm(dtype: torch.dtype, by_row: bool) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    weight = random(dtype)
    shape = GroupShape.PER_TOKEN if by_row else GroupShape.PER_TENSOR
    wanted, wanted_scales = QuantFP8(static=False, group_shape=shape).forward_native(weight)
    quantised, scales = fp8_per_channel(weight) if by_row else fp8_per_tensor(weight)
    assert scales.shape == wanted_scales.shape and torch.equal(scales, wanted_scales)
    assert torch.equal(quantised.view(torch.uint8), wanted.view(torch.uint8))

"""Casts and float8 against torch, over all bfloat16 numbers; block maxima and scales."""

from __future__ import annotations

import numpy as np
import pytest

from asyncfabric.weights.plan.formats import block_maxima, cast, from_float32, quantise, scales_of, to_e4m3, to_float32

torch = pytest.importorskip("torch", reason="CASTS WERE NOT COMPARED WITH TORCH: it is not installed")
EVERY = np.arange(1 << 16, dtype=np.uint16)


def as_torch(stored, dtype):
    return torch.from_numpy(stored.view(np.int16)).view(getattr(torch, dtype))


@pytest.mark.parametrize("target", ["float16", "float32"])
def test_casts_of_all_bfloat16_numbers_equal_those_of_torch(target: str) -> None:
    ours = cast(EVERY, "bfloat16", target)
    theirs = as_torch(EVERY, "bfloat16").to(getattr(torch, target)).numpy()
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~numbers)
    bits = {"float16": np.uint16, "float32": np.uint32}[target]
    assert np.array_equal(ours.view(bits)[numbers], theirs.view(bits)[numbers])


def test_rounding_to_bfloat16_equals_that_of_torch() -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    ours = from_float32(values, "bfloat16")
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(values)
    assert np.array_equal(ours[numbers], theirs[numbers])
    assert np.isnan(to_float32(ours[~numbers], "bfloat16")).all()


def test_float8_of_all_bfloat16_numbers_equals_that_of_torch_and_saturates() -> None:
    values = to_float32(EVERY, "bfloat16")
    ours = to_e4m3(values)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    fits = np.abs(values) <= 448
    assert np.array_equal(ours[fits], theirs[fits])
    assert set(ours[(values > 448)].tolist()) == {0x7E}
    assert set(ours[(values < -448)].tolist()) == {0xFE}
    assert (ours[np.isnan(values)] & 0x7F == 0x7F).all()


def test_float8_rounds_ties_to_even_between_all_neighbours() -> None:
    codes = np.arange(0x7E, dtype=np.uint8)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    following = torch.from_numpy(codes + 1).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    middle = (numbers + following) / 2
    assert np.array_equal(to_e4m3(numbers), codes)
    assert np.array_equal(to_e4m3(middle), np.where(codes % 2 == 0, codes, codes + 1))


def test_blocks_count_from_the_tensors_origin() -> None:
    values = np.zeros((200, 130), np.float32)
    values[27, 0], values[28, 0], values[199, 129] = 3.0, -5.0, 7.0
    maxima = block_maxima(values, (100, 0))
    assert maxima.tolist() == [[3.0, 0.0], [5.0, 0.0], [0.0, 7.0]]


def test_quantised_blocks_use_the_whole_range_and_zeros_stay_zeros() -> None:
    values = np.zeros((128, 256), np.float32)
    values[:, :128] = np.linspace(-1e-3, 1e-3, 128 * 128, dtype=np.float32).reshape(128, 128)
    scales = scales_of(block_maxima(values, (0, 0)))
    stored = quantise(values, scales, (0, 0))
    assert stored[0, 0] == 0xFE and stored[127, 127] == 0x7E
    assert not stored[:, 128:].any()
    assert (scales > 0).all()


def test_scales_of_the_smallest_numbers_do_not_vanish() -> None:
    tiny = np.full((1, 1), np.finfo(np.float32).smallest_subnormal, np.float32)
    scales = scales_of(block_maxima(tiny, (0, 0)))
    assert scales[0, 0] > 0 and to_e4m3(tiny / scales)[0, 0] == 0


def test_impossible_casts_are_refused() -> None:
    with pytest.raises(ValueError, match="block=128"):
        cast(EVERY, "bfloat16", "float8_e4m3fn")
    with pytest.raises(ValueError, match="'int4' is not an element type"):
        cast(EVERY, "int4", "float16")

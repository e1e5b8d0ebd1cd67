"""Weights in torch tensors: the code of GPUs, run on host memory here, has the bits of numpy; so have its checksums.

`tests/gpu/test_gpu_weights.py` runs it on GPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases
from weight_fixture import open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Relay, plan_weights
from asyncfabric.weights.memory import device
from asyncfabric.weights.memory import host as devices
from asyncfabric.weights.memory.checksums import word_sum
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.memory.tiles import measure
from asyncfabric.weights.plan.formats import BLOCK, CASTS, STORED_AS, cast, quantise, to_float32
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.receiver import replica
from asyncfabric.weights.sender import shards

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
torch = pytest.importorskip("torch", reason="NO TEST OF WEIGHTS IN TENSORS WAS RUN: torch is not installed")
from asyncfabric.weights.memory.gpu import arithmetic  # noqa: E402
from asyncfabric.weights.memory.gpu import device as gpu_device  # noqa: E402
from asyncfabric.weights.memory.gpu.device import TorchDevice  # noqa: E402
from asyncfabric.weights.memory.host import HostDevice  # noqa: E402

Host, Torch = HostDevice(), TorchDevice("cpu")
FORMS = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}
INTS = {2: torch.int16, 4: torch.int32}


def bits_of(array: Any) -> Any:
    """The same bits as the device holds them."""
    signed = np.dtype(f"i{array.itemsize}") if array.itemsize > 1 else np.dtype("u1")
    return torch.from_numpy(np.ascontiguousarray(array).view(signed))


def kind_of(dtype: str, to: str, block: int) -> MoveKind:
    return MoveKind(dtype=dtype, to=to, block=block, source=0, first=0, count=1)


@pytest.mark.parametrize(("dtype", "to"), sorted(CASTS))
def test_casts_have_the_bits_of_numpy(dtype: str, to: str) -> None:
    """All numbers of 16 bits; of 32 bits those around every rounding, and odd ones. NaN that signal are left out."""
    form = FORMS[dtype]
    if form.itemsize == 2:
        bits = np.arange(1 << 16, dtype=np.uint32).astype(form)
    else:
        high = np.arange(1 << 16, dtype=np.uint32) << 16
        bits = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0xFFF, 0x1001)])
    exponent, quiet = {"bfloat16": (0x7F80, 0x40), "float16": (0x7C00, 0x200), "float32": (0x7F800000, 0x400000)}[dtype]
    signals = (bits & exponent == exponent) & (bits & (exponent // exponent * (quiet - 1)) != 0) & (bits & quiet == 0)
    elements = bits[~signals].view(STORED_AS[dtype]).reshape(1, -1)
    found = torch.empty((1, elements.size), dtype=INTS[STORED_AS[to].itemsize])
    arithmetic.convert(found, bits_of(elements), kind_of(dtype, to, 0), None, np.zeros(2, np.int64))
    with np.errstate(invalid="ignore"):
        expected = cast(elements, dtype, to)
    assert np.array_equal(found.numpy().view(FORMS[to]), expected.view(FORMS[to]))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(0, 1000),
    st.sampled_from([1, 1 << 12, 1 << 21]),
    st.sampled_from(["plain", "tiny", "special"]),
)
def test_maxima_and_quantised_blocks_have_the_bits_of_numpy(
    dtype: str, rows: int, columns: int, row: int, column: int, seed: int, strip: int, values: str
) -> None:
    random = np.random.default_rng(seed)
    floats = (random.standard_normal((2, rows, columns)) * (1e-38 if values == "tiny" else 1)).astype(np.float32)
    if values == "special" and dtype != "float16":
        floats.reshape(-1)[random.integers(0, floats.size, 5)] = [np.inf, -np.inf, np.nan, -np.nan, -0.0]
    with np.errstate(invalid="ignore"):
        shard = floats if dtype == "float32" else cast(floats, "float32", dtype)
    kind, start = kind_of(dtype, "float8_e4m3fn", BLOCK), np.array([3, row, column])
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):
        patch.setattr(arithmetic, "STRIP_ELEMENTS", strip)
        expected = measure(shard, start, kind)
        maxima = arithmetic.block_maxima(bits_of(shard), start, kind)
        assert np.array_equal(maxima, expected, equal_nan=True)
        top, left = int(random.integers(0, rows)), int(random.integers(0, columns))
        begin, box = start + np.array([0, top, left]), shard[:, top:, left:]
        flip, ordered = [1, 2, 0], np.empty(box.size, np.uint8)
        Host.convert(ordered, [box.shape[2], *box.shape[:2]], flip, box, kind, expected, begin, start)
        found = torch.empty(box.size, dtype=torch.uint8)
        Torch.convert(
            found, [box.shape[2], *box.shape[:2]], flip, bits_of(shard)[:, top:, left:], kind, expected, begin, start
        )
        assert np.array_equal(found.numpy(), ordered)
        scales = arithmetic.box_scales(expected, begin, box.shape, start)
        wanted = quantise(to_float32(box, dtype), scales, (row + top, column + left))
        assert np.array_equal(ordered.reshape(box.shape[2], *box.shape[:2]).transpose(flip), wanted)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=3), st.integers(0, 1000), st.data())
def test_a_word_sum_is_the_same_everywhere_and_finds_changes(lengths: list[int], seed: int, data: Any) -> None:
    """WT-6: a changed word and two words that changed places are found for certain."""
    random = np.random.default_rng(seed)
    parts = [
        random.integers(0, 256, length, dtype=np.uint8) & random.integers(0, 256, dtype=np.uint8) for length in lengths
    ]
    before = word_sum(parts)
    sums = Torch.sums("words")
    sums.add([device.stretch(torch.from_numpy(np.append(part, np.uint8(0))), 0, part.size) for part in parts])
    assert sums.result() == [before]
    part = parts[data.draw(st.integers(0, len(parts) - 1))]
    if part.size:
        at = data.draw(st.integers(0, part.size - 1))
        by = np.uint8(data.draw(st.integers(1, 255)))
        part[at] ^= by
        assert word_sum(parts) != before
        part[at] ^= by
    words = part[: part.size // 4 * 4].view("<u4")
    if words.size > 1:
        one, two = data.draw(st.tuples(*[st.integers(0, words.size - 1)] * 2))
        differ = words[one] != words[two]
        words[[one, two]] = words[[two, one]]
        assert (word_sum(parts) != before) == differ


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_strided_bytes_are_hashed_in_order(planes: int, rows: int, columns: int, item: int, skip: int) -> None:
    memory = np.random.default_rng(columns).integers(0, 256, 4096, dtype=np.uint8)
    lies = Strided((planes, rows, columns), (item * 128, item * (columns + skip), item), item)
    for kind in ("words", "xxh3"):
        found = []
        for place, held in ((Host, memory), (Torch, torch.from_numpy(memory))):
            sums = place.sums(kind)
            sums.add([device.Stretch(held, lies, 64), device.stretch(held, 1, 11)])
            found.append(sums.result())
        assert found[0] == found[1]


def tensors_over(held: dict[str, Any]) -> dict[str, Any]:
    """Tensors over the memory of a trainer's arrays, of the types that the plans of the tests state."""
    types = {"<u2": torch.bfloat16, "<f2": torch.float16}
    found = {}
    for name, array in held.items():
        bits = torch.from_numpy(array.view(np.int16) if array.itemsize == 2 else array)
        found[name] = bits.view(types[array.dtype.str]) if array.itemsize == 2 else bits
    return found


@pytest.mark.slow
def test_tensors_in_host_memory_are_shards_as_arrays_are(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(
            small_plan(), random_shard, tmp_path / "log", given=lambda rank, held: tensors_over(held)
        ) as fixture:
            for version in (1, 2):
                await fixture.bring(version)
                fixture.change(version)

    run(body)


def test_shards_that_nothing_can_read_are_refused() -> None:
    plan = small_plan()
    held = tensors_over({name: random_shard(0, name) for name in ("gate", "up", "down")})
    with pytest.raises(ValueError, match=r"weights are on 'cpu' or 'cuda:N', got 'meta'"):
        shards.Shards(plan, 0, {name: tensor.to("meta") for name, tensor in held.items()})
    with pytest.raises(ValueError, match=r"are on \['cpu', 'meta'\]: give all of them on one device"):
        shards.Shards(plan, 0, {**held, "up": held["up"].to("meta")})
    for wrong, stated in (
        ({"up": held["up"].T}, "up of rank 0: expected C-contiguous"),
        ({"up": held["up"].view(torch.float16)}, "up of rank 0: expected .* got .* of float16"),
    ):
        with pytest.raises(ValueError, match=stated):
            shards.Shards(plan, 0, {**held, **wrong})
    with torch_everywhere():
        for wrong, stated in (
            ({"up": held["up"].T}, "up of rank 0: expected contiguous .* not contiguous"),
            ({"up": held["up"].view(torch.int16)}, "up of rank 0: expected contiguous .* of bfloat16, got .* of int16"),
            ({"up": held["up"][1:]}, "up of rank 0: expected contiguous"),
        ):
            with pytest.raises(ValueError, match=stated):
                shards.Shards(plan, 0, {**held, **wrong})


@contextmanager
def torch_everywhere(trainers: bool = True, receivers: bool = True) -> Iterator[None]:
    """Let shards, or replicas, be worked on by the code of GPUs; no bytes may come to the host to be hashed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_device, "BroughtSums", None)
        for wanted, module in ((trainers, shards), (receivers, replica)):
            patch.setattr(module, "device_of", TorchDevice if wanted else devices.device_of)
        yield


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    cases(),
    cases(quantised=True),
    st.builds(Relay, st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from([(True, True), (True, False), (False, True)]),
    st.sampled_from([100, 1 << 14, 1 << 20]),
)
def test_updates_of_tensors_equal_the_reference(
    plain: Case, quantised: Case, relay: Relay, who: tuple[bool, bool], chunk_bytes: int
) -> None:
    """Also where only the trainers, or only the receivers, are on a GPU."""
    for case in (plain, quantised):
        names = [f"replica {number}" for number in range(case.replicas)]
        plan = plan_weights(
            case.moves,
            trainers=case.trainers,
            receivers=case.receivers,
            replicas=names,
            relay=relay,
            chunk_bytes=max(chunk_bytes, 1 << 12) if case is quantised else chunk_bytes,
        )

        async def body(plan: Any = plan, case: Case = case) -> None:
            with tempfile.TemporaryDirectory() as folder, torch_everywhere(*who):
                async with open_fixture(
                    plan,
                    case.shard,
                    Path(folder) / "log",
                    given=lambda rank, held: tensors_over(held) if who[0] else held,
                ) as fixture:
                    for version in (1, 2):
                        await fixture.bring(version)
                        fixture.change(version)

        run(body)


@pytest.mark.slow
@pytest.mark.parametrize("late_on_torch", [True, False])
def test_a_late_joiner_fetches_from_another_kind_of_memory(tmp_path: Path, late_on_torch: bool) -> None:
    async def body() -> None:
        plan = small_plan()
        with torch_everywhere(trainers=True, receivers=not late_on_torch):
            async with open_fixture(
                plan, random_shard, tmp_path / "log", given=lambda rank, held: tensors_over(held)
            ) as fixture:
                await fixture.bring(1)
                with torch_everywhere(receivers=late_on_torch):
                    async with (
                        af.open_fabric(af.FabricConfig(rails=("local",))) as fabric,
                        replica.open_replica(fabric, fixture.post.open("late/0"), plan, "late", 0) as late,
                    ):
                        await late.wait_version(1)
                        assert late.step_boundary() == 1
                        mine = {name: np.asarray(each).tobytes() for name, each in late.tensors().items()}
                        other = fixture.replicas["a/0"].tensors()
                        assert mine == {name: np.asarray(each).tobytes() for name, each in other.items()}
                        fixture.post.close("late/0")

    run(body)

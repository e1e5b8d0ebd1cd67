"""Weights that stay on GPUs: trainers on the first, replicas on the last, bit for bit what numpy makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_blocks import check_laid, check_whole_blocks
from weight_fixture import on_host, random_shard, run, small_plan
from weight_gpus import WHERE, Tensors, gpu_fixture, tensor_of

import asyncfabric as af
from asyncfabric.weights import Mesh, Move, Plan, Shard, alone, fused, place, plan_weights
from asyncfabric.weights.memory.checksums import word_sum
from asyncfabric.weights.memory.device import Measured, Stretch, stretch
from asyncfabric.weights.memory.host import HostDevice, device_of
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.plan.formats import BLOCK, CASTS, STORED_AS, cast
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.update import open_replica


@pytest.mark.parametrize(("dtype", "to"), sorted(CASTS))
def test_casts_have_the_bits_of_numpy(dtype: str, to: str) -> None:
    import torch

    width = STORED_AS[dtype].itemsize
    bits = np.arange(1 << 16, dtype=np.uint32)
    if width == 4:
        bits = np.concatenate([bits << 16 | low for low in (0, 0x7FFF, 0x8000, 0x8001, 0x1000, 0xFFF, 0x1001)])
    exponent, quiet = {"bfloat16": (0x7F80, 0x40), "float16": (0x7C00, 0x200), "float32": (0x7F800000, 0x400000)}[dtype]
    signals = (bits & exponent == exponent) & (bits & (quiet - 1) != 0) & (bits & quiet == 0)
    elements = bits[~signals].astype(f"<u{width}").view(STORED_AS[dtype]).reshape(1, -1)
    out = torch.empty(elements.size * STORED_AS[to].itemsize, dtype=torch.uint8, device="cuda:0")
    gpu, kind = device_of("cuda:0"), MoveKind(dtype=dtype, to=to, block=0, source=0, first=0, count=1)
    zero = np.zeros(2, np.int64)
    gpu.convert(out, elements.shape, (0, 1), tensor_of(elements, "cuda:0"), kind, None, zero, zero)
    gpu.finish()
    with np.errstate(invalid="ignore"):
        assert out.cpu().numpy().tobytes() == cast(elements, dtype, to).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "row", "column"),
    [(256, 512, 0, 0), (300, 1000, 100, 24), (7, 129, 3, 127), (2048, 4096, 128, 256)],
)
@pytest.mark.parametrize("flip", [False, True])
def test_quantised_blocks_have_the_bits_of_numpy(
    dtype: str, rows: int, columns: int, row: int, column: int, flip: bool
) -> None:
    import torch

    random = np.random.default_rng(rows)
    floats = (random.standard_normal((2, rows, columns)) * 10.0 ** random.integers(-4, 4, (2, rows, 1))).astype("<f4")
    if dtype != "float16":
        floats.reshape(-1)[random.integers(0, floats.size, 7)] = [np.inf, -np.inf, np.nan, -np.nan, -0.0, 1e-40, 3e38]
    with np.errstate(invalid="ignore", over="ignore"):
        shard = floats if dtype == "float32" else cast(floats, "float32", dtype)
    host, gpu = HostDevice(), device_of("cuda:0")
    kind = MoveKind(dtype=dtype, to="float8_e4m3fn", block=BLOCK, source=0, first=0, count=1)
    start = np.array([0, row, column])
    bits = tensor_of(shard, "cuda:0")
    torch.cuda.synchronize()
    with np.errstate(invalid="ignore", over="ignore"):
        maxima = host.measure([Measured(shard, start, kind)])[0]
        assert np.array_equal(gpu.measure([Measured(bits, start, kind)])[0], maxima, equal_nan=True)
        for top, left in ((0, 0), (rows // 2, columns // 3)):
            box, begin = shard[:, top:, left:], start + np.array([0, top, left])
            axes = (0, 2, 1) if flip else (0, 1, 2)
            sizes = tuple(box.shape[axis] for axis in axes)
            expected = np.empty(box.size, np.uint8)
            host.convert(expected, sizes, axes, box, kind, maxima, begin, start)
            out = torch.empty(box.size, dtype=torch.uint8, device="cuda:0")
            gpu.convert(out, sizes, axes, bits[:, top:, left:], kind, maxima, begin, start)
            gpu.finish()
            assert np.array_equal(out.cpu().numpy(), expected)


def put(array: Any) -> Any:
    import torch

    tensor = torch.from_numpy(array).to("cuda:0")
    torch.cuda.synchronize()
    return tensor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (272, 1000), (16, 136), (384, 8), (1024, 2048)])
def test_boxes_of_whole_blocks_have_the_bits_of_numpy(dtype: str, rows: int, columns: int) -> None:
    check_whole_blocks(device_of("cuda:0"), dtype, rows, columns, put, lambda tensor: tensor.cpu().numpy())


@pytest.mark.parametrize(("dtype", "to"), [*sorted(CASTS), ("bfloat16", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize(("rows", "columns"), [(128, 192), (100, 68), (1024, 512)])
def test_boxes_that_are_laid_have_the_bits_of_numpy(dtype: str, to: str, rows: int, columns: int) -> None:
    check_laid(device_of("cuda:0"), dtype, to, rows, columns, put, lambda tensor: tensor.cpu().numpy())


def test_word_sums_equal_those_of_numpy() -> None:
    memory = np.random.default_rng(5).integers(0, 256, 40 << 20, dtype=np.uint8)
    tensor, gpu = tensor_of(memory, "cuda:0"), device_of("cuda:0")
    shapes = [
        [stretch(memory, at, length)]
        for at, length in ((0, 0), (0, 1), (4, 4), (3, 1000), (256, (33 << 20) + 3), (64, 16 << 20), (0, 40 << 20))
    ]
    shapes += [
        [Stretch(memory, Strided((17, 100, 64), (1 << 20, 4096, 2), 2), 512), stretch(memory, 4096, 400)],
        [Stretch(memory, Strided((300, 33), (66, 1), 1), 1)],
        [Stretch(memory, Strided((4, 5, 6, 7, 96), (1 << 20, 1 << 17, 1 << 14, 1 << 9, 4), 4), 128)],
        [Stretch(memory, Strided((9, 1 << 20), (4 << 20, 2), 2), 6)],
        [Stretch(memory, Strided((128, 9), (2, 4096), 2), 6)],
    ]
    sums = gpu.sums("words")
    for parts in shapes:
        sums.add([part._replace(memory=tensor) for part in parts])
    expected = [word_sum([lies.gathered(held, at) for held, lies, at in parts]) for parts in shapes]
    assert sums.result() == expected
    brought = gpu.sums("xxh3")
    mine = HostDevice().sums("xxh3")
    for parts in shapes:
        brought.add([part._replace(memory=tensor) for part in parts])
        mine.add(parts)
    assert brought.result() == mine.result()


def large_plan(to: str, block: int, shape: tuple[int, int] = (2048, 3072)) -> Plan:
    """Fused and transposed matrices of megabytes, from two trainers to two receivers."""
    trainer, replica = Mesh.of({"fsdp": 2}), Mesh.of({"tp": 2})
    held = place(shape, trainer, {"fsdp": Shard(0)})
    gate_up = fused([place(shape, replica, {"tp": Shard(0)})] * 2)
    moves = [
        Move(name, "bfloat16", held, "gate_up", to, target, block)
        for name, target in zip(("gate", "up"), gate_up, strict=True)
    ]
    down = alone(place(shape, replica, {"tp": Shard(1)}))
    turned = alone(place(shape, replica, {"tp": Shard(0)}), (1, 0))
    moves += [
        Move("down", "bfloat16", held, "down", to, down, block),
        Move("turned", "bfloat16", held, "turned", to, turned, block),
    ]
    return plan_weights(moves, trainers=2, receivers=2, replicas=["a", "b"])


def large_shard(rank: int, name: str) -> Any:
    values = np.random.default_rng([rank, len(name)]).standard_normal((1024, 3072), np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("to", "block"), [("bfloat16", 0), ("float32", 0), ("float8_e4m3fn", 128)])
def test_large_matrices(tmp_path: Path, far: int, where: str, to: str, block: int) -> None:
    async def body() -> None:
        async with gpu_fixture(large_plan(to, block), large_shard, tmp_path / "log", far, where) as (fixture, refresh):
            for version in (1, 2):
                await fixture.bring(version)
                fixture.change(version)
                refresh()

    run(body)


def test_a_flipped_byte_is_found_before_the_commit(tmp_path: Path, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    async def body() -> None:
        async with gpu_fixture(small_plan(), random_shard, tmp_path / "log", far) as (fixture, refresh):
            before = await fixture.begin()
            refresh()
            victim = fixture.replicas["b/1"]
            right = Intake._right

            async def flipped(
                self: Any, rows: list[int], sums: list[int], kind: Any, reported: Any = None
            ) -> list[bool]:
                assert kind == "words"
                if self.copy in victim._versions.copies:
                    place = self.places.places(rows[0])[0]
                    self.copy.memory[place] |= 0xFF  # what is wrong is looked at twice
                    self.copy.memory[place] ^= 0x10
                    torch.cuda.synchronize(far)
                return await right(self, rows, sums, kind, reported)

            monkeypatch.setattr(Intake, "_right", flipped)
            with pytest.raises(af.BrokenError, match=r"b/1: .*wrong bytes.*trainer-"):
                await fixture.update(2)
            monkeypatch.undo()
            for replica in fixture.replicas.values():
                assert replica.step_boundary() == 1
            fixture.check(1, before)
            await fixture.bring(3)

    run(body)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_late_joiner_fetches_from_another_kind_of_memory(tmp_path: Path, far: int, device: str) -> None:
    where = WHERE[0] if device == "cpu" else WHERE[1]

    async def body() -> None:
        plan = small_plan()
        async with gpu_fixture(plan, random_shard, tmp_path / "log", far, where) as (fixture, _):
            await fixture.bring(1)
            async with (
                af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric,
                open_replica(fabric, fixture.post.open("late/0"), plan, "late", 0, device=device) as late,
            ):
                await late.wait_version(1)
                assert late.step_boundary() == 1
                other = fixture.replicas["a/0"].tensors()
                for name, mine in late.tensors().items():
                    assert np.array_equal(on_host(mine), on_host(other[name]))
                fixture.post.close("late/0")

    run(body)


def test_what_the_caller_has_begun_is_in_the_version(tmp_path: Path, far: int) -> None:
    """`publish` reads the shards once the caller's stream is past what it was given before."""
    import torch

    async def body() -> None:
        async with gpu_fixture(small_plan(), random_shard, tmp_path / "log", far) as (fixture, refresh):
            await fixture.bring(1)
            fixture.change(1)
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles: 0.2 s
            refresh()
            await fixture.bring(2)

    run(body)


def test_shards_in_two_places_and_codings_are_refused(tmp_path: Path) -> None:
    from asyncfabric.weights.sender.shards import Shards

    plan = small_plan()
    arrays = {name: random_shard(0, name) for name in ("gate", "up", "down")}
    tensors = Tensors(plan).given(0, arrays)
    with pytest.raises(ValueError, match=r"are on \['cpu', 'cuda:0'\]"):
        Shards(plan, 0, {**arrays, "up": tensors["up"]})
    with pytest.raises(ValueError, match=r"up of rank 0: expected contiguous .* of bfloat16, got .* of int16"):
        import torch

        Shards(plan, 0, {**tensors, "up": tensors["up"].view(torch.int16)})

    async def body() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            with pytest.raises(ValueError, match="codings are read in host memory only"):
                async with open_replica(fabric, None, plan, "a", 0, device="cuda:0", codings=["delta"]):  # type: ignore[arg-type]
                    pass

    run(body)


def test_a_state_dict_on_a_gpu_is_given_and_served_as_tensors() -> None:
    import torch

    from asyncfabric.weights.plan.holdings import LocalTensor
    from asyncfabric.weights.tensors import arrays_of, tensor_over

    state = {"w": torch.arange(12, dtype=torch.bfloat16, device="cuda:0").view(3, 4)}
    assert arrays_of(state, 0)["w"].data_ptr() == state["w"].data_ptr()
    served = tensor_over(state["w"].view(-1).view(torch.uint8), LocalTensor("bfloat16", (4, 3)))
    assert served.device == state["w"].device and torch.equal(served.view(3, 4), state["w"])
    with pytest.raises(ValueError, match="not contiguous"):
        arrays_of({"w": state["w"].T}, 0)

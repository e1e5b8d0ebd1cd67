"""The kernels of weights, run by a processor thread after thread: their bits are those of numpy, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from weight_blocks import check_laid, check_whole_blocks

torch = pytest.importorskip("torch", reason="THE KERNELS OF WEIGHTS WERE NOT RUN: torch is not installed")
from weight_processor import OnProcessor, kernels_on_processor  # noqa: E402

from asyncfabric.weights.memory.checksums import word_sum  # noqa: E402
from asyncfabric.weights.memory.device import Measured, Stretch, stretch  # noqa: E402
from asyncfabric.weights.memory.host import HostDevice  # noqa: E402
from asyncfabric.weights.memory.rows import Strided  # noqa: E402
from asyncfabric.weights.plan.formats import (  # noqa: E402
    BLOCK,
    CASTS,
    STORED_AS,
    cast,
)
from asyncfabric.weights.plan.parts import MoveKind  # noqa: E402

pytestmark = pytest.mark.slow
MIB = 1 << 20
INTS = {2: np.int16, 4: np.int32}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> OnProcessor:
    return OnProcessor(kernels_on_processor(tmp_path_factory.mktemp("kernels")))


def test_checksums(gpu: OnProcessor) -> None:
    memory = np.random.default_rng(5).integers(0, 256, 8 * MIB, dtype=np.uint8)
    shapes = [
        [stretch(memory, at, length)]
        for at, length in (
            (0, 0),
            (0, 1),
            (4, 4),
            (3, 1000),
            (256, (3 << 20) + 3),
            (64, MIB),
            (0, 8 * MIB),
            (16, 16 * 5 + 4),
        )
    ]
    shapes += [
        [Stretch(memory, Strided((7, 100, 64), (MIB, 4096, 2), 2), 512), stretch(memory, 4096, 400)],
        [Stretch(memory, Strided((300, 33), (66, 1), 1), 1)],
        [Stretch(memory, Strided((4, 5, 6, 7, 96), (MIB, 1 << 17, 1 << 14, 1 << 9, 4), 4), 128)],
        [Stretch(memory, Strided((2, 2, 5, 6, 7, 96), (4 * MIB, MIB, 1 << 17, 1 << 14, 1 << 9, 4), 4), 128)],
        [Stretch(memory, Strided((3, 1 << 18), (2 * MIB, 2), 2), 6)],
        [Stretch(memory, Strided((128, 9), (2, 4096), 2), 6)],
    ]
    sums = gpu.sums("words")
    tensor = torch.from_numpy(memory)
    for parts in shapes:
        sums.add([part._replace(memory=tensor) for part in parts])
    assert sums.result() == [word_sum([lies.gathered(held, at) for held, lies, at in parts]) for parts in shapes]
    assert "sums" in gpu.launched


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "row", "column"),
    [(256, 512, 0, 0), (300, 1000, 100, 24), (7, 129, 3, 127), (300, 1008, 56, 40)],
)
def test_maxima_and_quantised_blocks(
    gpu: OnProcessor, dtype: str, rows: int, columns: int, row: int, column: int
) -> None:
    random = np.random.default_rng(rows)
    floats = (random.standard_normal((2, rows, columns)) * 10.0 ** random.integers(-4, 4, (2, rows, 1))).astype("<f4")
    if dtype != "float16":
        floats.reshape(-1)[random.integers(0, floats.size, 7)] = [np.inf, -np.inf, np.nan, -np.nan, -0.0, 1e-40, 3e38]
    host, kind = HostDevice(), MoveKind(dtype=dtype, to="float8_e4m3fn", block=BLOCK, source=0, first=0, count=1)
    start = np.array([0, row, column])
    with np.errstate(invalid="ignore", over="ignore"):
        shard = floats if dtype == "float32" else cast(floats, "float32", dtype)
        bits = torch.from_numpy(shard.view(INTS[STORED_AS[dtype].itemsize]))
        maxima = host.measure([Measured(shard, start, kind)])[0]
        assert np.array_equal(gpu.measure([Measured(bits, start, kind)])[0], maxima, equal_nan=True)
        for top, left in ((0, 0), (rows // 2, columns // 3), (rows // 2, columns // 16 * 8)):
            box, begin = shard[:, top:, left:], start + np.array([0, top, left])
            for axes in ((0, 1, 2), (0, 2, 1)):
                sizes = tuple(box.shape[axis] for axis in axes)
                expected, found = np.empty(box.size, np.uint8), torch.empty(box.size, dtype=torch.uint8)
                host.convert(expected, sizes, axes, box, kind, maxima, begin, start)
                gpu.convert(found, sizes, axes, bits[:, top:, left:], kind, maxima, begin, start)
                assert np.array_equal(found.numpy(), expected)
    assert {f"maxima_{dtype}", f"quantise_{dtype}"} <= set(gpu.launched)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (272, 1000), (16, 136), (384, 8)])
def test_boxes_of_whole_blocks(gpu: OnProcessor, dtype: str, rows: int, columns: int) -> None:
    check_whole_blocks(gpu, dtype, rows, columns, torch.from_numpy, lambda tensor: tensor.numpy())


@pytest.mark.parametrize(("dtype", "to"), [*sorted(CASTS), ("bfloat16", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize(("rows", "columns"), [(128, 192), (100, 68), (4, 4)])
def test_boxes_that_are_laid(gpu: OnProcessor, dtype: str, to: str, rows: int, columns: int) -> None:
    check_laid(gpu, dtype, to, rows, columns, torch.from_numpy, lambda tensor: tensor.numpy())

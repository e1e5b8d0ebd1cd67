"""Random weights for the tests of plans: shards that overlap, replicas that fuse, stack, transpose, cast and quantise.

Also the direct computation that plans are compared with: it knows whole tensors only, no shards and no pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from asyncfabric.weights.plan.formats import BLOCK, STORED_AS, cast, from_float32, to_e4m3, to_float32
from asyncfabric.weights.plan.placement import Mesh, Placement, Replicate, Shard, boxes, place
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.plan.target import SCALE_SUFFIX, Move, alone, fused, stacked

DIRECT = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
    ("float32", "bfloat16"),
    ("uint8", "uint8"),
]


@dataclass
class Case:
    moves: list[Move]
    trainers: int
    receivers: int
    replicas: int
    whole: dict[str, Any]

    def shard(self, rank: int, parameter: str) -> Any:
        """What a trainer holds."""
        placement = next(move.source for move in self.moves if move.parameter == parameter)
        return self.whole[parameter][placement.box_of(rank)].copy()


@st.composite
def cases(draw: Any, quantised: bool = False) -> Case:
    trainers, receivers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    case = Case([], trainers, receivers, draw(st.integers(1, 3)), {})
    for number in range(draw(st.integers(1, 3))):
        block = BLOCK if quantised and draw(st.integers(0, 3)) else 0
        how = draw(st.sampled_from(["alone", "fused", "stacked"]))
        dtype, to = ("bfloat16", "float8_e4m3fn") if block else draw(st.sampled_from(DIRECT))
        if block and draw(st.booleans()):
            dtype = "float32"
        dims = draw(st.integers(2, 3)) if block else draw(st.integers(1, 3)) if how == "alone" else 2
        shape = tuple(draw(st.integers(1, 3)) for _ in range(dims - 2)) + tuple(
            draw(st.integers(1, 300) if block else st.integers(1, 9)) for _ in range(min(dims, 2))
        )
        _tensor(draw, case, f"t{number}", how, shape, dtype, to, block)
    return case


def _tensor(
    draw: Any, case: Case, name: str, how: str, shape: tuple[int, ...], dtype: str, to: str, block: int
) -> None:
    grain = block or 1
    if how == "alone":
        wanted = _wanted(draw, case.receivers, shape, grain)
        axes = draw(st.permutations(range(len(shape))))
        _add(draw, case, name, dtype, name, to, alone(wanted, axes), block)
    elif how == "fused":
        lead = shape[:-2]
        rows = [draw(st.integers(1, 2)) * grain if block else draw(st.integers(1, 6)) for _ in range(2)]
        shapes = [(*lead, rows[0], shape[-1]), (*lead, shape[-2], shape[-1])]
        count = draw(st.integers(1, case.receivers))
        mesh = Mesh.of({"ranks": count})
        flip = draw(st.booleans())
        axes = (*range(len(lead)), *((len(lead) + 1, len(lead)) if flip else (len(lead), len(lead) + 1)))
        targets = fused([place(each, mesh) for each in shapes], dim=axes[-2], axes=axes)
        for part, target in enumerate(targets):
            _add(draw, case, f"{name}.{part}", dtype, name, to, target, block)
    else:
        shape = shape[-2:]
        slots = draw(st.integers(1, 3))
        for expert in range(slots * case.receivers):
            rank, slot = divmod(expert, slots)
            where = place(shape, Mesh.of({"rank": 1}, rank))
            target = stacked(alone(where), np.array([slot]), slots)
            _add(draw, case, f"{name}.{expert}", dtype, name, to, target, block)


def _add(draw: Any, case: Case, name: str, dtype: str, region: str, to: str, target: Any, block: int) -> None:
    shape = target.placement.shape
    case.moves.append(Move(name, dtype, _source(draw, case.trainers, shape), region, to, target, block))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    if dtype == "uint8":
        case.whole[name] = random.integers(0, 256, shape, dtype=np.uint8)
        return
    values = (random.standard_normal(shape) * 10.0 ** random.integers(-3, 3)).astype(np.float32)
    case.whole[name] = from_float32(values, dtype) if dtype == "bfloat16" else values.astype(STORED_AS[dtype])


def _source(draw: Any, trainers: int, shape: tuple[int, ...]) -> Placement:
    """A mesh with shards and copies, or boxes that overlap in any way but cover everything."""
    if draw(st.booleans()):
        first = draw(st.sampled_from([size for size in (1, 2, 3) if trainers % size == 0]))
        rules = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
        mesh = Mesh.of({"a": first, "b": trainers // first})
        return place(shape, mesh, {"a": draw(rules), "b": draw(rules)})
    ranks = draw(st.permutations(range(trainers)))
    held = {}
    dim = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(1, shape[dim]))
    low, high = [0] * len(shape), list(shape)
    high[dim] = cut
    held[ranks[0]] = (low, high)
    if cut < shape[dim] and trainers > 1:
        begin = [0] * len(shape)
        begin[dim] = draw(st.integers(0, cut))
        held[ranks[1]] = (begin, [length - start for start, length in zip(begin, shape, strict=True)])
    else:
        held[ranks[0]] = (low, list(shape))
    for rank in ranks[2:]:
        begin = [draw(st.integers(0, length - 1)) for length in shape]
        held[rank] = (begin, [draw(st.integers(1, length - at)) for at, length in zip(begin, shape, strict=True)])
    return boxes(shape, held)


def _wanted(draw: Any, receivers: int, shape: tuple[int, ...], grain: int) -> Placement:
    """Any box for each receiver; quantised ones begin and end where blocks do."""
    held = {}
    for rank in range(receivers):
        begin, size = [], []
        for dim, length in enumerate(shape):
            step = grain if dim >= len(shape) - 2 else 1
            cuts = [*range(0, length, step), length]
            low = draw(st.integers(0, len(cuts) - 2))
            high = draw(st.integers(low + 1, len(cuts) - 1))
            begin.append(cuts[low])
            size.append(cuts[high] - cuts[low])
        held[rank] = (begin, size)
    return boxes(shape, held)


def expected_tensors(case: Case, plan: Plan) -> dict[tuple[int, str], Any]:
    """What each receiver of any replica must hold in the end, as bytes, from the whole tensors alone."""
    tensors: dict[tuple[int, str], Any] = {}
    for move in case.moves:
        whole = case.whole[move.parameter]
        scales = None
        if move.block:
            converted, scales = whole_quantised(to_float32(whole, move.dtype))
        else:
            converted = cast(whole, move.dtype, move.to)
        target = move.target
        wanted = target.placement
        for row, rank in enumerate(wanted.ranks.tolist()):
            shape = target.local_shapes[row].copy()
            _put(tensors, (rank, move.region), shape, converted, move, row, 1)
            if scales is not None:
                shape[list(target.axes)[-2:]] = -(-shape[list(target.axes)[-2:]] // BLOCK)
                _put(tensors, (rank, move.region + SCALE_SUFFIX), shape, scales, move, row, BLOCK)
    return {key: array.reshape(-1).view(np.uint8) for key, array in tensors.items()}


def _put(tensors: Any, key: tuple[int, str], shape: Any, whole: Any, move: Move, row: int, grain: int) -> None:
    target = move.target
    local = tensors.setdefault(key, np.zeros(shape, whole.dtype))
    source, place_at = [], [slice(int(at), int(at) + 1) for at in target.origins[row]]
    for dim, axis in enumerate(target.axes):
        each = grain if dim >= whole.ndim - 2 else 1
        begin, size = int(target.placement.starts[row][dim]), int(target.placement.sizes[row][dim])
        first, end = begin // each, -(-(begin + size) // each)
        source.append(slice(first, end))
        origin = int(target.origins[row][axis]) // each
        place_at[axis] = slice(origin, origin + end - first)
    box = whole[tuple(source)].transpose(np.argsort(target.axes))
    extra = [axis for axis in range(local.ndim) if axis not in target.axes]
    local[tuple(place_at)] = np.expand_dims(box, extra)


def whole_quantised(values: Any) -> tuple[Any, Any]:
    """Quantise a whole tensor, block by block: the straightforward way."""
    rows, columns = values.shape[-2:]
    lead = values.shape[:-2]
    scales = np.zeros((*lead, -(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    out = np.zeros(values.shape, np.uint8)
    for index in np.ndindex(*scales.shape):
        *front, row, column = index
        where = (*front, slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
        scale = max(np.abs(values[where]).max() / np.float32(448), np.finfo(np.float32).tiny)
        scales[index] = scale
        out[where] = to_e4m3(values[where] / np.float32(scale))
    return out, scales

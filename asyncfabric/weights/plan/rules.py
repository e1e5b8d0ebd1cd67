"""Rules: a table from a trainer's names to the tensors that an engine has: fused, cut, stacked, transposed. Pure.

The table names which tensor a parameter is a part of; how tensor and expert parallelism cut it follows from the shapes
of the engine's tensors. Nothing here knows an engine or a model: tables are values, and `causal_rules` is one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from asyncfabric.weights.plan.formats import BLOCK
from asyncfabric.weights.plan.holdings import Held, LocalTensor
from asyncfabric.weights.plan.placement import Placement
from asyncfabric.weights.plan.target import SCALE_SUFFIX, Move, Target

FLOATING = ("bfloat16", "float16", "float32")

Engine = Sequence[Mapping[str, LocalTensor]]
"""The tensors of each rank of an engine, by name; scales of float8 tensors beside them."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    r"""Where the parameters go whose whole name matches.

    Attributes:
        source: regular expression of the trainer's names.
        tensor: the engine's name, with groups of `source` as `\1`; empty: the engine does not want the parameter.
        part: place among the parameters that one tensor is fused of.
        dim: dimension of the parameter along which the parts follow each other.
        pieces: equal pieces along `dim` that the parameter itself is fused of, each of which is cut by itself.
        units: heads of the parameter along `dim`: a rank gets whole ones, and where ranks are more than heads,
            neighbours get the same one; 0: any number of rows.
        transposed: whether the engine has the last two dimensions the other way round.
        expert: number of the group of `source` that is an expert's number, its place in the first dimension of the
            tensor; 0: the parameter belongs to no expert, or has all of them in its own first dimension.
        convert: name of the conversion that the engine's rank makes of what arrives; empty: it arrives in the element
            type of the engine's tensor.
        arrives: with `convert`: the element type that it arrives in; empty: that of the trainer.
    """

    source: str
    tensor: str = r"\g<0>"
    part: int = 0
    dim: int = 0
    pieces: int = 1
    units: int = 0
    transposed: bool = False
    expert: int = 0
    convert: str = ""
    arrives: str = ""

    def __post_init__(self) -> None:
        """Refuse an expression that cannot be compiled; raises ValueError."""
        try:
            re.compile(self.source)
        except re.error as error:
            raise ValueError(f"the rule's source {self.source!r} is no regular expression: {error}") from None
        if self.arrives and not (self.convert and self.arrives in FLOATING):
            raise ValueError(f"arrives={self.arrives!r} needs a conversion, and is one of {FLOATING}")


SAME_NAMES = (Rule(source=".*"),)
"""For an engine that names its tensors as the trainer does, and fuses none."""


def causal_rules(heads: int, kv_heads: int) -> tuple[Rule, ...]:
    """Return the table of causal models as vLLM and SGLang lay them out: Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma.

    Args:
        heads: attention heads of the model.
        kv_heads: heads of keys and values.
    """
    attention, mlp, experts = r"(.*\.self_attn\.)", r"(.*\.)", r"(.*\.(?:mlp|block_sparse_moe)\.experts\.)"
    of_qkv = r"\1qkv_proj.\2"
    of_gate_up = r"\1gate_up_proj.\2"
    one = experts + r"(\d+)\."
    return (
        Rule(source=attention + r"q_proj\.(weight|bias)", tensor=of_qkv, part=0, units=heads),
        Rule(source=attention + r"k_proj\.(weight|bias)", tensor=of_qkv, part=1, units=kv_heads),
        Rule(source=attention + r"v_proj\.(weight|bias)", tensor=of_qkv, part=2, units=kv_heads),
        Rule(source=one + r"(?:gate_proj|w1)\.weight", tensor=r"\1w13_weight", part=0, expert=2),
        Rule(source=one + r"(?:up_proj|w3)\.weight", tensor=r"\1w13_weight", part=1, expert=2),
        Rule(source=one + r"(?:down_proj|w2)\.weight", tensor=r"\1w2_weight", expert=2),
        Rule(source=experts + "gate_up_proj", tensor=r"\1w13_weight", dim=1, pieces=2),
        Rule(source=experts + "down_proj", tensor=r"\1w2_weight", dim=1),
        Rule(source=mlp + r"gate_proj\.(weight|bias)", tensor=of_gate_up, part=0),
        Rule(source=mlp + r"up_proj\.(weight|bias)", tensor=of_gate_up, part=1),
        *SAME_NAMES,
    )


def moves_by_rules(
    held: Mapping[str, Held],
    engine: Engine,
    rules: Sequence[Rule] = SAME_NAMES,
    tied: Sequence[Sequence[str]] = (),
    conversions: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Move]:
    """Return what brings a trainer's parameters into an engine's tensors.

    Where the engine's tensor is larger than what comes, as a vocabulary that is rounded up, the parameter lies at its
    origin and the tensor of the plan is only as large as that. The engine's element type decides about casts;
    float8_e4m3fn is quantised in blocks of 128 x 128, and its scales are the tensor `name + SCALE_SUFFIX`.

    Args:
        held: of the trainer, from `held_by`.
        engine: the tensors of each rank.
        rules: the first that matches counts.
        tied: groups of the engine's names that stand for one tensor: it is enough that one of them is filled.
        conversions: by name that rules may have in `convert`: suffixes of the engine's tensors that it fills.

    Raises:
        ValueError: a parameter or an engine's tensor that no rule knows, or shapes that cannot be brought together; the
            text names the tensor, and what would have to fit into what.
    """
    if not engine:
        raise ValueError("an engine has one rank or more, and none was given")
    groups = _grouped(held, rules)
    filled = set(groups)
    for tensor, name in _converted(groups).items():
        if name not in conversions:
            raise ValueError(f"{tensor}: a rule names the conversion {name!r}, known are {sorted(conversions)}")
        filled.update(tensor + suffix for suffix in conversions[name])
    _check_all_filled(groups, filled, engine, tied)
    return [move for tensor, experts in groups.items() for move in _Tensor(tensor, engine, experts).moves()]


def conversions_by_rules(held: Mapping[str, Held], rules: Sequence[Rule]) -> dict[str, str]:
    """Return the name of the conversion of each tensor of an engine that has one.

    Raises:
        ValueError: no rule knows a parameter, or those of one tensor name several conversions.
    """
    return _converted(_grouped(held, rules))


class _Part(NamedTuple):
    """One run of a parameter along `rule.dim`, which is cut by itself."""

    name: str
    held: Held
    rule: Rule
    begin: int
    length: int


class _Cut(NamedTuple):
    """What a rank gets of one dimension, or of one part of it."""

    begin: int
    length: int


_Groups = Mapping[str, Mapping[int, "list[_Part]"]]
"""By tensor and expert, -1 for none: the parts of it."""


def _grouped(held: Mapping[str, Held], rules: Sequence[Rule]) -> _Groups:
    table = [(re.compile(rule.source), rule) for rule in rules]
    groups: dict[str, dict[int, list[_Part]]] = {}
    for name, one in held.items():
        found = next(((match, rule) for known, rule in table if (match := known.fullmatch(name))), None)
        if found is None:
            raise ValueError(f"{name}: no rule states where the engine wants it; a rule with tensor='' leaves it out")
        match, rule = found
        if tensor := match.expand(rule.tensor):
            expert = int(match[rule.expert]) if rule.expert else -1
            groups.setdefault(tensor, {}).setdefault(expert, []).extend(_parts_of(name, one, rule))
    return groups


def _converted(groups: _Groups) -> dict[str, str]:
    found = {}
    for tensor, experts in groups.items():
        names = {part.rule.convert for parts in experts.values() for part in parts}
        if len(names) > 1:
            raise ValueError(f"{tensor}: the rules of its parts name several conversions: {sorted(names)}")
        if name := names.pop():
            found[tensor] = name
    return found


def _parts_of(name: str, held: Held, rule: Rule) -> Iterator[_Part]:
    shape = held.placement.shape
    if rule.dim >= len(shape) or shape[rule.dim] % rule.pieces:
        raise ValueError(f"{name} of shape {shape} cannot be cut into {rule.pieces} pieces along dimension {rule.dim}")
    length = shape[rule.dim] // rule.pieces
    for piece in range(rule.pieces):
        yield _Part(name, held, rule, piece * length, length)


def _check_all_filled(
    groups: Mapping[str, object], filled: Set[str], engine: Engine, tied: Sequence[Sequence[str]]
) -> None:
    names = {name for rank in engine for name in rank}
    scales = {tensor + SCALE_SUFFIX for tensor in groups}
    if absent := sorted(filled - names):
        raise ValueError(f"the rules name {absent[0]}, which no rank of the engine has ({len(absent)} of such tensors)")
    with_another = {name for alike in tied if any(each in filled for each in alike) for name in alike}
    if left := sorted(names - filled - scales - with_another):
        raise ValueError(
            f"nothing of the trainer goes into {left[0]} ({len(left)} of such tensors): it would keep old weights. "
            "Name it in a rule, or do not give it, as buffers and views of what another name fills"
        )


class _Tensor:
    """One tensor of the engine, and the ranks that have it."""

    def __init__(self, name: str, engine: Engine, experts: Mapping[int, list[_Part]]) -> None:
        self._name = name
        self._parts = experts
        self._rooms = {rank: found for rank, one in enumerate(engine) if (found := one.get(name)) is not None}
        dtypes = {room.dtype for room in self._rooms.values()}
        if len(dtypes) > 1:
            raise ValueError(f"{name}: ranks of the engine have it in {sorted(dtypes)}")
        arriving = {
            part.rule.arrives or part.held.dtype for parts in experts.values() for part in parts if part.rule.convert
        }
        if len(arriving) > 1:
            raise ValueError(f"{name}: what is converted arrives in {sorted(arriving)}; rules can name one type for it")
        self._dtype = next(iter(arriving or dtypes))
        self._experts = len(experts)

    def moves(self) -> Iterator[Move]:
        for expert, parts in sorted(self._parts.items()):
            ordered = sorted(parts, key=lambda part: (part.rule.part, part.begin))
            places = [(one.rule.part, one.begin) for one in ordered]
            if any(one == other for one, other in pairwise(places)):
                raise ValueError(f"{self._name}: {ordered[0].name} and another parameter are the same part of it")
            yield from self._moves_of(ordered, expert)

    def _moves_of(self, parts: list[_Part], expert: int) -> Iterator[Move]:
        rows: list[list[tuple[int, tuple[_Cut, ...], list[int], list[int]]]] = [[] for _ in parts]
        for number, (rank, room) in enumerate(self._rooms.items()):
            slot = self._slot(expert, number)
            if slot is None:
                continue
            boxes = self._boxes(parts, room.shape if expert < 0 else room.shape[1:], number)
            extent = _extent(parts, boxes)
            at = 0
            for row, part, box in zip(rows, parts, boxes, strict=True):
                origin = [0] * len(extent)
                origin[_turned(part.rule.dim, part)] = at
                at += box[part.rule.dim].length
                lead = ([slot], [room.shape[0]]) if expert >= 0 else ([], [])
                if all(cut.length for cut in box):
                    row.append((rank, box, lead[0] + origin, lead[1] + extent))
        for part, row in zip(parts, rows, strict=True):
            if row:
                yield self._move(part, row, 1 if expert >= 0 else 0)

    def _slot(self, expert: int, number: int) -> int | None:
        """Return an expert's place at the number-th rank that has the tensor; None: another rank has the expert."""
        if expert < 0:
            return 0
        lengths = [room.shape[0] for room in self._rooms.values()]
        if lengths[number] == self._experts:
            return expert
        if sum(lengths) % self._experts:
            raise ValueError(f"{self._name}: the trainer has {self._experts} experts, the engine's ranks {lengths}")
        first = sum(lengths[:number]) % self._experts
        return expert - first if first <= expert < first + lengths[number] else None

    def _boxes(self, parts: list[_Part], room: tuple[int, ...], number: int) -> list[tuple[_Cut, ...]]:
        shape = parts[0].held.placement.shape
        if len(room) != len(shape) or any(len(part.held.placement.shape) != len(shape) for part in parts):
            raise ValueError(f"{self._name}: {parts[0].name} has shape {shape}, the engine's tensor {room}")
        room = tuple(room[_turned(dim, parts[0])] for dim in range(len(shape)))  # in dimensions of the parameters
        along = parts[0].rule.dim
        others = {dim: self._even(parts[0], shape[dim], room[dim], number) for dim in range(len(shape)) if dim != along}
        runs = self._runs(parts, room[along], number)
        return [tuple(run if dim == along else others[dim] for dim in range(len(shape))) for run in runs]

    def _even(self, part: _Part, length: int, room: int, number: int) -> _Cut:
        """Cut a dimension into parts as long as the room for them; the last one may be shorter, or empty."""
        ways = self._ways(part, -(-length // room))
        begin = min(number % ways * room, length)
        return _Cut(begin, min(room, length - begin))

    def _runs(self, parts: list[_Part], room: int, number: int) -> list[_Cut]:
        """Return what a rank gets of each part: all of it, or an equal share in whole units, as the room has it."""
        first = parts[0]
        if len(parts) == 1 and not first.rule.units:
            return [self._even(first, first.length, room, number)]
        for ways in range(1, len(self._rooms) + 1):
            if len(self._rooms) % ways == 0:
                runs = [_share(part, ways, number % ways) for part in parts]
                if None not in runs and sum(run.length for run in runs if run is not None) == room:
                    return [run for run in runs if run is not None]
        lengths = " + ".join(f"{part.length} of {part.name}" for part in parts)
        raise ValueError(f"{self._name}: its {room} rows are no share of {lengths} among {len(self._rooms)} ranks")

    def _ways(self, part: _Part, ways: int) -> int:
        if len(self._rooms) % ways:
            raise ValueError(
                f"{self._name}: {part.name} has shape {part.held.placement.shape}, which would have to be cut {ways} "
                f"ways to fit, and {len(self._rooms)} ranks have the tensor"
            )
        return ways

    def _move(self, part: _Part, row: list[tuple[int, tuple[_Cut, ...], list[int], list[int]]], lead: int) -> Move:
        ranks = np.array([rank for rank, _, _, _ in row], np.int64)
        starts = np.array([[cut.begin for cut in box] for _, box, _, _ in row], np.int64)
        sizes = np.array([[cut.length for cut in box] for _, box, _, _ in row], np.int64)
        wanted = Placement(part.held.placement.shape, ranks, starts, sizes)
        axes = tuple(lead + _turned(dim, part) for dim in range(len(part.held.placement.shape)))
        origins = np.array([origin for _, _, origin, _ in row], np.int64)
        extents = np.array([extent for _, _, _, extent in row], np.int64)
        target = Target(wanted, axes, origins, extents)
        block = BLOCK if self._dtype == "float8_e4m3fn" != part.held.dtype else 0
        try:
            return Move(part.name, part.held.dtype, part.held.placement, self._name, self._dtype, target, block)
        except ValueError as error:
            raise ValueError(f"{self._name}: {part.name} does not go into it: {error}") from None


def _turned(dim: int, part: _Part) -> int:
    """Return the dimension of the engine's tensor (without that of experts) for one of the parameter, and back."""
    last = len(part.held.placement.shape) - 1
    return 2 * last - 1 - dim if part.rule.transposed and dim >= last - 1 else dim


def _share(part: _Part, ways: int, place: int) -> _Cut | None:
    """Return one of so many equal shares of a part; None: it cannot be shared so."""
    units = part.rule.units or part.length
    if part.length % units:
        raise ValueError(f"{part.name}: {part.length} rows are not {units} whole heads")
    each = part.length // units
    if units % ways == 0:
        count = units // ways
        return _Cut(part.begin + place * count * each, count * each)
    if part.rule.units and ways % units == 0:
        return _Cut(part.begin + place * units // ways * each, each)
    return None


def _extent(parts: list[_Part], boxes: list[tuple[_Cut, ...]]) -> list[int]:
    """Return the shape that the parts fill together, in dimensions of the engine's tensor."""
    along, dims = parts[0].rule.dim, len(boxes[0])
    extent = [0] * dims
    for dim in range(dims):
        filled = sum(box[dim].length for box in boxes) if dim == along else boxes[0][dim].length
        extent[_turned(dim, parts[0])] = filled
    return extent

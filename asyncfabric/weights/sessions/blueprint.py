"""Blueprint: what a training's ranks hold and an engine's ranks want, and the one plan that rank 0 makes of both.

Event loop's thread; the plan is made in a thread of its own. All ranks wait for it, engines that come later too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.unreadable import UNREADABLE
from asyncfabric.weights.plan.holdings import Holding, LocalTensor, held_by, local_tensors
from asyncfabric.weights.plan.plan import Plan, from_bytes, to_bytes
from asyncfabric.weights.plan.planner import plan_weights
from asyncfabric.weights.plan.rules import Rule, moves_by_rules
from asyncfabric.weights.sessions.join import Join
from asyncfabric.weights.threads import in_thread

Value = TypeVar("Value")

Shape = tuple[str, tuple[int, ...]]
"""Element type and shape of a tensor."""


class Wish(msgspec.Struct, frozen=True):
    """What one rank of an engine has, and how the trainer's parameters go into it.

    Attributes:
        replica: name of the engine.
        rank, ranks: of it, and how many it has.
        tensors: by name.
        rules: as in `moves_by_rules`; those of rank 0 count.
    """

    replica: str
    rank: int
    ranks: int
    tensors: dict[str, Shape]
    rules: tuple[Rule, ...]


class Blueprint(msgspec.Struct, frozen=True):
    """The plan, and for each rank of an engine its tensors and the part of each that a version fills."""

    plan: bytes
    engine: list[dict[str, Shape]]
    filled: list[dict[str, Shape]]


async def put_holdings(join: Join, rank: int, holdings: Sequence[Holding]) -> None:
    """Report what a trainer's rank holds.

    Cancellation: it may have been reported.
    """
    await join.put(f"held/{rank}", msgspec.msgpack.encode(list(holdings)))


async def put_wish(join: Join, wish: Wish) -> None:
    """Report what an engine's rank has.

    Cancellation: it may have been reported.
    """
    number = await join.take_number("wishes")
    await join.put(f"wish/{number}", msgspec.msgpack.encode(wish))


async def put_blueprint(join: Join, world: int, chunk_bytes: int) -> str:
    """Wait for all ranks of the trainer and of the first engine, make the plan, report it; return the engine's name.

    Raises:
        ValueError: the trainer's parameters do not go into the engine's tensors; the engine gets the same text.

    Cancellation: nothing was reported.
    """
    told = [await _read(join, f"held/{rank}", list[Holding]) for rank in range(world)]
    first: Wish | None = None
    wishes: dict[int, Wish] = {}
    number = 0
    while first is None or len(wishes) < first.ranks:
        wish = await _read(join, f"wish/{number}", Wish)
        number += 1
        first = first or wish
        if wish.replica == first.replica:  # ranks of other engines are alike, and look for themselves
            wishes[wish.rank] = wish
    engine = [wishes[rank].tensors for rank in range(first.ranks)]
    try:
        blueprint = await in_thread(_planned, told, engine, wishes[0].rules, chunk_bytes)
    except ValueError as error:
        await join.put("refusal", str(error).encode())
        await join.put("blueprint", b"")
        raise
    await join.put("blueprint", msgspec.msgpack.encode(blueprint))
    return first.replica


async def get_blueprint(join: Join) -> tuple[Plan, Blueprint]:
    """Wait for the plan.

    Raises:
        ValueError: there is none, since the parameters do not go into the engine's tensors.

    Cancellation: only this wait ends.
    """
    if not await join.get("blueprint"):
        raise ValueError((await join.get("refusal")).decode(errors="replace"))
    blueprint = await _read(join, "blueprint", Blueprint)
    return await in_thread(from_bytes, blueprint.plan), blueprint


def check_alike(wish: Wish, blueprint: Blueprint) -> None:
    """Raise ValueError naming what an engine has otherwise than the first one."""
    if wish.ranks != len(blueprint.engine):
        raise ValueError(f"{wish.replica} has {wish.ranks} ranks, the first engine has {len(blueprint.engine)}")
    first = blueprint.engine[wish.rank]
    for name in sorted(first.keys() | wish.tensors.keys()):
        if first.get(name) != wish.tensors.get(name):
            raise ValueError(
                f"{name}: rank {wish.rank} of {wish.replica} has {wish.tensors.get(name, 'no such tensor')}, the first "
                f"engine has {first.get(name, 'no such tensor')}; all engines of a training are laid out alike"
            )


def _planned(
    told: Sequence[Sequence[Holding]], engine: Sequence[Mapping[str, Shape]], rules: Sequence[Rule], chunk_bytes: int
) -> Blueprint:
    rooms = [{name: LocalTensor(*shape) for name, shape in tensors.items()} for tensors in engine]
    moves = moves_by_rules(held_by(told), rooms, rules)
    plan = plan_weights(moves, trainers=len(told), receivers=len(engine), replicas=(), chunk_bytes=chunk_bytes)
    filled: list[dict[str, Shape]] = [
        {name: (one.dtype, one.shape) for name, one in local_tensors(moves, rank).items()}
        for rank in range(len(engine))
    ]
    return Blueprint(to_bytes(plan), [dict(tensors) for tensors in engine], filled)


async def _read(join: Join, key: str, kind: type[Value]) -> Value:
    try:
        return msgspec.msgpack.decode(await join.get(key), type=kind)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{key} of the meeting cannot be read: {error}") from None

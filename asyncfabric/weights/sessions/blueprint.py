"""Blueprint: what ranks report to a meeting, and the plan of one layout of engines that rank 0 of the training makes.

Event loop's thread; plans are made in a thread of their own.

    held/R       what rank R of the training holds         wish/N    what a rank of an engine has, the N-th to come
    blueprint/L  the plan of layout L                      answer/N  to the N-th: its layout, or why it has none
    joined/N     the N-th takes part                          version/V  the layouts that version V goes to
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.unreadable import UNREADABLE
from asyncfabric.weights.plan.holdings import Holding, LocalTensor, held_by, local_tensors
from asyncfabric.weights.plan.plan import Plan, from_bytes, to_bytes
from asyncfabric.weights.plan.planner import plan_weights
from asyncfabric.weights.plan.rules import Rule, conversions_by_rules, moves_by_rules
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
        rules, tied, conversions: as in `moves_by_rules`; those of rank 0 count.
        in_place: versions arrive in its tensors.
    """

    replica: str
    rank: int
    ranks: int
    tensors: dict[str, Shape]
    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    conversions: dict[str, tuple[str, ...]] = {}
    in_place: bool = False


class JoinAnswer(msgspec.Struct, frozen=True):
    """The answer to a wish: the number of the engine's layout, or why it has none."""

    layout: int = -1
    refusal: str = ""


class Blueprint(msgspec.Struct, frozen=True):
    """The plan of one layout of engines, and for each rank the part of each tensor that a version fills.

    `converted`: the conversion of each tensor that has one. `in_place`: versions arrive in the engines' own tensors.
    `refusal`: of the first engine: why there is no plan.
    """

    plan: bytes = b""
    filled: list[dict[str, Shape]] = []
    converted: dict[str, str] = {}
    in_place: bool = False
    refusal: str = ""


async def put_holdings(join: Join, rank: int, holdings: Sequence[Holding]) -> None:
    """Report what a trainer's rank holds.

    Cancellation: it may have been reported.
    """
    await put(join, f"held/{rank}", list(holdings))


async def get_holdings(join: Join, world: int) -> list[list[Holding]]:
    """Wait for what all ranks of the training hold.

    Cancellation: only this wait ends.
    """
    return [await read(join, f"held/{rank}", list[Holding]) for rank in range(world)]


async def put_wish(join: Join, wish: Wish) -> int:
    """Report what an engine's rank has; return the number of the wish.

    Cancellation: it may have been reported.
    """
    number = await join.take_number("wishes")
    await put(join, f"wish/{number}", wish)
    return number


async def get_answer(join: Join, number: int) -> tuple[int, Plan, Blueprint]:
    """Wait until the training is ready for the engine of a wish; return the number of its layout, and its plan.

    Raises:
        ValueError: the trainer's parameters do not go into the engine's tensors.

    Cancellation: only this wait ends.
    """
    answer = await read(join, f"answer/{number}", JoinAnswer)
    if answer.refusal:
        raise ValueError(answer.refusal)
    return (answer.layout, *await get_blueprint(join, answer.layout))


async def get_confirmation(join: Join, number: int) -> None:
    """Wait until the engine of a wish takes part in the updates of its layout: later versions come to it.

    Cancellation: only this wait ends.
    """
    await read(join, f"joined/{number}", bool)


async def get_blueprint(join: Join, layout: int) -> tuple[Plan, Blueprint]:
    """Wait for the plan of a layout.

    Raises:
        ValueError: the first engine is refused, and so there is none.

    Cancellation: only this wait ends.
    """
    blueprint = await read(join, f"blueprint/{layout}", Blueprint)
    if blueprint.refusal:
        raise ValueError(blueprint.refusal)
    return await in_thread(from_bytes, blueprint.plan), blueprint


def planned(reported: Sequence[Sequence[Holding]], engine: Sequence[Wish], chunk_bytes: int) -> tuple[Plan, Blueprint]:
    """Make the plan of an engine; raises ValueError where the trainer's parameters do not go into its tensors."""
    rooms = [{name: LocalTensor(*shape) for name, shape in wish.tensors.items()} for wish in engine]
    held, first = held_by(reported), engine[0]
    if any(wish.in_place != first.in_place for wish in engine):
        raise ValueError(f"some ranks of {first.replica} have shadow='none', and others do not: give all of them one")
    moves = moves_by_rules(held, rooms, first.rules, first.tied, first.conversions)
    plan = plan_weights(moves, trainers=len(reported), receivers=len(engine), replicas=(), chunk_bytes=chunk_bytes)
    filled: list[dict[str, Shape]] = [
        {name: (one.dtype, one.shape) for name, one in local_tensors(moves, rank).items()}
        for rank in range(len(engine))
    ]
    return plan, Blueprint(to_bytes(plan), filled, conversions_by_rules(held, first.rules), first.in_place)


async def put(join: Join, key: str, value: object) -> None:
    """Write a value that others wait for.

    Cancellation: it may have been written.
    """
    await join.put(key, msgspec.msgpack.encode(value))


async def read(join: Join, key: str, kind: type[Value]) -> Value:
    """Wait for a value.

    Raises:
        RemoteProtocolError: what is there is none of this kind.

    Cancellation: only this wait ends.
    """
    try:
        return msgspec.msgpack.decode(await join.get(key), type=kind)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{key} of the meeting cannot be read: {error}") from None

"""Conductor: orders the same steps from all expert nodes of a group, decides alone who is left out. On the event loop.

An exchange wants all ranks to do the same steps, and those who are left to agree on who is not: one who orders all of
them has both. Loads no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from asyncfabric.actors import ActorDied, Member, Message, Node, Reference, RemoteError
from asyncfabric.errors import BrokenError, PeerError
from asyncfabric_services.experts.messages import EXPERT, LeaveOut, Seated, SeatExpert, Speak, SpokenTokens

MOST_ATTEMPTS = 8

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Departure:
    """Ranks that were left out at once, and why.

    Attributes:
        ranks: who.
        because: what the others reported of them.
        seconds: from the question until all others went on without them.
    """

    ranks: tuple[int, ...]
    because: str
    seconds: float


class Conductor:
    """One group. `nursery` outlives its questions: one to a dead node ends when the node is known to be dead.

    Attributes:
        members: the nodes by rank.
        present: the ranks that take part.
        departures: who was left out so far.
    """

    def __init__(self, node: Node, nursery: trio.Nursery, members: Sequence[Member], group: str, patience: float):
        self.members = tuple(members)
        self.present = list(range(len(self.members)))
        self.departures: list[Departure] = []
        self._node = node
        self._nursery = nursery
        self._group = group
        self._patience = patience
        self._most_tokens = self._vocabulary = 0

    async def seat(self) -> list[Seated]:
        """Bring the group together, and return what each node has.

        Raises BrokenError when a node cannot join.

        Cancellation: the nodes may be in the group.
        """
        addresses = [member.fabric_address for member in self.members]
        answers, failures = await self._ask(
            self.present, lambda rank: SeatExpert(self._group, rank, addresses, self._patience), lambda _: False
        )
        if failures:
            raise BrokenError(f"the group did not come together: {_listed(failures)}")
        seated = [answers[rank] for rank in self.present]
        self._most_tokens = min(each.most_tokens for each in seated)
        self._vocabulary = min(each.vocabulary for each in seated)
        return seated

    async def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """Return the greedy answers to prompts, `count` tokens each; goes on without ranks that are missing.

        Raises ValueError for a prompt that no node takes, BrokenError when steps fail again and again.

        Cancellation: the nodes end the step that they were given, then wait for the next.
        """
        for prompt in prompts:
            if not 0 < len(prompt) <= self._most_tokens or not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
                raise ValueError(
                    f"expected 1..{self._most_tokens} token ids below {self._vocabulary}, got {len(prompt)} of them"
                )
        answers: list[list[int]] = []
        attempts = 0
        while len(answers) < len(prompts):
            turn = dict(zip(self.present, prompts[len(answers) :], strict=False))
            reported = await self._step(turn, count)
            if reported is not None:
                answers += [reported[rank].tokens for rank in turn]
                attempts = 0
            elif (attempts := attempts + 1) == MOST_ATTEMPTS:
                raise BrokenError(f"{attempts} steps failed one after the other: {self.departures[-1].because}")
        return answers

    async def _step(self, turn: dict[int, list[int]], count: int) -> dict[int, SpokenTokens] | None:
        """Return what each rank answered; or leave out who was missing, and return None."""
        began = trio.current_time()
        answers, failures = await self._ask(
            self.present, lambda rank: Speak(turn.get(rank, []), count, self._patience), _all_others_answered
        )
        missing = [answer for answer in answers.values() if answer.missing]
        if not missing and not failures:
            return answers
        # Who answered is there, whatever others report of it; who did not, and is missed or failed, is not.
        gone = (set(failures) | {rank for answer in missing for rank in answer.missing}) - set(answers)
        because = "; ".join(sorted({answer.because for answer in missing})) or _listed(failures)
        self.present = [rank for rank in self.present if rank not in gone]
        if not self.present:
            raise BrokenError(f"no expert node is left: {because}")
        _, refused = await self._ask(self.present, lambda _: LeaveOut(sorted(gone), self._patience), lambda _: False)
        self.departures.append(Departure(tuple(sorted(gone)), because, trio.current_time() - began))
        _log.info("ranks are left out", extra={"fields": {"ranks": sorted(gone), "because": because}})
        if refused:
            raise BrokenError(f"the others could not go on: {_listed(refused)}")
        return None

    async def _ask(
        self,
        ranks: Sequence[int],
        message_of: Callable[[int], Message[Answer]],
        enough: Callable[[dict[int, Answer | None]], bool],
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Ask ranks side by side; returns (answers, failures) when all have answered or failed.

        Once it is `enough`, the rest has `patience` left: who is named as missing may be an innocent that shared a
        write with a dead one, and reports that soon; the control plane knows some seconds later who is dead.
        """
        answers: dict[int, Answer] = {}
        failures: dict[int, str] = {}
        received = trio.Event()

        async def one(rank: int) -> None:
            try:
                answers[rank] = await self._node.ask(
                    Reference(self.members[rank].identity, EXPERT, 0), message_of(rank)
                )
            except (ActorDied, RemoteError, PeerError) as error:
                failures[rank] = str(error)
            received.set()

        for rank in ranks:
            self._nursery.start_soon(one, rank)
        with trio.CancelScope() as scope:
            while len(answers) + len(failures) < len(ranks):
                if enough({rank: answers.get(rank) for rank in ranks if rank not in failures}):
                    scope.deadline = min(scope.deadline, trio.current_time() + self._patience)
                await received.wait()
                received = trio.Event()
        return dict(answers), dict(failures)


def _all_others_answered(answers: dict[int, SpokenTokens | None]) -> bool:
    """Whether those who did not answer are all missed by some who did."""
    missed = {rank for answer in answers.values() if answer is not None for rank in answer.missing}
    silent = {rank for rank, answer in answers.items() if answer is None}
    return bool(silent) and silent <= missed


def _listed(failures: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))

"""Replica: what an engine holds of one receiver: the version that serves, its tensors, and the step boundary.

Runs on the event loop's thread. `step_boundary` is the only place where what serves changes (WC-5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from asyncfabric import ClosedError, Fabric
from asyncfabric._groups import beside
from asyncfabric.weights.channel import WeightChannel, receiver_name
from asyncfabric.weights.coding.choice import Coding, Rule, known_codings
from asyncfabric.weights.memory.device import HOST, Memory
from asyncfabric.weights.memory.host import device_of
from asyncfabric.weights.memory.rows import TensorLayout, layout_of
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.coded_forwarding import ForwardCodings
from asyncfabric.weights.receiver.copies import open_copies, open_copy_in
from asyncfabric.weights.receiver.receiving import Participant
from asyncfabric.weights.receiver.slots import CODING_BYTES, open_slots
from asyncfabric.weights.receiver.versions import Versions

Tensors = dict[str, Memory]
"""By name: bytes, an array of numpy in host memory, a tensor of torch on a GPU."""


class WeightReplica:
    """One receiver; made by `async with open_replica(...)`.

    Attributes:
        name, receiver: which receiver of which replica.
        layout: where its tensors lie in a copy.
    """

    def __init__(self, here: Participant, versions: Versions) -> None:
        """Not for users: `async with open_replica(...)`."""
        self.name: str = here.replica
        self.receiver: int = here.receiver
        self.layout: TensorLayout = layout_of(here.plan, here.receiver)
        self._versions = versions

    @property
    def refusal(self) -> str:
        """Why the coordinator lets this receiver take part in nothing, empty while it does."""
        return self._versions.refusal.reason

    @property
    def failure(self) -> str:
        """Why the last version that could not be received was given up, empty for none."""
        return self._versions.failure

    def current_version(self) -> int:
        """Return the version that serves, 0 for none."""
        return self._versions.serving

    @property
    def held_version(self) -> int:
        """The latest version that is decided and whole here; it serves from the next `step_boundary()`, 0 for none."""
        return self._versions.machine.held

    @property
    def serving_copy(self) -> int:
        """Which of `copies` serves, -1 for none."""
        return self._versions.serving_copy

    @property
    def copies(self) -> list[Tensors]:
        """The tensors of each copy, as bytes, to make views of once; only those of `serving_copy` are whole."""
        return [copy.tensors for copy in self._versions.copies]

    @property
    def memories(self) -> list[Memory]:
        """All bytes of each of `copies`."""
        return [copy.memory for copy in self._versions.copies]

    def tensors(self) -> Tensors:
        """Return the bytes of the tensors that serve; empty when none do. Valid until the next `step_boundary()`."""
        return self._versions.copies[self._versions.serving_copy].tensors if self._versions.serving_copy >= 0 else {}

    def step_boundary(self) -> int:
        """Announce that no step reads the tensors now: what is decided serves (WC-5), what waits may be overwritten.

        Returns the version that serves until the next call; 0 for none, then do not step.

        Raises:
            ClosedError: the replica was left, and its memory with it.
            InternalError: what was decided is in no copy. What served before serves on.
        """
        self._versions.flip()
        return self._versions.serving

    @property
    def waits_for_boundary(self) -> bool:
        """Whether the next `step_boundary()` changes anything."""
        return self._versions.machine.waits_for_flip

    @property
    def coming(self) -> int:
        """In the caller's memory: a version that waits for the caller to let it in, 0 for none."""
        return self._versions.coming

    async def let_in(self) -> int:
        """In the caller's memory, while nobody uses it: let the version that waits come; return which one serves.

        It is like `step_boundary()`, and returns when the version is whole and decided, or at once where none waits.

        Raises:
            BrokenError: it was cut off, and the memory holds parts of several versions. Nothing comes into it any more
                until this is called again.
            ClosedError, InternalError: as `step_boundary`.

        Cancellation: only this wait ends; bytes may go on coming into the memory until this was called again.
        """
        if self.coming:
            self._versions.flip()
            await self._versions.arrived()
        return self._versions.serving

    async def wait_version(self, version: int) -> int:
        """Return the version that is held, once it is this one or a later one.

        It serves from the next `step_boundary()` at the latest.

        Raises:
            ClosedError: no more updates come, since the channel is closed.

        Cancellation: only this wait ends.
        """
        while self.held_version < version:
            self._check_open()
            await self._versions.changed.wait()
        return self.held_version

    async def wait_coming(self) -> int:
        """In the caller's memory: return the version that waits to be let in, once there is one.

        Raises:
            ClosedError: no more updates come, since the channel is closed.

        Cancellation: only this wait ends.
        """
        while not self.coming:
            self._check_open()
            await self._versions.changed.wait()
        return self.coming

    def _check_open(self) -> None:
        if self._versions.ended:
            raise ClosedError(f"{self.name}/{self.receiver} receives no more versions: {self._versions.ended}")

    async def wait_changed(self) -> None:
        """Return when a `step_boundary()` is waited for.

        Cancellation: only this wait ends.
        """
        while not self.waits_for_boundary:
            await self._versions.changed.wait()


@asynccontextmanager
async def open_replica(
    fabric: Fabric,
    channel: WeightChannel,
    plan: Plan,
    name: str,
    receiver: int,
    *,
    shadow: bool = True,
    own: Mapping[str, Memory] | None = None,
    codings: Iterable[str] = (),
    coding: Rule = "auto",
    coding_bytes: int = CODING_BYTES,
    device: str = HOST,
) -> AsyncIterator[WeightReplica]:
    """Open one receiver of a replica: memory for its tensors, and its part in every update.

    Args:
        fabric: that it is reached through.
        channel: of `receiver_name(name, receiver)`; it is the replica's to receive from.
        plan: moves and relay; its replicas do not matter, the coordinator states who takes part.
        name: of the replica.
        receiver: rank within it.
        shadow: two copies, a version serves while the next one arrives. Else one: steps stop meanwhile.
        own: memory of the caller, by tensor: contiguous bytes on `device`, none in two of them. No shadow then:
            versions come into it, and into memory beside for other tensors, while the caller waits in `let_in`, and
            nothing is written at any other time. Trainers are opened with `gather=False`.
        codings: that trainers, and receivers that forward to this one, may use: "delta" (with a shadow only),
            "exponent". They do where they measure that it pays; see `open_publisher`. What this one forwards may be in
            the same ones.
        coding: of what it forwards: "auto" uses one where it was measured to be faster, "always" where both ends can.
        coding_bytes: memory for coded rows beside the copies, shared out to those who send in two slots each.
        device: where the tensors are: "cpu", or "cuda:N" of a fabric that has a rail of that GPU; `tensors()` are
            tensors of torch there. Codings are for "cpu" only.

    Raises:
        ValueError: there is no such rank, a coding is not known, or codings are wanted on a GPU.
        DeviceError: no memory left.

    Cancellation: what is under way drains (INV-2), the memory is released, then it goes on.
    """
    if not 0 <= receiver < plan.receivers:
        raise ValueError(f"receiver must be in 0..{plan.receivers - 1}, got {receiver}")
    place = device_of(device)
    wanted = known_codings(codings)
    if wanted and place.name != HOST:
        raise ValueError(f"codings are read in host memory only, and the tensors of {name} are to be on {place.name}")
    in_place = own is not None or not shadow
    reads = wanted - ({Coding.DELTA} if in_place else set())  # in place the base would be overwritten
    async with (
        open_copies(fabric, layout_of(plan, receiver), 1 if in_place else 2, place)
        if own is None
        else open_copy_in(fabric, plan, receiver, own, place) as copies,
        open_slots(fabric, reads, coding_bytes) as slot_memory,
        beside() as tasks,
    ):
        forwards = ForwardCodings(fabric, receiver_name(name, receiver), reads, coding) if reads else None
        here = Participant(fabric, channel, plan, name, receiver, tasks)
        versions = Versions(here, copies, slot_memory, forwards, paused=own is None)
        tasks.start_soon(versions.run)
        try:
            yield WeightReplica(here, versions)
        finally:
            versions.leave()

"""Request: one transfer of an agent, which can be posted again and again; its states and its note.

Any thread; several may look at one request. It is done when all bytes are where they belong and its note is on its
way; the target's program sees the note after the data. A noted WRITE sends its note together with the bytes while the
target has a slot for it (note_exchange.py), otherwise at its end; one that fails or is cancelled withdraws it. A failed
or cancelled one ends only when nothing touches its memory.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from time import monotonic_ns
from typing import TYPE_CHECKING

from asyncfabric.errors import BusyError, FabricError
from asyncfabric.integrations.nixl.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    translated,
)
from asyncfabric.integrations.nixl.kinds import nixl_xfer_op_t
from asyncfabric.integrations.nixl.note_exchange import went_well

if TYPE_CHECKING:
    from asyncfabric import blocking
    from asyncfabric.integrations.nixl.core import AgentCore
    from asyncfabric.integrations.nixl.note_slots import NoteSlot
    from asyncfabric.integrations.nixl.plan import AnyStep
    from asyncfabric.integrations.nixl.remotes import RemoteAgent

_NEW, _ACTIVE, _DONE, _FAILED, _RELEASED = range(5)


class Request:
    """A transfer that was made; not posted yet."""

    __slots__ = (
        "_begun_ns",
        "_core",
        "_dispatcher",
        "_early",
        "_ended_ns",
        "_exchange",
        "_fabric",
        "_failure",
        "_lock",
        "_note",
        "_note_due",
        "_on_gpu",
        "_posted_ns",
        "_remote",
        "_slots",
        "_state",
        "_steps",
        "_transfers",
        "count",
        "operation",
        "total_bytes",
    )

    _begun_ns: int  # the five that post() sets first
    _posted_ns: int
    _ended_ns: int
    _failure: Exception | None
    _note_due: bool

    def __init__(
        self,
        core: AgentCore,
        operation: nixl_xfer_op_t,
        remote: RemoteAgent,
        steps: tuple[AnyStep, ...],
        count: int,
        note: bytes,
    ) -> None:
        self.operation: nixl_xfer_op_t = operation
        self.count: int = count
        self.total_bytes: int = 0
        for step in steps:
            self.total_bytes += step.total_bytes
        self._core = core
        self._exchange = core.exchange
        self._fabric = core.fabric
        self._dispatcher = core.fabric._dispatcher
        self._remote = remote
        self._steps = steps
        self._early = bool(steps) and operation == nixl_xfer_op_t.NIXL_WRITE  # its note may leave with its bytes
        self._on_gpu = self._early and steps[-1].on_gpu
        self._note = note
        self._slots: list[NoteSlot] = []  # the one whose imm its bytes carry; whoever pops it ends it
        self._transfers: list[blocking.Transfer] = []
        self._state = _NEW
        self._lock = Lock()

    @property
    def what(self) -> str:
        """The transfer in words."""
        verb = "WRITE to" if self.operation == nixl_xfer_op_t.NIXL_WRITE else "READ from"
        return f"{verb} agent {self._remote.name!r} of {self.count} descriptors"

    @property
    def times_us(self) -> tuple[int, int, int]:
        """When it was posted last, and how long posting and the whole took, in microseconds.

        Raises:
            nixlNotPostedError: it is not complete.
        """
        if self._state != _DONE and not (self._state == _ACTIVE and self.check()):
            raise nixlNotPostedError(f"{self.what} is not complete; telemetry is there when check_xfer_state() is DONE")
        begun = self._begun_ns
        return begun // 1000, (self._posted_ns - begun) // 1000, (self._ended_ns - begun) // 1000

    def post(self, note: bytes) -> bool:
        """Submit it from the calling thread and return whether it is done already; a note replaces the one it has.

        Raises:
            nixlRepostActiveError: it is under way.
            nixlNotFoundError: its remote agent was removed, or memory of it deregistered.
            nixlRemoteDisconnectError, nixlBackendError: it has failed already.
        """
        with self._lock:
            if self._state == _ACTIVE and not self._advance():
                raise nixlRepostActiveError(f"{self.what} is under way; transfer it again when it is DONE")
            if self._state == _RELEASED:
                raise nixlInvalidParamError(f"{self.what} was released")
            if self._remote.removed:
                raise nixlNotFoundError(
                    f"agent {self._remote.name!r} was removed after {self.what} was made; add it and make it again"
                )
            if note:
                self._note = note
            self._begun_ns = monotonic_ns()
            self._failure = None
            fabric, exchange, transfers = self._fabric, self._exchange, self._transfers
            slots = exchange.slots_for(self._remote, self._note) if self._note and self._early else None
            size = self.total_bytes
            slot = imm = None
            if slots is not None and (self._on_gpu or size > slots.at_once_bytes):
                slot = slots.take()
            if slot is not None:
                imm = slot.imm
                for step in self._steps:
                    slot.count += step.worth
                self._slots.append(slot)
            for step in self._steps:
                while self._failure is None:
                    try:
                        transfers.append(step.submit(fabric, imm))
                        break
                    except BusyError:
                        self._wait_for_room()
                    except (FabricError, TypeError, ValueError) as error:
                        self._fail(translated(error, self.what))
            if self._on_gpu:
                self._dispatcher.assist()  # launches the GPU's copy, which then runs while the note is made
            self._note_due = bool(self._note)
            self._state = _ACTIVE
            self._posted_ns = monotonic_ns()
            if slot is not None and self._failure is None:
                self._note_due = not exchange.send_early(self._remote, slot, self._note)  # together with the bytes
                if self._on_gpu:
                    self._dispatcher.assist()  # a look only takes the completions that are there, if there are any
            done = self._advance()
            if slots is not None and not self._on_gpu:
                slots.learn(size, at_once=done)
        if not done and (self._note_due or self._slots):
            self._core.watch_note(self)
        return done

    def check(self) -> bool:
        """Return whether it is done, False while it is under way.

        Raises:
            nixlNotPostedError: it was never posted.
            nixlInvalidParamError: it was released.
            nixlRemoteDisconnectError, nixlNotFoundError, nixlBackendError: how it failed.
        """
        if self._state == _DONE:
            return True
        with self._lock:
            return self._advance()

    def tend(self) -> bool:
        """Bring it on, for the caretaker; return whether it has ended. Its caller gets the failure."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody brings it on now
        try:
            return self._state != _ACTIVE or self._advance()
        except Exception:
            return True
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """Stop what is not posted yet, without waiting; its note is not sent, or will be withdrawn."""
        self._note_due = False
        self._end_slot(well=False)
        for transfer in tuple(self._transfers):
            transfer.cancel()

    def drained(self) -> bool:
        """Return whether nothing of it touches memory any more, without waiting."""
        return all(transfer.done for transfer in tuple(self._transfers))

    def release(self) -> None:
        """End it: what is under way is cancelled and drained, then nothing touches its memory any more.

        Raises:
            nixlBackendError: something may still touch memory after twice the drain deadline; release it again.
        """
        with self._lock:
            self.cancel()
            self._exchange.flush()
            bound = 2 * self._fabric.config.drain_deadline
            for transfer in self._transfers:
                try:
                    transfer.wait(deadline=bound)
                except TimeoutError as error:
                    raise nixlBackendError(f"{self.what} is cancelled, but not drained: {error}") from None
                except FabricError:
                    pass  # it has ended
            self._transfers.clear()
            self._steps = ()
            self._state = _RELEASED
        self._core.noted.discard(self)

    def _advance(self) -> bool:
        """Take what has ended; under the lock."""
        state = self._state
        if state == _DONE:
            return True
        if state != _ACTIVE:
            self._refuse(state)
        transfers = self._transfers
        while transfers:
            last = transfers[-1]
            if not last.done:
                return False
            transfers.pop()
            if not went_well(last):  # of those that did no result is made
                try:
                    last.result()
                except FabricError as error:
                    self._fail(translated(error, self.what))
        if self._slots:
            self._end_slot(well=self._failure is None)
        if self._failure is None and self._note_due:
            self._note_due = False
            try:
                self._exchange.send(self._remote, self._note)
            except Exception as error:
                self._failure = error
        self._ended_ns = monotonic_ns()
        self._core.noted.discard(self)
        if self._failure is not None:
            self._state = _FAILED
            self._exchange.flush()
            if isinstance(self._failure, nixlRemoteDisconnectError):
                self._remote.disconnected()
            raise self._failure
        self._state = _DONE
        return True

    def _refuse(self, state: int) -> None:
        if state == _NEW:
            raise nixlNotPostedError(f"{self.what} was not posted: call transfer() first")
        if state == _RELEASED:
            raise nixlInvalidParamError(f"{self.what} was released")
        assert self._failure is not None, "failed"
        raise self._failure

    def _end_slot(self, *, well: bool) -> None:
        try:
            slot = self._slots.pop()
        except IndexError:
            return
        self._exchange.end(slot, well)

    def _fail(self, failure: Exception) -> None:
        """Keep the first failure, and stop the rest."""
        if self._failure is None:
            self._failure = failure
            for transfer in self._transfers:
                with suppress(FabricError):
                    transfer.cancel()

    def _wait_for_room(self) -> None:
        try:
            self._core.wait_for_room(self.what)
        except nixlBackendError as error:
            self._fail(error)

"""Serving: what an engine asks a replica: which version serves, its tensors, and when a step boundary is waited for.

Runs on the event loop's thread. `step_boundary` is the only place where what serves changes (WC-5).
"""

from __future__ import annotations

from asyncfabric import ClosedError, InternalError
from asyncfabric._notice import Notice
from asyncfabric.weights.commit.receiver import Effect, Receiver
from asyncfabric.weights.update.copies import Copy
from asyncfabric.weights.update.device import Memory

Tensors = dict[str, Memory]
"""By name: bytes, an array of numpy in host memory, a tensor of torch on a GPU."""


class Serving:
    """The copies of a receiver, and the one of them that serves; the base of WeightReplica."""

    def __init__(self, copies: list[Copy], manifest: str = "") -> None:
        """Serve nothing yet; `manifest` is the digest of the plan without replicas."""
        self._copies = copies
        self._machine = Receiver(in_place=len(copies) == 1, manifest=manifest)
        self._serving = 0
        self._serving_copy = -1
        self._changed = Notice()
        self._closed = False

    def current_version(self) -> int:
        """Return the version that serves, 0 for none."""
        return self._serving

    @property
    def serving_copy(self) -> int:
        """Which of `copies` serves, -1 for none."""
        return self._serving_copy

    @property
    def copies(self) -> list[Tensors]:
        """The tensors of each copy, as bytes, to make views of once; only those of `serving_copy` are whole."""
        return [copy.tensors for copy in self._copies]

    def tensors(self) -> Tensors:
        """Return the bytes of the tensors that serve; empty when none do. Valid until the next `step_boundary()`."""
        return self._copies[self._serving_copy].tensors if self._serving_copy >= 0 else {}

    def step_boundary(self) -> int:
        """Say that no step reads the tensors now: what is decided serves (WC-5), what waits may be overwritten.

        Returns the version that serves until the next call; 0 for none, then do not step.

        Raises:
            ClosedError: the replica was left, and its memory with it.
            InternalError: what was decided is in no copy. What served before serves on.
        """
        if self._closed:
            raise ClosedError("this replica was left, and its memory is released", remedy="step within `open_replica`")
        coming = self._copy_of(self._machine.held_arrival)  # before anything changes
        effects = self._machine.flip()
        serving = self._machine.serving
        if serving != self._serving:
            self._serving = serving
            self._serving_copy = coming if serving else -1
            self._notify()
        self._carry_out(effects)
        return self._serving

    def _copy_of(self, arrival: int) -> int:
        """Return the number of the copy that an arrival completed, -1 for no arrival."""
        if not arrival:
            return -1
        for number, copy in enumerate(self._copies):
            if copy.arrival == arrival:
                return number
        have = [(copy.version, copy.arrival) for copy in self._copies]
        raise InternalError(
            f"version {self._machine.held} came with arrival {arrival}, but the copies hold (version, arrival) {have}",
            remedy="this is a defect of asyncfabric; please report it with this text",
        )

    @property
    def waits_for_boundary(self) -> bool:
        """Whether the next `step_boundary()` changes anything."""
        return self._machine.waits_for_flip

    async def wait_version(self, version: int) -> None:
        """Return when this version, or a later one, serves from the next `step_boundary()` at the latest.

        Cancellation: only this wait ends.
        """
        while self._machine.held < version:
            await self._changed.wait()

    def _free_copy(self) -> Copy:
        """Return the copy that does not serve; in place the machine asks for it when nothing does."""
        return next(copy for number, copy in enumerate(self._copies) if number != self._serving_copy)

    async def wait_changed(self) -> None:
        """Return when a `step_boundary()` is waited for.

        Cancellation: only this wait ends.
        """
        while not self.waits_for_boundary:
            await self._changed.wait()

    def _carry_out(self, effects: list[Effect]) -> None:
        """Do what the machine says."""
        raise NotImplementedError

    def _notify(self) -> None:
        self._changed.tell()

"""The worker's side of the connector: one fabric, the blocks of this worker, what is sent and what is loaded.

The thread of vLLM's worker calls it between and within steps; nothing there waits for another engine. Messages are read
by a thread beside it, since an engine without requests takes no step, and others ask it for blocks all the same. What
both threads use is used under one lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from threading import Lock, Thread

import torch

from asyncfabric import blocking
from asyncfabric.errors import ClosedError
from asyncfabric.integrations.process_fabric import config_in_force
from asyncfabric.integrations.vllm.layout import WorkerBlocks, WorkerRank, read_blocks
from asyncfabric.integrations.vllm.loading import Loadings, Loads
from asyncfabric.integrations.vllm.messages import Cancel, Ended, Mail, Offer
from asyncfabric.integrations.vllm.sending import Sending
from asyncfabric.integrations.vllm.statistics import FabricStats
from asyncfabric.integrations.vllm.steps import ConnectorStep, WorkerAddress


class Working:
    """A worker whose KvCache is registered."""

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        *,
        count: int,
        tokens: int,
        place: WorkerRank,
        lease_s: float,
        load_deadline_s: float,
    ) -> None:
        """Open the fabric and register all layers.

        Raises:
            ValueError: a layout that is not supported; ASYNCFABRIC_RAILS names a malformed rail.
            DeviceError: a rail cannot be opened, or the memory cannot be registered.
        """
        self._stack = ExitStack()
        self._stats: FabricStats = FabricStats()
        self._lock = Lock()
        self._reader = Thread(target=self._read, name="asyncfabric-messages", daemon=True)
        self._stack.callback(self._join)  # called when the fabric is closed
        try:
            self.fabric: blocking.Fabric = self._stack.enter_context(blocking.open_fabric(config_in_force()))
            self._blocks: WorkerBlocks = read_blocks(self.fabric, caches, count, tokens, place)
            self._mail = Mail(self.fabric)
            self._sending = Sending(
                self.fabric, self._mail, self._blocks, tokens, lease_s, self._stats, self._computing_stream
            )
            self._loadings = Loadings(self.fabric, self._mail, self._blocks, load_deadline_s, self._stats)
            self._stack.callback(self._loadings.close)
            self._reader.start()
        except BaseException:
            self._stack.close()
            raise

    @property
    def address(self) -> WorkerAddress:
        """What the scheduler's side has to know of this worker."""
        split = self._blocks.layout.split
        return WorkerAddress(bytes(self.fabric.address), split.order if split is not None else "")

    def begin(self, step: ConnectorStep) -> None:
        """Take a step before its forward pass."""
        with self._lock:
            self._sending.begin(step.computing)
            for request, aborted in step.held.items():
                self._sending.hold(request, aborted)

    def load(self, step: ConnectorStep) -> None:
        """Begin the loads of a step."""
        with self._lock:
            for load in step.loading:
                self._loadings.begin(load)
            for request in step.cancelled:
                self._loadings.cancel(request)
            for source in step.unwanted:
                self._loadings.refuse(source)

    def preempt(self, step: ConnectorStep) -> None:
        """Return when nothing reads blocks that the step overwrites."""
        with self._lock:
            self._sending.preempt(step.preempted)

    def save(self, layer: str) -> None:
        """Push what a step has computed of a layer."""
        number = self._blocks.names.get(layer)
        if number is not None:
            with self._lock:
                self._sending.layer(number)

    def finish_step(self) -> None:
        """Push what was not pushed layer by layer, as with a graph that runs all of them."""
        with self._lock:
            self._sending.finish_step()

    def look(self) -> tuple[set[str], Loads]:
        """Return the requests whose blocks are free to use again, and the loads that have ended."""
        with self._lock:
            return self._sending.advance(), self._loadings.advance()

    def statistics(self) -> FabricStats | None:
        """Return what happened since the last call, None for nothing."""
        with self._lock:
            return self._stats.take()

    def close(self) -> None:
        """Drain and close the fabric. Nothing touches the KvCache afterwards."""
        self._stack.close()

    def _read(self) -> None:
        try:
            for peer, message in self._mail.received():
                with self._lock:
                    match message:
                        case Offer():
                            self._sending.accept(peer, message)
                        case Cancel():
                            self._sending.cancel(peer, message)
                        case Ended():
                            self._loadings.ended(peer, message)
        except ClosedError:
            pass  # the end of the worker

    def _join(self) -> None:
        if self._reader.ident is not None:
            self._reader.join()

    def _computing_stream(self) -> object:
        return torch.cuda.current_stream() if self._blocks.on_gpu else None

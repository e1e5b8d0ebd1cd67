"""SlotLine: an exchange with slots, for callers that combine a step never, once or several times, in any order.

Runs on the caller's thread; calls return when the work is on the current stream. As GpuLine, with halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfabric.integrations.deep_ep.gpu_streams import LaunchOrder, capturing_beside
from asyncfabric.moe.gpu import CudaMoeHandle, CudaSlotExchange
from asyncfabric.moe.gpu.launch import RECEIVE, SEND


@dataclass(eq=False)
class SlotStep:
    """One dispatch to slots.

    Attributes:
        line: that it is of.
        topk_idx: experts of each token.
        handle: of the exchange while the step is open, then None.
        captured: whether it is part of a graph.
        sums: where those of the combine go, once it was sent.
    """

    line: SlotLine
    topk_idx: torch.Tensor
    handle: CudaMoeHandle | None
    captured: bool
    sums: torch.Tensor | None = None


class SlotLine:
    """The steps of one exchange with slots.

    Attributes:
        moe: the exchange.
    """

    def __init__(self, moe: CudaSlotExchange, order: LaunchOrder) -> None:
        """Use an open exchange."""
        self.moe: CudaSlotExchange = moe
        self._order = order
        self._open: list[SlotStep] = []

    def place(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        waited: torch.Tensor | None,
        *,
        whole: bool,
        power_of_two: bool = False,
    ) -> SlotStep:
        """Dispatch, or with `whole` false only send. Closes the oldest step where too many are open.

        x and `power_of_two` are as the exchange takes them.

        Raises:
            ValueError: a graph is being captured, and a step from before the capture is open.
        """
        capturing = capturing_beside(step.captured for step in self._open)
        while len(self._open) >= self.moe.config.in_flight:
            self._close(self._open[0])
        if whole:
            self._receive_up_to(len(self._open))
        with self._order.turn(self.moe.device):
            halves = SEND | RECEIVE if whole else SEND
            handle = self.moe.place(x, topk_idx, power_of_two=power_of_two, waited=waited, halves=halves)
        step = SlotStep(self, topk_idx, handle, capturing)
        self._open.append(step)
        return step

    def receive(self, step: SlotStep) -> None:
        """Receive the rows of a step that was only sent, and those of older ones; nothing where that was done."""
        if step in self._open:
            self._receive_up_to(self._open.index(step) + 1)

    def weigh(
        self,
        step: SlotStep,
        rows: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None,
        waited: torch.Tensor | None,
        *,
        whole: bool,
    ) -> SlotStep:
        """Combine, or with `whole` false only send, and return the step whose `sums` these are.

        That is this one, or where it was sent back or closed before, another with the same routes.
        """
        if step.handle is None or step.handle.returned:
            step = self._again(step)
        self.receive(step)
        for older in self._open[: self._open.index(step)]:
            assert older.handle is not None
            if not older.handle.returned:
                self._close(older)
            elif whole:
                self.finish(older)
        assert step.handle is not None
        with self._order.turn(self.moe.device):
            halves = SEND | RECEIVE if whole else SEND
            step.sums = self.moe.weigh(rows, step.handle, weights, out=out, waited=waited, halves=halves)
        if whole:
            self._forget(step)
        return step

    def finish(self, step: SlotStep) -> None:
        """Receive the sums of a step that was only sent back, and those of older ones; nothing where that was done."""
        while step in self._open:
            oldest = self._open[0]
            assert oldest.handle is not None
            if not oldest.handle.returned:
                self._close(oldest)
                continue
            with self._order.turn(self.moe.device):
                self.moe.combine_recv(oldest.handle, out=oldest.sums)
            self._forget(oldest)

    def forget(self) -> None:
        """Lose the open steps: ranks were excluded."""
        for step in list(self._open):
            self._forget(step)

    def _again(self, step: SlotStep) -> SlotStep:
        """Dispatch the routes of a step once more; the rows are anything, since nobody looks at them."""
        config = self.moe.config
        count = len(step.topk_idx)
        x = torch.empty(count, config.hidden, dtype=config.out_torch, device=self.moe.device)  # cast where it is sent
        return self.place(x, step.topk_idx, None, whole=True)

    def _close(self, step: SlotStep) -> None:
        """Combine the oldest step that is open, with anything; or end its combine."""
        self.receive(step)
        assert step.handle is not None
        if step.handle.returned:
            self.finish(step)
            return
        config, device = self.moe.config, self.moe.device
        rows = torch.empty(len(step.handle.rows), config.hidden, dtype=config.out_torch, device=device)
        weights = torch.empty(step.topk_idx.shape, dtype=torch.float32, device=device)
        with self._order.turn(device):
            self.moe.weigh(rows, step.handle, weights)
        self._forget(step)

    def _receive_up_to(self, end: int) -> None:
        for step in self._open[:end]:
            assert step.handle is not None
            if not step.handle.received:
                with self._order.turn(self.moe.device):
                    self.moe.dispatch_recv(step.handle)

    def _forget(self, step: SlotStep) -> None:
        step.handle = None
        self._open.remove(step)

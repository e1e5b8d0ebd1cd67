"""StepLine: an exchange for programs that block, and that combine a step never, once or several times, in any order.

Runs on the caller's thread, one at a time; the exchange runs on a portal's. An exchange wants each step combined once,
in the order of dispatch, and has a bounded number in flight. Here a step that is in the way is closed with rows of
zeros, and one that was closed is dispatched again. All ranks make the same calls, so all do that at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import torch
from anyio.from_thread import BlockingPortal

from asyncfabric.moe import MissingRankError, MoeExchange, MoeHandle

Result = TypeVar("Result")


@dataclass(eq=False)
class LineStep:
    """One dispatch.

    Attributes:
        line: that it is of.
        indices: experts of each token.
        weights: of each choice.
        handle: of the exchange while the step is open, then None.
        sums: what came back, once it was combined.
    """

    line: StepLine
    indices: torch.Tensor
    weights: torch.Tensor
    handle: MoeHandle | None = None
    sums: torch.Tensor | None = None


class StepLine:
    """The steps of one exchange.

    Attributes:
        moe: the exchange.
        missing: ranks that were lost or late, and are not excluded yet.
    """

    def __init__(self, portal: BlockingPortal, moe: MoeExchange, patience_s: float) -> None:
        """Use an open exchange; one half of a step waits `patience_s` for other ranks."""
        self.moe: MoeExchange = moe
        self.missing: set[int] = set()
        self._portal = portal
        self._patience_s = patience_s
        self._open: list[LineStep] = []

    def send(self, x: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor | None = None) -> LineStep:
        """Begin a step whose choices all have the weight 1; closes the oldest where too many are open."""
        step = LineStep(self, indices, torch.ones(indices.shape, dtype=torch.float32))
        self._send(step, x, scales)
        return step

    def receive(self, step: LineStep) -> MoeHandle:
        """Return the rows of an open step; a second call returns them again."""
        assert step.handle is not None
        for each in self._open[: self._open.index(step) + 1]:
            assert each.handle is not None
            if each.handle.rows is None:
                self._wait(self.moe.dispatch_recv, each.handle)
        return step.handle

    def send_back(self, step: LineStep, rows: torch.Tensor) -> LineStep:
        """Send the outputs back, shape of the step's rows, and return the step in which their sums come.

        That is this one, or where it was sent back or closed before, another with the same routes.
        """
        if step.handle is None or step.handle.returned:
            step = LineStep(self, step.indices, step.weights)
            config = self.moe.config
            count = step.indices.shape[0]
            scales = torch.ones(count, config.scales, dtype=torch.float32) if config.scales else None
            self._send(step, torch.zeros(count, config.hidden, dtype=config.in_torch), scales)
        for older in self._open[: self._open.index(step)]:
            self._return(older, None)
        self._return(step, rows)
        return step

    def receive_back(self, step: LineStep) -> torch.Tensor:
        """Return the sums for the own tokens of a step that was sent back; a second call returns them again."""
        while step in self._open:
            self._close(self._open[0])
        assert step.sums is not None
        return step.sums

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks; open steps are lost."""
        for step in self._open:
            step.handle = None
        self._open.clear()
        self._wait(self.moe.exclude, ranks)
        self.missing -= set(ranks)

    def _send(self, step: LineStep, x: torch.Tensor, scales: torch.Tensor | None) -> None:
        while len(self._open) >= self.moe.config.in_flight:
            self._close(self._open[0])
        step.handle = self._wait(self.moe.dispatch_send, x, step.indices, step.weights, scales)
        self._open.append(step)

    def _return(self, step: LineStep, rows: torch.Tensor | None) -> None:
        handle = self.receive(step)
        assert handle.rows is not None
        if not handle.returned:
            given = torch.zeros(handle.rows.shape, dtype=self.moe.config.out_torch) if rows is None else rows
            self._wait(self.moe.combine_send, given, handle)

    def _close(self, step: LineStep) -> None:
        if step.handle is None:
            return
        self._return(step, None)
        step.sums = self._wait(self.moe.combine_recv, step.handle)
        step.handle = None
        self._open.remove(step)

    def _wait(self, call: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        async def patiently() -> Result:
            with anyio.fail_after(self._patience_s):
                return await call(*arguments)

        try:
            return self._portal.call(patiently)
        except MissingRankError as error:
            self.missing.update(error.ranks)
            raise

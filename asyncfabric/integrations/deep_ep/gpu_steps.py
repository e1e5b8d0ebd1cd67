"""GpuLine: an exchange among GPUs for callers that combine a step never, once or several times, in any order.

Runs on the caller's thread; calls return when the work is on the current stream. As StepLine for host tensors: a step
that is in the way is closed with rows of anything, and one that was closed is dispatched again, at the same call on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfabric.integrations.deep_ep.gpu_streams import LaunchOrder, capturing_beside
from asyncfabric.moe.gpu import CudaMoeHandle, CudaRankExchange


@dataclass(eq=False)
class GpuStep:
    """One dispatch.

    Attributes:
        line: that it is of.
        in_rank: which rank each token goes to.
        handle: of the exchange while the step is open, then None.
        captured: whether it is part of a graph.
        rows: how many came for this rank, where the host knows it.
    """

    line: GpuLine
    in_rank: torch.Tensor
    handle: CudaMoeHandle | None
    captured: bool
    rows: int | None = None


class GpuLine:
    """The steps of one exchange.

    Attributes:
        moe: the exchange.
    """

    def __init__(self, moe: CudaRankExchange, order: LaunchOrder) -> None:
        """Use an open exchange."""
        self.moe: CudaRankExchange = moe
        self._order = order
        self._open: list[GpuStep] = []
        config = moe.config
        self._ones = torch.ones(config.max_tokens, config.top_k, dtype=torch.float32, device=moe.device)

    def send(self, x: torch.Tensor, in_rank: torch.Tensor, words: torch.Tensor | None) -> GpuStep:
        """Dispatch; all choices have the weight 1. Closes the oldest step where too many are open.

        Raises:
            ValueError: a graph is being captured, and a step from before the capture is open.
        """
        capturing = capturing_beside(step.captured for step in self._open)
        while len(self._open) >= self.moe.config.in_flight:
            self._close(self._open[0])
        with self._order.turn(self.moe.device):
            handle = self.moe.dispatch(x, in_rank, self._ones[: len(x)], words)
        step = GpuStep(self, in_rank, handle, capturing)
        self._open.append(step)
        return step

    def send_back(self, step: GpuStep, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums for the own tokens of outputs, one for each row that came; more rows may follow them."""
        if step.handle is None:
            known, config = step.rows, self.moe.config
            count = len(step.in_rank)
            words = self._anything(count, config.scales, torch.float32) if config.scales else None
            step = self.send(self._anything(count, config.hidden, config.in_torch), step.in_rank, words)
            step.rows = known
        while self._open[0] is not step:
            self._close(self._open[0])
        assert step.handle is not None
        step.handle.filled = len(rows)
        return self._combine(step, rows)

    def forget(self) -> None:
        """Lose the open steps: ranks were excluded."""
        for step in self._open:
            step.handle = None
        self._open.clear()

    def _close(self, step: GpuStep) -> None:
        assert step.handle is not None
        config, count = self.moe.config, len(step.handle.rows)
        self._combine(step, torch.empty(count, config.hidden, dtype=config.out_torch, device=self.moe.device))

    def _combine(self, step: GpuStep, rows: torch.Tensor) -> torch.Tensor:
        assert step.handle is not None
        with self._order.turn(self.moe.device):
            sums = self.moe.combine(rows, step.handle)
        step.handle = None
        self._open.remove(step)
        return sums

    def _anything(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, width, dtype=dtype, device=self.moe.device)

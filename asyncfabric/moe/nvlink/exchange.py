"""CudaMoeExchange: dispatch and combine among the GPUs of one host, in the order of a stream.

Calls return at once and may be captured in graphs; they run on the event loop's thread, on the current stream. What a
kernel could not do is told by `check`, by every later call and by `settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import torch

from asyncfabric import BrokenError, BusyError, Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.faults import MissingRankError
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.nvlink.handle import CudaMoeHandle, handle_of
from asyncfabric.moe.nvlink.launch import RECEIVE, SEND, WAITS, CombineWords, DispatchWords
from asyncfabric.moe.nvlink.layout import NvlinkLayout, cuda_buffer_bytes
from asyncfabric.moe.nvlink.session import NvlinkSession, open_nvlink
from asyncfabric.moe.nvlink.tensors import checked_count, checked_rows, checked_tokens


class CudaMoeExchange:
    """An open exchange among GPUs; made by `async with open_moe_cuda(...)`.

    All ranks must call the halves of their steps in the same order. Halves may be on several streams if events put
    them in the order of a step: a half waits on its GPU for other ranks, never for another half of its own rank.

    Attributes:
        config: the shape.
        rank: of this process.
        epoch: how often ranks were excluded.
        device: of this rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        group: MoeGroup,
        layout: NvlinkLayout,
        device: torch.device,
        blocks: int | None,
        deadline_s: float,
    ) -> None:
        """Not for users: `async with open_moe_cuda(...)`."""
        self.config: MoeConfig = layout.config
        self.rank: int = group.rank
        self.epoch: int = 0
        self.device: torch.device = device
        self._fabric = fabric
        self._group = group
        self._layout = layout
        self._blocks = blocks
        self._deadline_s = deadline_s
        self._present: tuple[int, ...] = tuple(range(layout.config.ranks))
        self._stack = AsyncExitStack()
        self._session: NvlinkSession | None = None
        self._next = 0
        self._flying: dict[int, CudaMoeHandle] = {}

    @property
    def experts(self) -> range:
        """The experts of this rank."""
        return self.config.experts_of(self.rank)

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._present

    @property
    def buffer_bytes(self) -> int:
        """Bytes of GPU memory that the exchange may have allocated on this rank."""
        return cuda_buffer_bytes(self.config)

    @property
    def in_flight(self) -> tuple[CudaMoeHandle, ...]:
        """Steps that were dispatched and not combined yet, oldest first."""
        return tuple(self._flying.values())

    def dispatch(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None = None,
        *,
        count: torch.Tensor | None = None,
    ) -> CudaMoeHandle:
        """Send tokens to the ranks of their experts and take the rows for this rank's, by one launch.

        Args:
            x: tokens, shape [tokens, hidden] of config.in_dtype on this rank's GPU, 0..max_tokens of them.
            indices: the experts of each token, shape [tokens, top_k], int32 or int64; -1 for none. An expert that
                does not exist counts as none.
            weights: their weights, same shape, float32.
            scales: shape [tokens, hidden / scale_block], float32; where the config has scales.
            count: one int32 on the GPU: how many of the tokens there are, read when the kernel runs.

        x, scales and weights must stay as they are until the work has run.

        Raises:
            TypeError, ValueError: tensors that do not fit the config.
            BusyError: config.in_flight steps are waiting to be combined.
            MissingRankError: a kernel has waited for a rank in vain.
        """
        return self._dispatch(SEND | RECEIVE, self._begin(x, indices, weights, scales, count))

    def dispatch_send(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None = None,
        *,
        count: torch.Tensor | None = None,
    ) -> CudaMoeHandle:
        """Begin a step: store all tokens to the ranks of their experts. Takes and raises what `dispatch` does."""
        return self._dispatch(SEND, self._begin(x, indices, weights, scales, count))

    def dispatch_recv(self, handle: CudaMoeHandle) -> CudaMoeHandle:
        """Take the rows that came for the experts of this rank.

        Raises:
            ValueError: an older step was not received yet, or this one was.
            MissingRankError: a kernel has waited for a rank in vain.
        """
        self._opened(handle)
        if handle.received:
            raise ValueError(f"step {handle.number} was received already")
        self._check_turn("received", handle, lambda older: not older.received)
        return self._dispatch(RECEIVE, handle)

    def combine(
        self, expert_rows: torch.Tensor, handle: CudaMoeHandle, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send the outputs of this rank's experts back and return the weighted sum for each own token; one launch.

        Args:
            expert_rows: outputs, same shape as `handle.rows`, of config.out_dtype; only the rows that count are read.
            handle: of the step.
            out: where the sums go, shape [tokens, hidden] of config.out_dtype; None: a new tensor.

        Returns:
            Shape [tokens, hidden] of config.out_dtype; zeros for tokens without experts. Where `dispatch` was given a
            count, the rows behind it are left as they were.

        Raises:
            TypeError, ValueError: a tensor that does not fit, or a step that has no rows yet or was combined.
            MissingRankError: a kernel has waited for a rank in vain.
        """
        y = self._prepare(expert_rows, handle, out)
        self._combine(SEND | RECEIVE, handle, y)
        self._end(handle)
        return y

    def combine_send(self, expert_rows: torch.Tensor, handle: CudaMoeHandle) -> None:
        """Store the sums of this rank's experts to the ranks of the tokens. Takes and raises what `combine` does."""
        self._combine(SEND, handle, self._prepare(expert_rows, handle, None))

    def combine_recv(self, handle: CudaMoeHandle, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted sum for each own token; see `combine`.

        Raises:
            ValueError: `combine_send` was not called for this step, or it was combined already.
            MissingRankError: a kernel has waited for a rank in vain.
        """
        self._opened(handle)
        if not handle.returned or handle.combined:
            state = "was combined already" if handle.combined else "was not sent back; call combine_send(...) first"
            raise ValueError(f"step {handle.number} {state}")
        self._check_turn("combined", handle, lambda older: True)
        y = self._out(handle, out)
        self._combine(RECEIVE, handle, y)
        self._end(handle)
        return y

    def check(self) -> None:
        """Raise if a kernel has given up; asks no GPU, so what runs now is not known yet.

        Raises:
            MissingRankError: of the ranks that were waited for in vain; the steps in flight are lost.
        """
        session = self._session
        if session is None:
            return
        found = {rank: word for rank, word in enumerate(session.missing.tolist()) if word}
        if found:
            told = ", ".join(f"rank {rank} ({WAITS.get(word, 'something')})" for rank, word in found.items())
            raise MissingRankError(
                f"a kernel on {self.device} waited {self._deadline_s:g} s in vain for {told}",
                ranks=found,
                lost=True,
                remedy="await moe.exclude(ranks) on all other ranks goes on without them; the steps in flight are lost",
            )

    async def settled(self) -> None:
        """Return when all that the current stream has to do now is done.

        Raises:
            MissingRankError: a kernel has given up.

        Cancellation: nothing is lost; the stream goes on.
        """
        event = torch.cuda.current_stream(self.device).record_event()
        await anyio.to_thread.run_sync(event.synchronize, abandon_on_cancel=True)
        self.check()

    async def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks. All others must call it with the same ranks; steps in flight are lost.

        Choices of their experts count as masked from then on; weights are not changed. Opens new memory; graphs that
        were captured before must be captured again. With no rank to exclude, all begin anew.

        Raises:
            ValueError: no such rank, the own one, or one that is excluded already.
            MissingRankError: another rank is lost or does not follow before the caller's deadline.

        Cancellation: the exchange is broken until another `exclude` succeeds.
        """
        gone = set(ranks)
        if not gone <= set(self._present) - {self.rank}:
            raise ValueError(f"can exclude {sorted(set(self._present) - {self.rank})}, got {sorted(gone)}")
        self._session = None
        self._flying.clear()
        self._present = tuple(rank for rank in self._present if rank not in gone)
        self.epoch += 1
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
        await self._open()

    async def _open(self) -> None:
        opened = open_nvlink(
            self._fabric,
            self._group,
            self._layout,
            self.device,
            self._blocks,
            self._deadline_s,
            self.epoch,
            self._present,
        )
        self._session = await self._stack.enter_async_context(opened)
        self._next = 0

    def _begin(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        count: torch.Tensor | None,
    ) -> CudaMoeHandle:
        session = self._opened()
        checked_tokens(self.config, self.device, x, indices, weights, scales)
        checked_count(self.device, count)
        limit = self.config.in_flight
        if len(self._flying) >= limit:
            raise BusyError(f"{limit} steps are in flight; combine step {next(iter(self._flying))} first")
        handle = handle_of(self._next, self.epoch, x.shape[0], session.outputs[self._next % limit])
        handle.given = (x, indices, weights, scales, count)
        self._next += 1
        self._flying[handle.number] = handle
        return handle

    def _dispatch(self, roles: int, handle: CudaMoeHandle) -> CudaMoeHandle:
        session = self._opened(handle)
        x, indices, weights, scales, count = handle.given
        assert x is not None and indices is not None and weights is not None
        output = handle.output
        words = DispatchWords(
            x=x.data_ptr(),
            indices=indices.data_ptr(),
            weights=weights.data_ptr(),
            given_scales=scales.data_ptr() if scales is not None else 0,
            count=count.data_ptr() if count is not None else 0,
            rows=output.rows.data_ptr(),
            row_scales=output.scales.data_ptr() if output.scales is not None else 0,
            tokens_per_expert=output.tokens_per_expert.data_ptr(),
            offsets=output.offsets.data_ptr(),
            source_ranks=output.source_ranks.data_ptr(),
            source_tokens=output.source_tokens.data_ptr(),
            source_choices=output.source_choices.data_ptr(),
            pairs=output.pairs.data_ptr(),
            reached=output.reached.data_ptr(),
            counts=output.counts.data_ptr(),
            tokens=handle.tokens,
            wide_indices=indices.dtype == torch.int64,
            roles=roles,
        )
        session.kernels.dispatch(session.words, words, self._stream())
        handle.received = bool(roles & RECEIVE)
        return handle

    def _prepare(self, expert_rows: torch.Tensor, handle: CudaMoeHandle, out: torch.Tensor | None) -> torch.Tensor:
        self._opened(handle)
        if not handle.received or handle.returned:
            state = "was sent back already" if handle.returned else "has no rows yet; call dispatch_recv(handle) first"
            raise ValueError(f"step {handle.number} {state}")
        checked_rows("expert_rows", self.config, self.device, expert_rows, handle.rows.shape[0])
        self._check_turn("sent back", handle, lambda older: not older.returned)
        y = self._out(handle, out)
        handle.expert_rows, handle.returned = expert_rows, True
        return y

    def _out(self, handle: CudaMoeHandle, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            return torch.empty((handle.tokens, self.config.hidden), dtype=self.config.out_torch, device=self.device)
        checked_rows("out", self.config, self.device, out, handle.tokens)
        return out

    def _combine(self, roles: int, handle: CudaMoeHandle, y: torch.Tensor) -> None:
        session = self._opened(handle)
        assert handle.expert_rows is not None
        output = handle.output
        words = CombineWords(
            expert_rows=handle.expert_rows.data_ptr(),
            y=y.data_ptr(),
            pairs=output.pairs.data_ptr(),
            reached=output.reached.data_ptr(),
            counts=output.counts.data_ptr(),
            roles=roles,
        )
        session.kernels.combine(session.words, words, self._stream())

    def _end(self, handle: CudaMoeHandle) -> None:
        handle.combined = True
        handle.expert_rows, handle.given = None, ()
        del self._flying[handle.number]

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _check_turn(self, what: str, handle: CudaMoeHandle, late: Callable[[CudaMoeHandle], bool]) -> None:
        for number, older in self._flying.items():
            if number < handle.number and late(older):
                raise ValueError(f"step {handle.number} cannot be {what} before step {number}, which is older")

    def _opened(self, handle: CudaMoeHandle | None = None) -> NvlinkSession:
        if self._session is None:
            raise BrokenError("the exchange is closed, or excluding ranks did not succeed")
        if handle is not None and handle.epoch != self.epoch:
            raise BrokenError(f"step {handle.number} is of epoch {handle.epoch}; it was lost when ranks were excluded")
        self.check()
        return self._session

"""CudaMoeExchange: dispatch and combine among GPUs, in the order of a stream.

Calls return at once and may be captured in graphs; they run on the event loop's thread, on the current stream. What a
kernel could not do is reported by `check`, by every later call and by `settled`.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.abc
import anyio.to_thread
import torch

from asyncfabric import Fabric
from asyncfabric.moe.faults import MissingRankError
from asyncfabric.moe.gpu.handle import CudaMoeHandle, Output, handle_of
from asyncfabric.moe.gpu.launch import AS_THEY_ARE, RECEIVE, SEND, WAITS, combine_words, dispatch_words
from asyncfabric.moe.gpu.session import NvlinkSession, open_nvlink
from asyncfabric.moe.gpu.site import Site
from asyncfabric.moe.gpu.tensors import checked_count, checked_rows, checked_tokens
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.steps import StepwiseExchange


class CudaMoeExchange(StepwiseExchange[CudaMoeHandle]):
    """An open exchange among GPUs; made by `async with open_moe_cuda(...)`.

    All ranks must call the halves of their steps in the same order. Halves may be on several streams if events put
    them in the order of a step: a half waits on its GPU for other ranks, never for another half of its own rank.

    Attributes:
        config: the shape.
        rank: of this process.
        epoch: how often ranks were excluded.
        device: of this rank.
    """

    def __init__(self, fabric: Fabric, group: MoeGroup, site: Site, tasks: anyio.abc.TaskGroup | None) -> None:
        """Not for users: `async with open_moe_cuda(...)`."""
        super().__init__(fabric, group, site.layout.config)
        self.device: torch.device = site.device
        self._site = site
        self._tasks = tasks
        self._session: NvlinkSession | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of GPU memory that the exchange may have allocated on this rank."""
        return self._site.layout.buffer_bytes(0)

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
            reported = ", ".join(f"rank {rank} ({WAITS.get(word, 'something')})" for rank, word in found.items())
            lost = "".join(f"; rank {rank}: {why}" for rank, why in self._losses().items() if rank in found)
            raise MissingRankError(
                f"a kernel on {self.device} waited for {reported} in vain, {self._site.deadline_s:g} s at most{lost}",
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

    async def _open(self) -> None:
        opened = open_nvlink(self._fabric, self._group, self._site, self.epoch, self._present, self._tasks)
        self._session = await self._stack.enter_async_context(opened)

    def _shut(self) -> None:
        self._session = None

    def _losses(self) -> Mapping[int, str]:
        """Why proxies receive nothing more from ranks."""
        return self._session.losses if self._session else {}

    def _begin(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        count: torch.Tensor | None,
        cast: int = AS_THEY_ARE,
    ) -> CudaMoeHandle:
        session = self._opened()
        checked_tokens(self.config, self.device, x, indices, weights, scales, casts=cast != AS_THEY_ARE)
        checked_count(self.device, count)
        self._check_room()
        output = self._output(session.outputs[self._next % self.config.in_flight])
        handle = handle_of(self._next, self.epoch, x.shape[0], output)
        handle.given = (x, indices, weights, scales, count)
        handle.cast = cast
        self._begun(handle)
        return handle

    def _output(self, turn: Output) -> Output:
        """Return the memory that the next step hands out, of a turn."""
        return turn

    def _dispatch(self, roles: int, handle: CudaMoeHandle) -> CudaMoeHandle:
        session = self._opened(handle)
        session.kernels.dispatch(session.words, dispatch_words(handle, roles), self._stream())
        handle.received = bool(roles & RECEIVE)
        return handle

    def _prepare(self, expert_rows: torch.Tensor, handle: CudaMoeHandle, out: torch.Tensor | None) -> torch.Tensor:
        self._opened(handle)
        if not handle.received or handle.returned:
            state = "was sent back already" if handle.returned else "has no rows yet; call dispatch_recv(handle) first"
            raise ValueError(f"step {handle.number} {state}")
        rows = handle.rows.shape[0] if handle.filled is None else handle.filled
        checked_rows("expert_rows", self.config, self.device, expert_rows, rows)
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
        session.kernels.combine(session.words, combine_words(handle, y, roles), self._stream())

    def _end(self, handle: CudaMoeHandle) -> None:
        handle.combined = True
        handle.expert_rows, handle.given = None, ()
        del self._flying[handle.number]

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _opened(self, handle: CudaMoeHandle | None = None) -> NvlinkSession:
        session = self._session
        self._check_epoch(session, handle)
        assert session is not None
        self.check()
        return session

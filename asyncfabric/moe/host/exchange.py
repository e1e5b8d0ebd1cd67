"""MoeExchange: dispatch and combine as users call them; each in two halves for overlap with compute.

Runs on the event loop's thread. What travels how stands in the path, what lies where in the lanes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import torch
from anyio.lowlevel import checkpoint_if_cancelled

from asyncfabric import Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.host.arrangement import arranged, filled
from asyncfabric.moe.host.handle import MoeHandle
from asyncfabric.moe.host.path import Path
from asyncfabric.moe.host.session import buffer_bytes, open_session
from asyncfabric.moe.host.tokens import checked_outputs, checked_tokens, tokens_in
from asyncfabric.moe.steps import StepwiseExchange


class MoeExchange(StepwiseExchange[MoeHandle]):
    """An open exchange; made by `async with open_moe(...)`.

    All ranks must call the halves of their steps in the same order, as with any collective; the halves of one step may
    be as far apart as `config.in_flight` allows. No rank waits for another in `dispatch_send` and `combine_send`.

    Attributes:
        config: the shape.
        rank: of this process.
        epoch: how often ranks were excluded.
    """

    def __init__(self, fabric: Fabric, group: MoeGroup, config: MoeConfig) -> None:
        """Not for users: `async with open_moe(...)`."""
        super().__init__(fabric, group, config)
        self._path: Path | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the exchange may have allocated on this rank."""
        return buffer_bytes(self.config)

    @property
    def mapped_ranks(self) -> tuple[int, ...]:
        """The ranks of this host in whose memory this process stores records and rows itself, over shared memory.

        Known from the second step on. Writes to them carry no bytes, only an immediate.
        """
        return self._opened().mapped_ranks

    async def dispatch(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None = None
    ) -> MoeHandle:
        """Send tokens to the ranks of their experts, and return the rows that came for the experts of this rank.

        Args:
            x: tokens, shape [tokens, hidden] of config.in_dtype, 0..max_tokens of them.
            indices: the experts of each token, shape [tokens, top_k], int32 or int64; -1 for none.
            weights: their weights, same shape, float32.
            scales: shape [tokens, hidden / scale_block], float32; where the config has scales.

        Raises:
            TypeError, ValueError: tensors that do not fit the config.
            BusyError: config.in_flight steps are waiting to be combined.
            MissingRankError: a rank is lost, or late for the caller's deadline.

        Cancellation: before anything left, the step did not begin; later it is the newest of `in_flight`, and
            `dispatch_recv` goes on with it. The exchange stays usable.
        """
        return await self.dispatch_recv(await self.dispatch_send(x, indices, weights, scales))

    async def dispatch_send(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None = None
    ) -> MoeHandle:
        """Begin a step: push every token that has room in a private slot; waits for no other rank.

        Takes what `dispatch` takes. x must stay as it is until `dispatch_recv` has returned: the rest is read then.

        Raises:
            TypeError, ValueError, BusyError, MissingRankError: as `dispatch`.

        Cancellation: the step did not begin.
        """
        path = self._opened()
        payload, about = checked_tokens(self.config, self.rank, x, indices, weights, scales)
        self._check_room()
        await checkpoint_if_cancelled()  # the other half lets others run now and then
        handle = await path.send(self._next, self.epoch, payload, about)
        self._begun(handle)
        return handle

    async def dispatch_recv(self, handle: MoeHandle) -> MoeHandle:
        """Return the step once all rows for this rank are there: `handle.rows`, `tokens_per_expert` and so on.

        Raises:
            MissingRankError: a rank is lost, or late for the caller's deadline; then the call may be made again.
            RemoteProtocolError: a rank did something else than dispatching the same step.

        Cancellation: nothing is lost; call it again with the same handle.
        """
        path = self._opened(handle)
        if handle.rows is None:
            self._check_turn("received", handle, lambda older: older.rows is None)
            rows = await path.receive(handle, lambda about: arranged(self.config, self.rank, handle, about))
            handle.rows = tokens_in(self.config, rows)
        return handle

    async def combine(self, expert_rows: torch.Tensor, handle: MoeHandle) -> torch.Tensor:
        """Send the outputs of this rank's experts back, and return the weighted sum for each own token.

        Args:
            expert_rows: outputs, same shape as `handle.rows`, of config.out_dtype; rows of padding are not looked at.
            handle: of the step.

        Returns:
            Shape [tokens, hidden] of config.out_dtype; zeros for tokens without experts.

        Raises:
            TypeError, ValueError: a tensor that does not fit, or a step that has no rows yet or was combined.
            MissingRankError: a rank is lost, or late for the caller's deadline.

        Cancellation: once begun, sending goes on, shielded; `combine_recv` then goes on with the step. The exchange
            stays usable.
        """
        await self.combine_send(expert_rows, handle)
        return await self.combine_recv(handle)

    async def combine_send(self, expert_rows: torch.Tensor, handle: MoeHandle) -> None:
        """Send the outputs of this rank's experts back; takes what `combine` takes, and waits for no other rank.

        expert_rows must stay as it is until `combine_recv` has returned.

        Raises:
            TypeError, ValueError, MissingRankError: as `combine`.

        Cancellation: nothing was sent, or, once begun, all is: it is shielded. A second call does nothing.
        """
        path = self._opened(handle)
        if handle.rows is None:
            raise ValueError(f"step {handle.number} has no rows yet; await dispatch_recv(handle) first")
        outputs = checked_outputs(self.config, expert_rows, handle.rows.shape[0])
        await checkpoint_if_cancelled()  # the other half lets others run now and then
        if not handle.returned:
            self._check_turn("sent back", handle, lambda older: not older.returned)
            handle.outputs = outputs
            await path.send_back(handle)
            handle.returned = True

    async def combine_recv(self, handle: MoeHandle) -> torch.Tensor:
        """Return the weighted sum for each own token, once all ranks have sent theirs.

        Raises:
            ValueError: `combine_send` was not called for this step, or it was combined already.
            MissingRankError: a rank is lost, or late for the caller's deadline; then the call may be made again.

        Cancellation: nothing is lost; call it again with the same handle.
        """
        path = self._opened(handle)
        if not handle.returned or handle.combined:
            state = "was combined already" if handle.combined else "was not sent back; await combine_send(...) first"
            raise ValueError(f"step {handle.number} {state}")
        self._check_turn("combined", handle, lambda older: True)
        sums = await path.receive_back(handle)
        handle.combined = True
        handle.outputs = None
        del self._flying[handle.number]
        return sums

    async def _open(self) -> None:
        opened = open_session(self._fabric, self._group, self.config, self.epoch, self._present, filled)
        self._path = await self._stack.enter_async_context(opened)

    def _shut(self) -> None:
        self._path = None

    def _opened(self, handle: MoeHandle | None = None) -> Path:
        path = self._path
        self._check_epoch(path, handle)
        assert path is not None
        return path


def open_moe(fabric: Fabric, group: MoeGroup, config: MoeConfig) -> AbstractAsyncContextManager[MoeExchange]:
    """Open an exchange with all ranks of a group, as `async with` does.

    Allocates all memory that it will need, connects to all ranks and exchanges keys with them. On leaving, what this
    rank sent is drained and its memory released; ranks may leave at different times, once they have combined.

    Args:
        fabric: of this rank; its own messages are read while opening (see `MoeGroup.channel`).
        group: who takes part.
        config: equal on all ranks.

    Raises:
        ValueError: the group has another number of ranks, or the buffers need more than config.buffer_limit_bytes.
        DeviceError: no memory left.
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    if len(group.addresses) != config.ranks:
        raise ValueError(f"config.ranks is {config.ranks}, the group has {len(group.addresses)} addresses")
    needed = buffer_bytes(config)
    if needed > config.buffer_limit_bytes:
        raise ValueError(
            f"the exchange needs {needed} bytes on each rank, config.buffer_limit_bytes is {config.buffer_limit_bytes};"
            " lower private_tokens, max_tokens or in_flight"
        )
    return _opening(fabric, group, config)


@asynccontextmanager
async def _opening(fabric: Fabric, group: MoeGroup, config: MoeConfig) -> AsyncIterator[MoeExchange]:
    moe = MoeExchange(fabric, group, config)
    async with moe._stack:
        await moe._open()
        try:
            yield moe
        finally:
            moe._shut()

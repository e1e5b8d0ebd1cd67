"""NvlinkSession: one epoch of an exchange among GPUs: pages, the pages of all other ranks, kernels, words of state.

Runs on the event loop's thread. Descriptors of pages travel over a Unix socket in a folder of the owner: the card of
each rank names it, so that only ranks of one host and one user can meet.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import torch

from asyncfabric import Fabric, FabricError, Peer
from asyncfabric._cuda_driver import Driver, open_driver
from asyncfabric.errors import DeviceError, RemoteProtocolError
from asyncfabric.moe.faults import missing, shortly_before_deadline
from asyncfabric.moe.group import Card, FabricMeeting, MoeGroup
from asyncfabric.moe.nvlink.driver import MAJOR, MULTIPROCESSORS
from asyncfabric.moe.nvlink.handle import Output, output_of
from asyncfabric.moe.nvlink.launch import STATE_WORDS, ExchangeWords, Kernels
from asyncfabric.moe.nvlink.layout import MAX_RANKS, NvlinkLayout, Parts
from asyncfabric.moe.nvlink.pages import Pages

HOPPER = 9


class NvlinkSession:
    """What launches of one epoch need.

    Attributes:
        kernels: compiled for the device.
        words: the struct that every launch takes.
        outputs: memory that steps hand out, by turns.
        missing: host words that kernels write when they give up: what was waited for, by rank.
    """

    def __init__(
        self,
        kernels: Kernels,
        words: ExchangeWords,
        outputs: list[Output],
        missing: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Not for users."""
        self._state = state  # kernels know its address
        self.kernels: Kernels = kernels
        self.words: ExchangeWords = words
        self.outputs: list[Output] = outputs
        self.missing: torch.Tensor = missing


@asynccontextmanager
async def open_nvlink(
    fabric: Fabric,
    group: MoeGroup,
    layout: NvlinkLayout,
    device: torch.device,
    blocks: int | None,
    deadline_s: float,
    epoch: int,
    present: Sequence[int],
) -> AsyncIterator[NvlinkSession]:
    """Allocate, meet the other ranks, map their pages; on leaving the device is waited for and all is unmapped.

    Raises:
        DeviceError: no memory left, no GPU of Hopper's kind, or one that cannot reach another's memory.
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    driver, number = open_driver(), device.index
    with ExitStack() as stack:
        with torch.cuda.device(device):  # never across an await: other tasks have devices of their own
            torch.zeros(1, device=device)  # the context exists
            if driver.attribute(number, MAJOR) < HOPPER:
                raise DeviceError(f"{device} has no bulk copies: the kernels need compute capability 9.0 or later")
            kernels = Kernels(driver, layout, device, blocks or driver.attribute(number, MULTIPROCESSORS))
            stack.callback(kernels.close)
            own = Pages(driver, number, layout.region_bytes)
            stack.callback(own.close)
        regions = await _introduce(fabric, group, layout, epoch, present, own, driver, number, stack)
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        absent = torch.zeros(MAX_RANKS, dtype=torch.int32, pin_memory=True)
        outputs = [output_of(layout, group.rank, device) for _ in range(layout.config.in_flight)]
        words = _words(layout, group.rank, present, regions, state, absent, deadline_s)
        torch.cuda.synchronize(device)
        try:
            yield NvlinkSession(kernels, words, outputs, absent, state)
        finally:
            with anyio.CancelScope(shield=True):  # ends: kernels give up by themselves
                await anyio.to_thread.run_sync(torch.cuda.synchronize, device)


async def _introduce(
    fabric: Fabric,
    group: MoeGroup,
    layout: NvlinkLayout,
    epoch: int,
    present: Sequence[int],
    own: Pages,
    driver: Driver,
    device: int,
    stack: ExitStack,
) -> dict[int, int]:
    """Give our pages to all ranks that are present, map theirs, and return where those of each rank are mapped."""
    others = [rank for rank in present if rank != group.rank]
    what = f"opening the exchange {group.tag!r}"
    peers: dict[int, Peer] = {}
    for rank in others:
        try:
            peers[rank] = await fabric.connect(group.addresses[rank])
        except FabricError as error:
            raise missing(f"{what} ({error})", [rank], lost=True) from error
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncfabric-moe-"))
    place = str(Path(folder) / "pages")
    async with await anyio.create_unix_listener(place) as listener:
        card = Card(
            tag=group.tag,
            epoch=epoch,
            rank=group.rank,
            digest=hashlib.sha256(repr(("nvlink", layout.config, tuple(present))).encode()).hexdigest()[:16],
            imm=0,
            keys=(place.encode(),),
        )
        cards = await (group.meeting or FabricMeeting(fabric)).meet(peers, card)
        odd = [rank for rank, other in cards.items() if other.digest != card.digest]
        if odd:
            raise RemoteProtocolError(
                f"ranks {odd} opened the exchange {group.tag!r} with another configuration or without other ranks",
                remedy="give equal MoeConfig values on all ranks, and exclude the same ranks everywhere",
            )
        descriptors = await _swap(what, own.descriptor, listener, cards)
    regions = {group.rank: own.address}
    try:
        for rank, descriptor in descriptors.items():
            far = Pages(driver, device, layout.region_bytes, descriptor)
            stack.callback(far.close)
            regions[rank] = far.address
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    own.close_descriptor()
    return regions


async def _swap(
    what: str, descriptor: int, listener: anyio.abc.SocketListener, cards: Mapping[int, Card]
) -> dict[int, int]:
    """Give our descriptor to as many as ask, one for each card, and return those of the other ranks."""
    taken: dict[int, int] = {}
    refused: dict[int, BaseException] = {}
    given: list[int] = []
    asked = anyio.Event()

    async def give(stream: anyio.abc.SocketStream) -> None:
        assert isinstance(stream, anyio.abc.UNIXSocketStream)
        async with stream:
            await stream.send_fds(b"pages", [descriptor])
        given.append(1)
        if len(given) == len(cards):
            asked.set()

    async def take(rank: int) -> None:
        try:
            async with await anyio.connect_unix(cards[rank].keys[0].decode()) as stream:
                _, found = await stream.receive_fds(16, 1)
            taken[rank] = found[0]
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            refused[rank] = error
            asked.set()

    try:
        with shortly_before_deadline() as scope:
            async with anyio.create_task_group() as serving:
                serving.start_soon(listener.serve, give)
                async with anyio.create_task_group() as taking:
                    for rank in cards:
                        taking.start_soon(take, rank)
                if cards:
                    await asked.wait()
                serving.cancel_scope.cancel()
        if refused:
            why = "; ".join(str(error) or type(error).__name__ for error in refused.values())
            raise missing(f"{what} (its socket: {why}; is it on this host?)", refused, lost=True)
        if scope.cancelled_caught:
            raise missing(what, set(cards) - set(taken) or set(cards), lost=False)
    except BaseException:
        for found in taken.values():
            os.close(found)
        raise
    return taken


def _words(
    layout: NvlinkLayout,
    rank: int,
    present: Sequence[int],
    regions: Mapping[int, int],
    state: torch.Tensor,
    absent: torch.Tensor,
    deadline_s: float,
) -> ExchangeWords:
    config = layout.config
    words = ExchangeWords(
        state=state.data_ptr(),
        missing=absent.data_ptr(),
        deadline_ns=int(deadline_s * 1e9),
        turn_bytes=layout.turn_bytes,
        rank=rank,
        ranks=config.ranks,
        present=sum(1 << each for each in present),
        experts=config.num_experts,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        in_flight=config.in_flight,
        alignment=config.expert_alignment,
        row_bytes=layout.row_bytes,
        scales=config.scales,
        back_row_bytes=layout.back_row_bytes,
        parts=layout.parts,
        stage_bytes=layout.stage_bytes,
        most_experts=layout.most_experts,
        routers=layout.routers,
    )
    for name in Parts.__dataclass_fields__:
        setattr(words, name, getattr(layout.offsets, name))
    for each, address in regions.items():
        words.region[each] = address
    return words

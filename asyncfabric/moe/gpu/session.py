"""NvlinkSession: one epoch of an exchange among GPUs: pages, those of the host's other ranks, kernels, proxy, state.

Runs on the event loop's thread. An exchange has one session at a time; going on without ranks opens the next one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import torch

from asyncfabric import Fabric, RegionKey
from asyncfabric._gpu import Driver, open_driver
from asyncfabric._gpu.driver import MAJOR, MULTIPROCESSORS
from asyncfabric.errors import DeviceError, RemoteProtocolError
from asyncfabric.moe.cards import Card
from asyncfabric.moe.gathering import gather_cards
from asyncfabric.moe.gpu.descriptors import swap_descriptors
from asyncfabric.moe.gpu.handle import Output, output_of
from asyncfabric.moe.gpu.launch import STATE_WORDS, ExchangeWords, Kernels
from asyncfabric.moe.gpu.layout import MAX_RANKS, Parts
from asyncfabric.moe.gpu.pages import Pages
from asyncfabric.moe.gpu.proxy import Proxy, immediates
from asyncfabric.moe.gpu.site import Share, Site, check_shares
from asyncfabric.moe.gpu.staging import Staging, open_staging
from asyncfabric.moe.group import MoeGroup, connect_ranks
from asyncfabric.moe.immediates import first_imm, proposed_imm

HOPPER = 9


class NvlinkSession:
    """What launches of one epoch need.

    Attributes:
        kernels: compiled for the device.
        words: the struct that every launch takes.
        broken: word on the GPU: a kernel has given up.
        outputs: memory that steps hand out, by turns.
        missing: host words that kernels write when they give up: what was waited for, by rank.
        losses: why the proxy receives nothing more from a rank.
    """

    def __init__(
        self, kernels: Kernels, words: ExchangeWords, outputs: list[Output], losses: Mapping[int, str]
    ) -> None:
        """Not for users."""
        self.kernels: Kernels = kernels
        self.words: ExchangeWords = words
        self.outputs: list[Output] = outputs
        self.missing: torch.Tensor = torch.zeros(MAX_RANKS, dtype=torch.int32, pin_memory=True)
        self.losses: Mapping[int, str] = losses
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=outputs[0].counts.device)
        self.broken: torch.Tensor = torch.zeros(1, dtype=torch.int32, device=self._state.device)
        words.state = self._state.data_ptr()
        words.missing, words.broken = self.missing.data_ptr(), self.broken.data_ptr()


@asynccontextmanager
async def open_nvlink(
    fabric: Fabric, group: MoeGroup, site: Site, epoch: int, present: Sequence[int], tasks: anyio.abc.TaskGroup | None
) -> AsyncIterator[NvlinkSession]:
    """Allocate, meet the other ranks, map their pages; on leaving the device is waited for and all is unmapped.

    The proxy of ranks on other hosts runs in `tasks`, which outlive the session; None where there are no such ranks.

    Raises:
        DeviceError: no memory left, no GPU of Hopper's kind, or one that cannot reach another's memory.
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.
        ValueError: ranks of one process on one GPU launch more blocks than it has multiprocessors.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    driver, device, layout = open_driver(), site.device, site.layout
    far = site.far(present)
    async with AsyncExitStack() as stack:
        with torch.cuda.device(device):  # never across an await: other tasks have devices of their own
            torch.zeros(1, dtype=torch.int32, device=device)  # the context exists
            if driver.attribute(device.index, MAJOR) < HOPPER:
                raise DeviceError(f"{device} has no bulk copies: the kernels need compute capability 9.0 or later")
            multiprocessors = driver.attribute(device.index, MULTIPROCESSORS)
            share = Share(device.index, site.blocks or multiprocessors)
            kernels = Kernels(driver, layout, device, share.blocks)
            stack.callback(kernels.close)
            own = Pages(driver, device.index, layout.region_bytes)
            stack.callback(own.close)
        staging = None
        if far:
            staging = await stack.enter_async_context(open_staging(fabric, layout, far, driver, device))
        words = _words(site, present)
        crowd = share, multiprocessors
        proxy = await _introduce(fabric, group, site, epoch, present, own, crowd, driver, staging, words, stack)
        outputs = [output_of(layout, group.rank, device) for _ in range(layout.config.in_flight)]
        session = NvlinkSession(kernels, words, outputs, proxy.losses if proxy else {})
        torch.cuda.synchronize(device)
        if proxy is not None:
            assert tasks is not None
            tasks.start_soon(proxy.run)
        try:
            yield session
        finally:
            with anyio.CancelScope(shield=True):  # ends: kernels give up by themselves
                await anyio.to_thread.run_sync(torch.cuda.synchronize, device)
                if proxy is not None:
                    await proxy.finish(site.deadline_s)


async def _introduce(
    fabric: Fabric,
    group: MoeGroup,
    site: Site,
    epoch: int,
    present: Sequence[int],
    own: Pages,
    crowd: tuple[Share, int],
    driver: Driver,
    staging: Staging | None,
    words: ExchangeWords,
    stack: AsyncExitStack,
) -> Proxy | None:
    """Meet the other ranks; map the pages of those on this host, and open a proxy for the others.

    `crowd`: what launches of this rank take of its GPU, and how many multiprocessors that has.
    """
    what, layout = f"opening the exchange {group.tag!r}", site.layout
    config, far = layout.config, site.far(present)
    peers = await connect_ranks(fabric, group, present)
    with tempfile.TemporaryDirectory(prefix="asyncfabric-moe-") as folder:
        place = str(Path(folder) / "pages")
        async with await anyio.create_unix_listener(place) as listener:
            keys = [staging.key_for(rank) if staging and rank in far else b"" for rank in range(config.ranks)]
            card = Card(
                tag=group.tag,
                epoch=epoch,
                rank=group.rank,
                digest=site.digest(present),
                imm=proposed_imm(fabric),
                keys=(place.encode(), *keys, crowd[0].to_bytes()),
            )
            cards = await gather_cards(fabric, group, peers, card)
            odd = [rank for rank, other in cards.items() if other.digest != card.digest]
            if odd:
                raise RemoteProtocolError(
                    f"ranks {odd} opened the exchange {group.tag!r} with another configuration or without other ranks",
                    remedy="open it by the same call with equal MoeConfig values and hosts on all ranks, and exclude"
                    " the same ranks everywhere",
                )
            shares = {rank: Share.from_bytes(other.keys[-1]) for rank, other in cards.items()}
            check_shares(shares | {group.rank: crowd[0]}, crowd[1])
            near = {rank: other.keys[0].decode() for rank, other in cards.items() if rank not in far}
            descriptors = await swap_descriptors(what, own.descriptor, listener, near)
    regions = {group.rank: own.address}
    try:
        for rank, descriptor in descriptors.items():
            theirs = Pages(driver, site.device.index, layout.region_bytes, descriptor)
            stack.callback(theirs.close)
            regions[rank] = theirs.address
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    own.close_descriptor()
    for rank, address in regions.items():
        words.outbox[rank] = address + group.rank * layout.block_bytes
        words.inbox[rank] = own.address + rank * layout.block_bytes
    if staging is None:
        join_verdicts(words, group.rank, words)
        return None
    proxy = Proxy(
        fabric,
        layout,
        group.rank,
        first_imm(
            fabric, [card.imm, *(other.imm for other in cards.values())], immediates(config.ranks, config.in_flight)
        ),
        {rank: peers[rank] for rank in far},
        {rank: RegionKey.from_bytes(cards[rank].keys[1 + group.rank]) for rank in far},
        (staging.outgoing, staging.incoming),
        staging.reported,
        staging.notes,
    )
    stack.callback(proxy.close)
    staging.fill(words, proxy)
    join_verdicts(words, group.rank, words)
    return proxy


def join_verdicts(words: ExchangeWords, rank: int, lane: ExchangeWords) -> None:
    """Let kernels with `words` report their verdicts to the ranks of a lane, and receive theirs: blocks begin with one.

    Args:
        words: of an exchange or of one lane of it.
        rank: the own one, in `lane`.
        lane: of the same rank.
    """
    for other in range(lane.ranks):
        if other != rank and lane.outbox[other]:
            place = lane.first_rank + other * lane.rank_stride
            words.verdict_out[place], words.verdict_in[place] = lane.outbox[other], lane.inbox[other]


def _words(site: Site, present: Sequence[int]) -> ExchangeWords:
    layout = site.layout
    config = layout.config
    words = ExchangeWords(
        deadline_ns=int(site.deadline_s * 1e9),
        turn_bytes=layout.turn_bytes,
        rank=site.rank,
        ranks=config.ranks,
        present=sum(1 << each for each in present),
        experts=config.num_experts,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        in_flight=config.in_flight,
        alignment=config.expert_alignment,
        row_bytes=layout.row_bytes,
        scales=layout.words,
        slot_bytes=layout.slot_bytes,
        back_row_bytes=layout.back_row_bytes,
        parts=layout.parts,
        stage_bytes=layout.stage_bytes,
        most_experts=layout.most_experts,
        routers=layout.routers,
        private_tokens=config.private,
        first_rank=site.first_rank,
        rank_stride=site.rank_stride,
        slot_rows=layout.slot_rows,
    )
    for name in Parts.__dataclass_fields__:
        setattr(words, name, getattr(layout.offsets, name))
    return words

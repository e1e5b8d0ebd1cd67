"""What workers of two engines push to each other, for every order of heads, and every two tensor parallelisms."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric import FabricConfig
from asyncfabric.blocking import open_fabric, wait_all

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM, which the connector's package imports
    import host

    host.choose()
    from asyncfabric.integrations.vllm.heads import arrivals_of, may_exchange, sources_of, targets_of, writes_of
    from asyncfabric.integrations.vllm.layout import WorkerBlocks, WorkerRank, read_blocks, split_of

TOKENS, WIDTH, LAYERS = 5, 9, 3
ORDERS = {  # dimensions of a layer in memory, and as vLLM has them: planes, blocks, tokens, heads, width
    "apart, NHD": ("pbthw", "pbthw"),
    "apart, HND": ("pbhtw", "pbthw"),
    "in a block, NHD": ("bpthw", "bpthw"),
    "in a block, HND": ("bphtw", "bpthw"),
    "side by side, NHD": ("bthpw", "bhtpw"),
    "side by side, HND": ("bhtpw", "bhtpw"),
}


def rank_of(order: str, blocks: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor of a layer as vLLM has it, and the same as (planes, blocks, tokens, heads, width)."""
    if order == "latent":
        whole = torch.full((blocks, TOKENS, WIDTH), -1.0)
        return whole, whole[None, :, :, None, :]
    memory, seen = ORDERS[order]
    sizes = {"p": 2, "b": blocks, "t": TOKENS, "h": heads, "w": WIDTH}
    whole = torch.full([sizes[each] for each in memory], -1.0)
    given = whole.permute([memory.index(each) for each in seen])
    if order.startswith("side"):
        given = given.flatten(3)  # a view: the last two are one in memory
        assert given.data_ptr() == whole.data_ptr()
    return given, whole.permute([memory.index(each) for each in "pbthw"])


@st.composite
def engines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Draw an order, the heads of a model, and the sizes of two engines that may exchange its blocks."""
    order = draw(st.sampled_from([*ORDERS, "latent"]))
    heads = 1 if order == "latent" else draw(st.sampled_from([1, 2, 6, 8]))
    sizes = [ranks for ranks in (1, 2, 3, 4, 6, 8, 12, 16) if not (heads % ranks and ranks % heads)]
    return order, heads, draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))


@given(engines(), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_each_worker_gets_its_heads_once_and_nothing_else(case: tuple[str, int, int, int], seed: int) -> None:
    order, heads, here, there = case
    random = torch.Generator().manual_seed(seed)
    planes = 1 if order == "latent" else 2
    sources, targets = (
        torch.randperm(7, generator=random)[:4].tolist(),
        torch.randperm(11, generator=random)[:4].tolist(),
    )
    whole = torch.randn(LAYERS, planes, len(sources), TOKENS, heads, WIDTH, generator=random)
    with open_fabric(FabricConfig(rails=("local",))) as fabric:

        def engine(ranks: int, blocks: int) -> list[tuple[list[torch.Tensor], WorkerBlocks]]:
            found = []
            for rank in range(ranks):
                made = [rank_of(order, blocks, max(1, heads // ranks)) for _ in range(LAYERS)]
                caches = {str(layer): given for layer, (given, _) in enumerate(made)}
                place = WorkerRank(rank, ranks, heads)
                found.append(([seen for _, seen in made], read_blocks(fabric, caches, blocks, TOKENS, place)))
            return found

        def own(rank: int, ranks: int) -> slice:
            return slice(rank * heads // ranks, rank * heads // ranks + max(1, heads // ranks))

        first, second = engine(here, 7), engine(there, 11)
        for rank, (seen, _) in enumerate(first):
            for layer, each in enumerate(seen):
                each[:, sources] = whole[layer][:, :, :, own(rank, here)]
        for rank, (seen, blocks) in enumerate(second):
            counter = fabric.counter()
            keys = [region.key("write") for region in blocks.regions]
            transfers = []
            for source, (_, theirs) in enumerate(first):
                pushes = source in sources_of(blocks.layout, here)
                assert pushes == (rank in targets_of(theirs.layout, there))
                assert pushes or here != there or source != rank
                if not pushes:
                    continue
                assert not theirs.layout.differences(blocks.layout)
                for layer in range(LAYERS):
                    for write in writes_of(theirs.layout, blocks.layout, layer, sources, targets):
                        transfers.append(
                            fabric.write_pages(
                                theirs.regions[write.source_region],
                                write.sources,
                                keys[write.target_region],
                                write.targets,
                                page_bytes=write.page_bytes or theirs.page_bytes,
                                source_stride=write.source_stride,
                                target_stride=write.target_stride,
                                source_offset=write.source_offset,
                                target_offset=write.target_offset,
                                imm=counter.imm,
                            )
                        )
            wait_all(transfers)
            order_there = theirs.layout.split.order if theirs.layout.split is not None else ""
            need = len(targets) * arrivals_of(blocks.layout, here, order_there)
            assert counter.wait(need, deadline=10) == need
            counter.close()
            others = sorted(set(range(11)) - set(targets))
            for layer, each in enumerate(seen):
                assert torch.equal(each[:, targets], whole[layer][:, :, :, own(rank, there)]), (layer, rank)
                assert (each[:, others] == -1).all()


def test_sizes_that_divide_no_heads_are_refused() -> None:
    assert may_exchange(8, 3, 3) and may_exchange(8, 2, 16) and may_exchange(1, 4, 7)
    assert not may_exchange(8, 2, 3) and not may_exchange(8, 2, 0) and not may_exchange(8, 2, 4096)


@pytest.mark.parametrize(
    ("shape", "heads", "why"),
    [
        ((7, 4, 4, 8), 4, "as many heads as tokens"),
        ((7, 2, 4, 8), 4, "heads that are not those of the model"),
        ((7, 4), 4, "no tokens"),
    ],
)
def test_what_cannot_be_read_off_a_tensor_is_not_guessed(shape: tuple[int, ...], heads: int, why: str) -> None:
    assert split_of(torch.zeros(shape), 7, 4, 1, WorkerRank(0, 1, heads)) is None, why

"""The lanes of an exchange by the nodes among GPUs: shapes and members as pure values. No GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from asyncfabric.moe import MoeConfig
from asyncfabric.moe.gpu import cuda_buffer_bytes
from asyncfabric.moe.gpu.lanes import lanes_of
from asyncfabric.moe.gpu.layout import NvlinkLayout

SHAPE: dict[str, Any] = {"top_k": 4, "hidden": 128, "max_tokens": 24}


@given(nodes=st.integers(1, 5), size=st.integers(2, 6), experts=st.integers(1, 90))
def test_experts_are_where_the_whole_exchange_has_them(nodes: int, size: int, experts: int) -> None:
    config = MoeConfig(num_experts=experts, ranks=nodes * size, node_size=size, **SHAPE)
    if not config.experts_of((nodes - 1) * size):
        with pytest.raises(ValueError, match="needs an expert"):
            lanes_of(config)
        return
    for rank in range(config.ranks):
        node, place = divmod(rank, size)
        lanes = lanes_of(config, node)
        first = lanes.node_experts(node).start
        inside = lanes.inside.config.experts_of(place)
        assert range(first + inside.start, first + inside.stop) == config.experts_of(rank)
        assert lanes.across.config.experts_of(node) == range(node, node + 1)
        assert lanes.members(rank, lanes.across)[node] == lanes.members(rank, lanes.inside)[place] == rank


def test_lanes_without_an_excluded_node() -> None:
    lanes = lanes_of(MoeConfig(num_experts=16, ranks=6, node_size=2, **SHAPE))
    left = (0, 1, 4, 5)
    assert lanes.present(5, lanes.across, left) == [0, 2]
    assert lanes.present(5, lanes.inside, left) == [0, 1]


def test_a_row_has_room_for_what_travels_with_it_and_every_row_that_may_cross() -> None:
    config = MoeConfig(
        num_experts=16, ranks=6, node_size=2, in_dtype="float8_e4m3fn", scale_block=32, in_flight=1, **SHAPE
    )
    lanes = lanes_of(config)
    assert lanes.across.words == 4 + 2 * 4 + 1 and lanes.inside.words == 4 + 1
    assert lanes.across.row_capacity(0) == lanes.inside.config.max_tokens == 3 * 24
    assert lanes.inside.row_capacity(0) == 2 * 72 * 4, "all choices of all tokens of all ranks"
    straight = cuda_buffer_bytes(MoeConfig(num_experts=16, ranks=6, in_flight=1, **SHAPE))
    assert cuda_buffer_bytes(config) < 3 * straight
    assert NvlinkLayout(lanes.across.config).words == 4, "nothing else travels without nodes"


def test_verdicts_of_both_lanes_are_reported_and_received_by_numbers_of_the_whole_exchange() -> None:
    """Rank 3 of 3 nodes of 2: node 1, place 1. Across are ranks 1, 3 and 5, inside 2 and 3; node 0 is excluded."""
    from asyncfabric.moe.gpu.launch import ExchangeWords
    from asyncfabric.moe.gpu.session import join_verdicts

    across = ExchangeWords(ranks=3, rank=1, first_rank=1, rank_stride=2)
    inside = ExchangeWords(ranks=2, rank=1, first_rank=2, rank_stride=1)
    for lane, boxes in ((across, {1: 100, 2: 110}), (inside, {0: 200, 1: 210})):
        for member, address in boxes.items():
            lane.outbox[member], lane.inbox[member] = address, address + 1
    for words in (across, inside):
        join_verdicts(words, across.rank, across)
        join_verdicts(words, inside.rank, inside)
        reported = {rank: address for rank, address in enumerate(words.verdict_out) if address}
        received = {rank: address for rank, address in enumerate(words.verdict_in) if address}
        assert reported == {5: 110, 2: 200}, "the own rank and those that are gone receive nothing"
        assert received == {5: 111, 2: 201}

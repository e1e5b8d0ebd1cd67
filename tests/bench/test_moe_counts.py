"""What `bench moe --device cuda` counts of a step, for tensors as kernels leave them. No GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_rows_go_once_to_each_rank_of_a_token() -> None:
    from asyncfabric.moe import MoeConfig
    from asyncfabric_services.bench.moe.gpu_counts import rows_by_rank

    config = MoeConfig(num_experts=5, top_k=2, hidden=64, max_tokens=4, ranks=2)  # experts 0 to 2, and 3 and 4
    assert rows_by_rank(config, 0, torch.tensor([[0, 1], [2, 3], [4, 0], [4, 3]])) == [3, 3]


def test_by_the_nodes_rows_go_once_to_each_node_and_there_to_the_rank_of_the_same_place() -> None:
    from asyncfabric.moe import MoeConfig
    from asyncfabric_services.bench.moe.gpu_counts import rows_by_rank

    config = MoeConfig(num_experts=8, top_k=2, hidden=64, max_tokens=4, ranks=4, node_size=2)
    chosen = torch.tensor(
        [[0, 3], [4, 7], [1, 6], [2, 0]]
    )  # both of the first node, both of the other one, one of each
    assert rows_by_rank(config, 1, chosen) == [0, 3, 0, 2]
    assert rows_by_rank(config, 2, chosen) == [3, 0, 2, 0]


def test_what_kernels_noted_is_counted() -> None:
    """Rank 0 of two: tokens 0 and 2 went to rank 1; of rank 1's three tokens two have rows here."""
    from asyncfabric.moe import MoeConfig
    from asyncfabric_services.bench.moe.gpu_counts import moved

    config = MoeConfig(
        num_experts=4, top_k=2, hidden=64, max_tokens=4, ranks=2, in_dtype="float8_e4m3fn", scale_block=32
    )
    pairs = torch.full((2, 4, 2, 2), -1, dtype=torch.int32)
    pairs[0, 0, 0, 0] = 5  # of an own token: stays here
    pairs[1, 0, 1, 0], pairs[1, 2, :, 0] = 0, 1
    pairs[1, 3, 0, 0] = 7  # behind the last token: of an older step
    output = SimpleNamespace(
        reached=torch.tensor([0b11, 0b01, 0b10, 0b11], dtype=torch.int32), pairs=pairs, counts=torch.tensor([3, 3])
    )
    handle: Any = SimpleNamespace(output=output, tokens=3)
    assert moved(config, 0, handle) == {
        "rows": 2,
        "sums": 2,
        "words": 2 + 1 + 2 + 1,
        "dispatch_bytes": 2 * (64 + 8) + 2 * 4 + (4 + 3 * 2 * 8) + 3 * 4,
        "combine_bytes": 2 * 128 + 3 * 4,
    }


@pytest.mark.parametrize(("sent", "writes"), [(0, 2), (3, 2), (4, 3)])
def test_what_an_engine_carries_is_spans_of_a_parcel(sent: int, writes: int) -> None:
    from asyncfabric.moe import MoeConfig
    from asyncfabric.moe.gpu.layout import NvlinkLayout
    from asyncfabric_services.bench.moe.gpu_counts import carried

    config = MoeConfig(num_experts=4, top_k=2, hidden=64, max_tokens=8, ranks=2, private_tokens=3)
    layout = NvlinkLayout(config)
    found, length = carried(config, sent, 5)
    assert found == writes
    assert length == layout.offsets.slots + max(sent, 3) * 128 + 5 * 128


def test_by_the_nodes_what_crosses_takes_the_choices_of_a_token_along() -> None:
    from asyncfabric.moe import MoeConfig
    from asyncfabric_services.bench.moe.gpu_counts import carried

    config = MoeConfig(num_experts=8, top_k=2, hidden=64, max_tokens=8, ranks=4, node_size=2, private_tokens=0)
    alone = MoeConfig(num_experts=8, top_k=2, hidden=64, max_tokens=8, ranks=4, private_tokens=0)
    more = [[carried(each, sent, 5)[1] for sent in (3, 4)] for each in (config, alone)]
    assert carried(config, 3, 5)[0] == 3
    assert [high - low for low, high in more] == [256, 128]  # a row of 128 bytes, and 5 words in lines of 128

"""What travels with rows among GPUs, and how calls are cut and ordered: what needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="DeepEP's tensors are torch's")

from asyncfabric.integrations.deep_ep.elastic_handle import EPHandle  # noqa: E402
from asyncfabric.integrations.deep_ep.elastic_rows import returned_rows  # noqa: E402
from asyncfabric.integrations.deep_ep.gpu_dispatch import StreamOrder, _first, _prefixes  # noqa: E402
from asyncfabric.integrations.deep_ep.gpu_low_latency import CallHalves, TokenCast  # noqa: E402
from asyncfabric.integrations.deep_ep.gpu_room import _block_for  # noqa: E402
from asyncfabric.integrations.deep_ep.gpu_rows import choices_in, packed_scales, words_of  # noqa: E402
from asyncfabric.integrations.deep_ep.rows import counts_of  # noqa: E402


def test_words_of_a_token_come_back_bit_for_bit() -> None:
    idx = torch.tensor([[5, -1], [2, 7], [-1, 3]])
    weights, scales = torch.rand(3, 2), torch.rand(3, 3)
    words = words_of(16, scales, weights, idx, torch.zeros(3, 4))
    assert torch.equal(words[:, :3], scales) and not words[:, 7:].any()
    own, given = choices_in(words, 3, 2, range(2, 6), None)
    assert own.tolist() == [[3, -1], [0, -1], [-1, 1]]
    assert torch.equal(given, torch.where(own >= 0, weights, 0.0))
    own, given = choices_in(words, 3, 2, range(2, 6), torch.tensor([1]))
    assert own.tolist() == [[3, -1], [-1, -1], [-1, -1]] and not given[1:].any(), "rows behind the last have none"


def test_scales_are_packed_four_in_an_int32_with_rows_beside_each_other() -> None:
    scales = torch.exp2(torch.randint(-20, 9, (3, 8, 5)).float()).transpose(1, 2)
    packed = packed_scales(scales)
    assert packed.shape == (3, 5, 2) and packed.dtype == torch.int32 and packed.stride(1) == 1
    exponents = packed.contiguous().view(torch.uint8).int()
    assert torch.equal((exponents << 23).view(torch.float32), scales)


def test_a_token_has_room_for_its_words() -> None:
    assert [_block_for(7168, words) for words in (0, 1, 56, 57, 72, 7168)] == [0, 7168, 128, 112, 64, 1]
    with pytest.raises(ValueError, match="cannot travel with a token of 16"):
        _block_for(16, 17)


def test_rows_are_counted_and_cut() -> None:
    rows = torch.arange(8, dtype=torch.float32).view(4, 2)
    assert _first(rows, 3).tolist() == rows[:3].tolist()
    assert _first(rows.to(torch.float8_e4m3fn), 6)[4:].float().tolist() == [[0, 0]] * 2
    assert counts_of(torch.tensor([[0, -1], [2, 2]]), 3).tolist() == [1, 0, 2]
    assert _prefixes(torch.tensor([0, 0, 1, -1]), torch.tensor([3]), 2, 1)[:, 1].tolist() == [2, 3]


def test_arguments_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a previous_event and async_finish"):
        StreamOrder(None, async_finish=True, allocate_on_comm_stream=True)
    with pytest.raises(ValueError, match="exclude each other"):
        CallHalves(async_finish=True, return_recv_hook=True)
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    TokenCast(True, True, False).check(x)
    for cast, given, error, text in [
        (
            TokenCast(True, False, True),
            torch.zeros(2, 512).bfloat16(),
            ValueError,
            "needs use_fp8=True and round_scale",
        ),
        (TokenCast(True, True, True), x, ValueError, "multiple of 512"),
        (TokenCast(True, False, False), x[:, :100], ValueError, "multiple of 128"),
        (TokenCast(True, False, False), x.float(), TypeError, "torch.bfloat16 with use_fp8"),
        (TokenCast(False, False, False), x.to(torch.float8_e4m3fn), TypeError, "x must be of"),
    ]:
        with pytest.raises(error, match=text):
            cast.check(given)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_behind_the_rows_that_came_are_zeros_and_not_rows_of_an_earlier_step(kind: torch.dtype) -> None:
    came, worst = 3, 8
    nothing: Any = None
    numbers = torch.zeros(2, dtype=torch.int32)
    handle = EPHandle(
        do_expand=False,
        num_experts=4,
        expert_alignment=1,
        num_max_tokens_per_rank=4,
        num_sms=0,
        topk_idx=torch.zeros(4, 2, dtype=torch.int64),
        num_recv_tokens=worst,
        num_expanded_tokens=worst,
        num_recv_tokens_per_expert_list=[],
        psum_num_recv_tokens_per_scaleup_rank=torch.tensor([1, came], dtype=torch.int32),
        psum_num_recv_tokens_per_expert=numbers,
        num_unaligned_recv_tokens_per_expert=numbers,
        recv_src_metadata=torch.zeros(worst, 4, dtype=torch.int32),
        step=nothing,
        recv_topk_idx=torch.zeros(worst, 2, dtype=torch.int64),
        slots=None,
        came=None,
    )
    rows, scales = torch.full((worst, 16), 7.0).to(kind), torch.full((worst, 4), 5.0)
    found = returned_rows((rows, scales), None, torch.float32, handle, expanded=False, by_columns=False)
    assert found.scales is not None
    for whole, given in ((found.x.float(), rows.float()), (found.scales, scales)):
        assert torch.equal(whole[:came], given[:came]) and not whole[came:].any()

"""What kernels are launched with and carried as, without a GPU: layout, structs, text, and what is refused."""

from __future__ import annotations

import ctypes
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.moe import MoeConfig
from asyncfabric.moe.gpu import cuda_buffer_bytes
from asyncfabric.moe.gpu.launch import (
    AS_THEY_ARE,
    POWERS_OF_TWO,
    TO_FP8,
    CombineWords,
    DispatchWords,
    ExchangeWords,
    GateWords,
    NodeWords,
    kernel_text,
)
from asyncfabric.moe.gpu.layout import (
    BACK_WARPS,
    FP8_BLOCK,
    MAX_EXPERTS,
    MAX_RANKS,
    ORDINALS,
    RECEIVE_WARPS,
    RING_BYTES,
    SEND_WARPS,
    STAGE_BYTES,
    VERDICT_BYTES,
    NvlinkLayout,
    Parts,
)
from asyncfabric.moe.gpu.proxy import STEP_KINDS
from asyncfabric.moe.gpu.site import Share, check_shares, hosts_of

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "native" / "cuda"
SHARED_BYTES = 227 << 10
"""What a block of a Hopper GPU can have."""


@st.composite
def configs(draw: st.DrawFn) -> MoeConfig:
    top_k = draw(st.integers(1, 32))
    return MoeConfig(
        num_experts=draw(st.integers(1, 1023)),
        top_k=top_k,
        hidden=16 * draw(st.integers(1, 1024)),
        max_tokens=draw(st.integers(1, 8192)),
        ranks=draw(st.integers(1, 32)),
        in_dtype=draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "float32"])),
        scale_block=draw(st.sampled_from([0, 16])),
        out_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        expert_alignment=draw(st.integers(1, 128)),
        in_flight=draw(st.sampled_from([1, 2, 4])),
        private_tokens=draw(st.sampled_from([None, 0])),
        buffer_limit_bytes=1 << 50,
    )


@given(configs())
def test_parts_of_a_parcel_lie_apart_and_whole_rows_are_aligned(config: MoeConfig) -> None:
    layout = NvlinkLayout(config)
    end = 0
    for name in (each.name for each in fields(Parts)):
        at, size = getattr(layout.offsets, name), getattr(layout.sizes, name)
        assert at >= end and at % 256 == 0, name
        end = at + size
    assert end <= layout.turn_bytes and layout.turn_bytes % 256 == 0
    assert layout.block_bytes == VERDICT_BYTES + config.in_flight * layout.turn_bytes
    assert layout.region_bytes == config.ranks * layout.block_bytes
    assert layout.row_bytes % 16 == layout.back_row_bytes % 16 == layout.stage_bytes % 16 == layout.slot_bytes % 16 == 0
    assert layout.row_bytes + 4 * config.scales <= layout.slot_bytes < layout.row_bytes + 4 * config.scales + 128
    rows = config.max_tokens
    assert layout.sizes.slots == rows * layout.slot_bytes and layout.sizes.back == rows * layout.back_row_bytes
    assert layout.sizes.back_words == rows * layout.parts * 4
    assert layout.sizes.pairs == rows * config.top_k * 8


@given(configs(), st.data())
def test_writes_of_a_proxy_cover_what_was_packed_once_and_stay_in_their_turn(
    config: MoeConfig, data: st.DataObject
) -> None:
    layout = NvlinkLayout(config)
    step, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(0, config.max_tokens))
    begin, low = layout.parcel(step), layout.offsets.slots
    first, rest, back = layout.first_span(step), layout.rest_span(step, rows), layout.back_span(step, rows)
    assert first[0] == begin and first[1] == rest[0] <= rest[1]
    assert rest[1] >= begin + low + rows * layout.slot_bytes
    assert rest[0] == rest[1] or rest[1] == begin + low + rows * layout.slot_bytes
    assert rest[1] <= begin + layout.offsets.head_word
    assert back == (begin + layout.offsets.back, begin + layout.offsets.back + rows * layout.back_row_bytes)
    assert back[1] <= begin + layout.turn_bytes <= layout.block_bytes
    turns = {layout.parcel(number) for number in range(1, 1 + config.in_flight)}
    assert len(turns) == config.in_flight and layout.parcel(step + config.in_flight) == begin


@given(configs(), st.booleans())
def test_shared_memory_of_a_block_is_enough_and_there(config: MoeConfig, slots: bool) -> None:
    layout = NvlinkLayout(config, slot_rows=slots * config.ranks * config.max_tokens)
    places = layout.most_experts * config.ranks * layout.routers + layout.most_experts + 1
    warps = SEND_WARPS + RECEIVE_WARPS
    assert layout.dispatch_shared_bytes >= warps * layout.stage_bytes + 4 * places
    assert layout.dispatch_shared_bytes >= 4 * (warps + 1) * config.num_experts
    assert max(layout.dispatch_shared_bytes, layout.combine_shared_bytes) <= SHARED_BYTES - 1024


@given(configs())
def test_the_most_rows_have_room(config: MoeConfig) -> None:
    layout = NvlinkLayout(config)
    for rank in range(config.ranks):
        experts = len(config.experts_of(rank))
        choices = config.ranks * config.max_tokens * config.top_k if experts else 0
        worst = choices // config.expert_alignment * config.expert_alignment
        # All choices on one expert, or one on each of the others and the rest there: padding is largest then.
        spread = min(experts, choices)
        assert layout.row_capacity(rank) >= max(worst, choices + spread * (config.expert_alignment - 1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": 33}, "ranks can be 32 at most"),
        ({"num_experts": 1024}, "num_experts can be 1023"),
        ({"top_k": 33}, "top_k can be 32"),
        ({"ranks": 4, "node_size": 2, "num_experts": 2}, "each of 2 nodes needs an expert"),
        ({"ranks": 34, "node_size": 2}, "ranks can be 32 at most"),
        ({"in_flight": 3}, "power of two"),
        ({"max_tokens": 1 << 20}, "must be below 4194304"),
    ],
)
def test_what_kernels_cannot_do_is_refused(change: dict[str, Any], text: str) -> None:
    shape = {"num_experts": 10, "top_k": 4, "hidden": 128, "max_tokens": 24, "ranks": 4}
    with pytest.raises(ValueError, match=text):
        cuda_buffer_bytes(MoeConfig(**(shape | change)))


def test_hosts_are_reported_by_their_first_ranks_and_have_eight_at_most() -> None:
    assert hosts_of(3, None) == (0, 0, 0)
    assert hosts_of(4, ["b", "a", "b", "a"]) == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="each of 3 ranks, got 2"):
        hosts_of(3, [0, 1])
    with pytest.raises(ValueError, match="8 at most on GPUs, got 9"):
        hosts_of(9, None)
    assert hosts_of(16, [rank // 8 for rank in range(16)])[8:] == (8,) * 8


def test_prefill_of_eight_ranks_is_what_the_page_states() -> None:
    config = MoeConfig(
        num_experts=256,
        top_k=8,
        hidden=7168,
        max_tokens=4096,
        ranks=8,
        in_dtype="float8_e4m3fn",
        scale_block=128,
        in_flight=1,
    )
    assert 2.4 < cuda_buffer_bytes(config) / 2**30 < 2.6
    assert cuda_buffer_bytes(config.with_tokens(128)) < 85 << 20


def test_structs_are_as_large_as_the_kernels_take_them() -> None:
    text = kernel_text().decode()
    sizes = {name: int(size) for name, size in re.findall(r"\.b8 (\w+_param_\d)\[(\d+)\]", text)}
    combine = [size for name, size in sizes.items() if name.startswith("moe_combine") and name.endswith("_1")]
    assert sizes["moe_dispatch_param_1"] == ctypes.sizeof(DispatchWords)
    assert sizes["moe_gate_param_1"] == ctypes.sizeof(GateWords)
    assert combine == [ctypes.sizeof(CombineWords)] * 3
    between = {f"moe_{name}_param_0" for name in ("spread", "unpack", "trace")}
    assert {sizes[name] for name in between} == {ctypes.sizeof(NodeWords)}
    exchange = {size for name, size in sizes.items() if name.endswith("_0") and name not in between}
    assert exchange == {ctypes.sizeof(ExchangeWords)}


@pytest.mark.parametrize("struct", [ExchangeWords, DispatchWords, CombineWords, GateWords, NodeWords])
def test_structs_have_the_fields_of_the_kernels_in_their_order(struct: type[ctypes.Structure]) -> None:
    name = {"NodeWords": "NodeStep"}.get(struct.__name__, struct.__name__.removesuffix("Words"))
    source = "".join(
        (NATIVE / "moe" / f"{each}.cuh").read_text() for each in ("words", "route", "combine", "gate", "nodes")
    )
    body = re.search(rf"struct {name} {{(.*?)\n}};", source, re.DOTALL)
    assert body is not None
    statements = re.sub(r"//.*", "", body[1]).split(";")
    found = [
        re.sub(r"\[.*\]", "", name).strip().rsplit(" ", 1)[-1].lstrip("*")
        for each in statements
        for name in each.split(",")
        if each.strip()
    ]
    assert found == [field[0].replace("given_", "") for field in struct._fields_]


def test_constants_are_those_of_the_kernels() -> None:
    source = "".join(path.read_text() for path in (NATIVE / "moe").glob("*.cuh"))
    found = {name: int(value) for name, value in re.findall(r"constexpr uint\d+_t (k\w+) = (\d+);", source)}
    ring = found["kRing"] * found["kColumns"] * 32 * 16
    assert (found["kSendWarps"], found["kReceiveWarps"], found["kBackWarps"]) == (SEND_WARPS, RECEIVE_WARPS, BACK_WARPS)
    assert (found["kMaxRanks"], found["kMaxExperts"], 1 << found["kOrdinalBits"]) == (MAX_RANKS, MAX_EXPERTS, ORDINALS)
    assert (found["kVerdictBytes"], ring) == (VERDICT_BYTES, RING_BYTES)
    kinds = re.search(r"enum Kind : uint32_t \{(.*?)kKinds", source)
    assert kinds is not None and len(kinds[1].split(",")) - 1 == len(STEP_KINDS)
    casts = re.search(r"enum Cast : uint32_t \{ (.*) \};", source)
    assert casts is not None and casts[1].split(", ") == ["kAsTheyAre", "kToFp8", "kPowersOfTwo"]
    assert (AS_THEY_ARE, TO_FP8, POWERS_OF_TWO) == (0, 1, 2)
    assert found["kCastBytes"] == FP8_BLOCK * 2 and 64 * found["kCastBytes"] >= STAGE_BYTES


def test_ranks_of_one_process_on_one_gpu_have_to_fit_on_it_together() -> None:
    own = Share(1, 66)
    assert Share.from_bytes(own.to_bytes()) == own
    other, elsewhere = Share(1, 90, b"another."), Share(0, 132)
    check_shares({0: own, 1: Share(1, 66), 2: other, 3: elsewhere}, 132)
    check_shares({0: Share(0, 132), 1: Share(0, 132, b"another.")}, 132)
    with pytest.raises(ValueError, match=r"on cuda:1 \(rank 0 66, rank 4 67\) than it has multiprocessors \(132\)"):
        check_shares({0: own, 4: Share(1, 67), 2: other}, 132)
    with pytest.raises(ValueError, match=r"rank 0 133"):
        check_shares({0: Share(0, 133)}, 132)
    with pytest.raises(ValueError, match=r"rank 2 90, rank 5 90"):
        check_shares({0: own, 2: other, 5: other}, 132)


@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "parts"),
    [(2, 132, 7168, 8), (2, 133, 7168, 4), (8, 128, 7168, 4), (2, 512, 7168, 4), (2, 513, 7168, 1), (2, 24, 1024, 1)],
)
def test_rows_are_cut_where_there_are_more_warps_than_rows(ranks: int, tokens: int, hidden: int, parts: int) -> None:
    config = MoeConfig(num_experts=16, top_k=2, hidden=hidden, max_tokens=tokens, ranks=ranks)
    assert NvlinkLayout(config).parts == parts

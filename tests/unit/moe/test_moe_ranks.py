"""An exchange among GPUs whose experts are its ranks, without a GPU: memory, routes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from asyncfabric.integrations.deep_ep.gpu_room import GpuRoom, _block_for, _config_of
from asyncfabric.integrations.deep_ep.rows import about_width
from asyncfabric.moe import MoeConfig, MoeGroup
from asyncfabric.moe.gpu import open_moe_ranks
from asyncfabric.moe.gpu.layout import NvlinkLayout
from asyncfabric.moe.gpu.ranks import numbers_of, routes_of
from asyncfabric.moe.gpu.site import Site
from asyncfabric.moe.gpu.tensors import checked_mask

RANKS = 4
SHAPE: dict[str, Any] = {"num_experts": RANKS, "top_k": RANKS, "ranks": RANKS, "hidden": 64, "max_tokens": 24}
CPU = torch.device("cpu")


def site_of(layout: NvlinkLayout, rank: int = 0) -> Site:
    return Site(layout, rank, torch.device("cuda:0"), None, 1.0, (0,) * RANKS)


@given(
    ranks=st.integers(1, 32),
    tokens=st.integers(1, 300),
    alignment=st.integers(1, 40),
    in_flight=st.sampled_from([1, 2]),
)
def test_rows_have_room_for_each_token_of_each_rank_once(
    ranks: int, tokens: int, alignment: int, in_flight: int
) -> None:
    config = MoeConfig(
        num_experts=ranks,
        top_k=ranks,
        hidden=64,
        max_tokens=tokens,
        ranks=ranks,
        expert_alignment=alignment,
        in_flight=in_flight,
    )
    all_choices, once = NvlinkLayout(config), NvlinkLayout(config, most_choices=1)
    worst = -(-ranks * tokens // alignment) * alignment  # all tokens of all ranks go to this one
    for rank in range(ranks):
        assert worst <= once.row_capacity(rank) < worst + alignment
        row = once.row_bytes + 12
        saved = in_flight * ranks * tokens * (ranks - 1) * row
        assert all_choices.buffer_bytes(rank) - once.buffer_bytes(rank) == saved
    # What ranks store to each other lies in the same places: nothing of it is for several choices of one rank.
    assert (once.offsets, once.block_bytes, once.parts) == (
        all_choices.offsets,
        all_choices.block_bytes,
        all_choices.parts,
    )


@given(tokens=st.integers(0, 40), ranks=st.integers(1, 32), seed=st.integers(0, 9))
def test_no_token_names_a_rank_twice(tokens: int, ranks: int, seed: int) -> None:
    in_rank = torch.rand(tokens, ranks, generator=torch.Generator().manual_seed(seed)) < 0.5
    for mask in (in_rank, torch.zeros_like(in_rank), torch.ones_like(in_rank), in_rank.T.contiguous().T):
        routes = routes_of(mask, numbers_of(ranks, CPU))
        assert routes.dtype == torch.int32 and routes.is_contiguous() and routes.shape == mask.shape
        assert torch.equal(routes >= 0, mask)
        assert all(route in (-1, rank) for token in routes.tolist() for rank, route in enumerate(token))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_numbers_of_ranks_are_no_routes(dtype: torch.dtype) -> None:
    """They could name a rank twice, for which the rows have no room."""
    config = MoeConfig(**SHAPE)
    with pytest.raises(TypeError, match=r"indices must be of torch\.bool, got"):
        checked_mask(config, CPU, torch.zeros(3, RANKS, dtype=dtype))


def test_routes_of_another_shape_or_place_are_refused() -> None:
    config = MoeConfig(**SHAPE)
    checked_mask(config, CPU, torch.zeros(3, RANKS, dtype=torch.bool))
    for shape in ((3, RANKS + 1), (3,), (3, RANKS, 1)):
        with pytest.raises(ValueError, match=r"indices must have the shape \[tokens, 4\], got"):
            checked_mask(config, CPU, torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="indices must be on cuda:0"):
        checked_mask(config, torch.device("cuda:0"), torch.zeros(3, RANKS, dtype=torch.bool))
    with pytest.raises(TypeError, match="indices must be a torch tensor"):
        checked_mask(config, CPU, [[True] * RANKS])  # type: ignore[arg-type]


def test_ranks_that_rely_on_other_promises_do_not_meet() -> None:
    config = MoeConfig(**SHAPE)
    once, all_choices = (NvlinkLayout(config, most_choices=most) for most in (1, None))
    everybody = range(RANKS)
    assert site_of(once, 0).digest(everybody) == site_of(once, 3).digest(everybody)
    others = [
        site_of(all_choices).digest(everybody),
        site_of(NvlinkLayout(config, slot_rows=RANKS * 24)).digest(everybody),
        site_of(NvlinkLayout(MoeConfig(**SHAPE | {"max_tokens": 23}), most_choices=1)).digest(everybody),
        site_of(once).digest([0, 1, 2]),
    ]
    assert len({*others, site_of(once).digest(everybody)}) == 5


@pytest.mark.parametrize("change", [{"num_experts": 8}, {"top_k": 3}, {"node_size": 2}])
def test_a_shape_whose_experts_are_not_its_ranks_is_refused(change: dict[str, int]) -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match="whose experts are its 4 ranks has as many experts and choices, and no nodes"):
        open_moe_ranks(nobody, nobody, MoeConfig(**(SHAPE | change)), device="cuda:0")


def test_the_interface_of_deep_ep_opens_exchanges_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncfabric.integrations.deep_ep import gpu_room

    opened: list[tuple[MoeConfig, dict[str, Any]]] = []

    def note(fabric: object, group: MoeGroup, config: MoeConfig, **options: Any) -> Any:
        opened.append((config, options))
        return type("Opened", (), {"config": config, "device": CPU})()

    class Room:
        ranks = RANKS

        def check_open(self) -> None:
            """It is."""

        def gathered(self, value: object) -> list[object]:
            return [value] * RANKS

        def entered(self, opening: Any, *, limited: bool) -> Any:
            return opening(None, None)

    monkeypatch.setattr(gpu_room, "open_moe_ranks", note)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    room: Any = Room()
    gpus = GpuRoom(room, [0, 0, 1, 1], 7, 3.0)
    gpus.device = torch.device("cuda:0")
    line = gpus.line(64, 24, torch.bfloat16, 5)
    assert gpus.line(64, 24, torch.bfloat16, 6) is line, "a word for each 8 elements, whatever is asked for"
    ((config, options),) = opened
    assert (config.num_experts, config.top_k, config.ranks, config.scales) == (RANKS, RANKS, RANKS, 8)
    assert options == {"device": gpus.device, "hosts": (0, 0, 1, 1), "blocks": 7, "deadline_s": 3.0}


def test_memory_of_deepeps_own_test_of_one_host() -> None:
    """test_intranode: 4,096 tokens of 7168 elements, top-8, 8 ranks: bf16 and fp8, with and without experts."""
    ranks, tokens, hidden, top_k, blocks = 8, 4096, 7168, 8, 56
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    calls = [(bf16, 0), (bf16, 2 * top_k), (fp8, blocks), (fp8, blocks + 2 * top_k)]
    configs = [
        _config_of(ranks, ranks, hidden, tokens, ranks, dtype, _block_for(hidden, words)) for dtype, words in calls
    ]
    configs.append(_config_of(ranks, ranks, about_width(top_k), tokens, ranks, torch.float32, 0))
    gib = [NvlinkLayout(config, most_choices=1).buffer_bytes(0) / 2**30 for config in configs]
    assert sum(gib) < 9 and max(gib) < 2.7
    assert sum(NvlinkLayout(config).buffer_bytes(0) for config in configs) > 27 << 30, (
        "room for all choices on one rank"
    )

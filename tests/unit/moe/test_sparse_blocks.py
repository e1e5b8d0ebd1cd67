"""Sparse blocks of transformers over an exchange: the same bits as one process with the same order of sums, the same
tokens as transformers alone, and errors that name the rank that is missing."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

torch = pytest.importorskip("torch", reason="sparse blocks are modules of torch")
pytest.importorskip("transformers", reason="needs the models of transformers")

from moe_fixture import PATIENCE_S, same_bits  # noqa: E402
from sparse_models import HIDDEN, KINDS, generate, model_of, parallel, prompt_of  # noqa: E402

import asyncfabric as af  # noqa: E402
from asyncfabric.integrations.expert_shard import ExpertShard  # noqa: E402
from asyncfabric.integrations.sparse_blocks import KNOWN_BLOCKS, ParallelBlock, config_for, parallelize  # noqa: E402
from asyncfabric.moe import MissingRankError, MoeExchange, MoeGroup, open_moe  # noqa: E402
from asyncfabric.moe.fp8 import from_fp8, to_fp8  # noqa: E402
from asyncfabric.moe.reference import reference_combine  # noqa: E402

pytestmark = pytest.mark.slow
TILE = 16
SOON_S = 2.0
"""A deadline that is meant to pass; what is asserted is who is named, not when."""


def blocks_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in KNOWN_BLOCKS]


def tokens_of(rank: int, dtype: Any) -> Any:
    """Tokens of a rank; the second of them has none."""
    count = 0 if rank == 1 else 5 + 3 * rank
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(dtype)


@torch.no_grad()
def alone(block: Any, hidden: Any) -> Any:
    return block(hidden)


@torch.no_grad()
def in_one_process(config: Any, block: Any, rank: int, hidden: Any) -> Any:
    """The block without an exchange, sums in the order that an exchange promises."""
    tokens = hidden.reshape(-1, HIDDEN)
    _, weights, indices = block.gate(tokens)
    seen = tokens
    if config.scales:
        seen = from_fp8(*to_fp8(tokens, config.scale_block), tokens.dtype)
    experts = ExpertShard(block.experts.gate_up_proj, block.experts.down_proj, block.experts.act_fn, TILE)
    outputs = torch.zeros(*indices.shape, HIDDEN, dtype=tokens.dtype)
    for number in range(config.num_experts):
        token, choice = torch.nonzero(indices == number, as_tuple=True)
        outputs[token, choice] = experts.one(number, seen[token])
    result = reference_combine(config, rank, outputs, indices, weights.float())
    if getattr(block, "shared_expert", None) is not None:
        result = result + torch.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)
    return result.reshape(hidden.shape)


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks", "options"),
    [
        ("mixtral", torch.float32, 4, {}),
        ("mixtral", torch.bfloat16, 2, {"private_tokens": 2}),
        ("qwen2", torch.bfloat16, 4, {"node_size": 2}),
        ("qwen2", torch.float32, 3, {}),
        ("qwen3", torch.float16, 4, {"expert_alignment": 8}),
        ("qwen3", torch.bfloat16, 2, {"in_dtype": "float8_e4m3fn", "scale_block": 32}),
    ],
)
def test_a_block_has_the_bits_of_one_process_whoever_else_has_tokens(
    kind: str, dtype: Any, ranks: int, options: dict[str, Any]
) -> None:
    """On the loop's thread and on a worker's, under both event loops."""
    model = model_of(kind, dtype)
    block = blocks_of(model)[-1]

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        one = ParallelBlock(block, moe, tile_rows=TILE)
        hidden = tokens_of(moe.rank, dtype)
        expected = in_one_process(moe.config, block, moe.rank, hidden)
        assert same_bits(await one.forward_async(hidden), expected)

        def on_worker() -> Any:
            with torch.inference_mode():  # of a thread: tensors that it makes are handed to the loop's
                return one(hidden.clone())

        assert same_bits(await anyio.to_thread.run_sync(on_worker), expected)

    for backend in ("trio", "asyncio"):
        parallel(model, ranks, body, backend, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_what_transformers_computes(kind: str, dtype: Any, tolerance: float) -> None:
    """In fp32 with two choices a sum has one order only: one rank gives the very bits of transformers."""
    model = model_of(kind, dtype)
    block = blocks_of(model)[0]

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        hidden = tokens_of(moe.rank, dtype)
        ours, theirs = await ParallelBlock(block, moe).forward_async(hidden), alone(block, hidden)
        if moe.config.ranks == 1 and dtype == torch.float32 and moe.config.top_k == 2:
            assert same_bits(ours, theirs)
        if theirs.numel():
            assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())

    for ranks in (1, 4):
        parallel(model, ranks, body)


@pytest.mark.parametrize(("kind", "ranks"), list(zip(KINDS, (2, 4, 2, 2), strict=True)))
def test_a_whole_model_states_what_it_states_in_one_process(kind: str, ranks: int) -> None:
    """Every rank has a prompt of its own and a part of the experts; transformers drives all of it."""
    expected = [generate(model_of(kind), prompt_of(rank)) for rank in range(ranks)]
    assert all(len(set(tokens[-8:])) > 3 for tokens in expected), "answers that repeat one token prove little"

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        model = model_of(kind)
        weights = sum(parameter.numel() for parameter in model.parameters())
        blocks = parallelize(model, moe)
        assert len(blocks) == (2 if kind in ("qwen2", "deepseek") else 3)
        assert all(len(block.shard.down_proj) == len(moe.experts) for block in blocks)
        assert sum(parameter.numel() for parameter in model.parameters()) < weights
        prompt = prompt_of(moe.rank)
        assert await anyio.to_thread.run_sync(generate, model, prompt) == expected[moe.rank]

    parallel(model_of(kind), ranks, body)


def test_a_missing_rank_is_named_through_the_model_and_the_others_go_on_with_the_mask() -> None:
    """Rank 1 generates less than the others and leaves."""
    kind, ranks, gone = "mixtral", 3, 1
    masked = model_of(kind)
    config = config_for(masked, ranks=ranks, max_tokens=32)
    for block in blocks_of(masked):
        lost = config.experts_of(gone)
        block.experts.down_proj.data[lost.start : lost.stop] = 0.0
    ended: list[int] = []
    addresses: dict[int, af.FabricAddress] = {}
    met: Any = None

    async def one(rank: int) -> None:
        model = model_of(kind)
        async with af.open_fabric() as fabric:
            addresses[rank] = fabric.address
            if len(addresses) == ranks:
                met.set()
            await met.wait()
            group = MoeGroup(rank, [addresses[each] for each in range(ranks)])
            async with open_moe(fabric, group, config) as moe:
                blocks = parallelize(model, moe)
                await anyio.to_thread.run_sync(generate, model, prompt_of(rank), 2)
                if rank == gone:
                    return
                for block in blocks:
                    block.caller.patience_s = SOON_S
                with pytest.raises(MissingRankError) as error:
                    await anyio.to_thread.run_sync(generate, model, prompt_of(rank))
                # A write to memory that is gone may take the other targets of its scatter along: they are named too.
                assert gone in error.value.ranks
                await moe.exclude([gone])
                for block in blocks:
                    block.caller.patience_s = None
                expected = generate(masked, prompt_of(rank))
                assert await anyio.to_thread.run_sync(generate, model, prompt_of(rank)) == expected
                ended.append(rank)

    async def everything() -> None:
        nonlocal met
        met = anyio.Event()
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for rank in range(ranks):
                    tasks.start_soon(one, rank)

    anyio.run(everything, backend="trio")
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_late_rank_is_named_by_the_deadline_of_the_scope_round_the_thread(backend: str) -> None:
    """The scope is on the loop, the model on a worker thread; afterwards all begin anew, without excluding anybody."""
    model = model_of("mixtral")
    go: dict[str, Any] = {}

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        named = go.setdefault("named", anyio.Event())
        mine = model_of("mixtral")
        parallelize(mine, moe)
        if moe.rank == 0:
            with anyio.fail_after(SOON_S), pytest.raises(MissingRankError, match="rank 1 silent") as error:
                await anyio.to_thread.run_sync(generate, mine, prompt_of(0))
            assert (error.value.ranks, error.value.lost) == ((1,), False)
            named.set()
        else:
            await named.wait()
        await moe.exclude([])
        stated = await anyio.to_thread.run_sync(generate, mine, prompt_of(moe.rank))
        assert stated == await anyio.to_thread.run_sync(generate, model, prompt_of(moe.rank))

    parallel(model, 2, body, backend)


def test_a_program_without_an_event_loop_uses_a_portal() -> None:
    model = model_of("qwen3")
    expected = generate(model, prompt_of(0))
    config = config_for(model, ranks=1, max_tokens=32)
    with (
        anyio.from_thread.start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(af.open_fabric()) as fabric,
        portal.wrap_async_context_manager(open_moe(fabric, MoeGroup(0, [fabric.address]), config)) as moe,
    ):
        parallelize(model, moe, portal=portal)
        assert generate(model, prompt_of(0)) == expected


def test_misuse_is_reported() -> None:
    model = model_of("mixtral")

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        with pytest.raises(ValueError, match="Linear has no sparse block of a known kind: Mixtral"):
            parallelize(torch.nn.Linear(2, 2), moe)
        with pytest.raises(TypeError, match="Linear is no sparse block"):
            ParallelBlock(torch.nn.Linear(2, 2), moe)
        with pytest.raises(ValueError, match=r"the block has .*\(10, 2, 64, torch.float32\), the exchange \(6, 2, 64"):
            parallelize(model_of("qwen3"), moe)
        with pytest.raises(ValueError, match="tile_rows must be at least 0, got -1"):
            parallelize(model, moe, tile_rows=-1)
        assert len(blocks_of(model)) == 3, "nothing was replaced"
        block = ParallelBlock(blocks_of(model)[0], moe)
        with pytest.raises(RuntimeError, match="from a worker thread: `await"):
            block(torch.zeros(1, 1, HIDDEN))
        with pytest.raises(RuntimeError, match="no backward pass"):
            await block.forward_async(torch.zeros(1, 1, HIDDEN, requires_grad=True))
        with pytest.raises(ValueError, match="x has 33 tokens"):
            await block.forward_async(torch.zeros(33, HIDDEN))
        assert moe.in_flight == ()

    parallel(model, 1, body)
    with pytest.raises(ValueError, match="block must divide hidden 48, got 32"):
        to_fp8(torch.zeros(1, 48), 32)

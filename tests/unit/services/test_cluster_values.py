"""Values of a cluster: prompts in offers, draws that are skipped, pages lent to a scheduler, and the demo's verdict."""

from __future__ import annotations

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from asyncfabric import BusyError, FabricConfig, InternalError, PeerError, open_fabric  # noqa: E402
from asyncfabric.kv import KvLayout, open_inbox, open_kv_channel, open_pool  # noqa: E402
from asyncfabric_services.demo.cluster.load import LoadOutcome, LoadRequest  # noqa: E402
from asyncfabric_services.demo.cluster.report import summarize  # noqa: E402
from asyncfabric_services.demo.cluster.scenario import Observed  # noqa: E402
from asyncfabric_services.demo.settings import DemoSettings  # noqa: E402
from asyncfabric_services.nodes.filling import fill  # noqa: E402
from asyncfabric_services.nodes.messages import PrefillSource, decode_prompt, encode_prompt  # noqa: E402
from asyncfabric_services.nodes.paged_model import PoolSupply  # noqa: E402
from asyncfabric_services.runner.choice import Chooser  # noqa: E402
from asyncfabric_services.runner.sampling import Sampling  # noqa: E402

SETTINGS = DemoSettings(
    provider="local",
    model=None,
    seed=0,
    layers=2,
    hidden=32,
    page_tokens=16,
    chunk=64,
    new_tokens=8,
    pool_tokens=0,
    threads=1,
    deadline=60.0,
)


@pytest.mark.trio
async def test_a_source_whose_address_is_none_is_at_fault_and_not_the_request() -> None:
    layout = KvLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=16, dtype="float32")
    async with (
        open_fabric(FabricConfig(rails=("local",))) as fabric,
        open_pool(fabric, layout, pages=1) as pool,
        open_kv_channel(fabric) as channel,
        open_inbox(fabric, pool, channel) as inbox,
        await pool.lease("r", tokens=1) as lease,
    ):
        with pytest.raises(PeerError, match="its address cannot be read"):
            await fill(inbox, lease, PrefillSource("p", b"junk", layout), [1])


def test_prompts_survive_and_others_are_refused() -> None:
    assert decode_prompt(encode_prompt([1, 2, 255]), 3, 256) == [1, 2, 255]
    for body, tokens in [
        (encode_prompt([1, 2]), 3),
        (encode_prompt([1, 256]), 2),
        (encode_prompt([-1, 2]), 2),
        (msgspec.msgpack.encode(["a"]), 1),
        (b"\xff", 1),
        (b"", 0),
    ]:
        with pytest.raises(ValueError, match=r"token ids below 256|can be read"):
            decode_prompt(body, tokens, 256)


def test_skipped_draws_are_those_of_the_tokens_that_were_chosen_elsewhere() -> None:
    logits = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    whole = Chooser(Sampling(temperature=1.0, seed=5))
    expected = [whole.choose(row) for row in logits]
    rest = Chooser(Sampling(temperature=1.0, seed=5))
    rest.skip(15)
    assert [rest.choose(row) for row in logits[15:]] == expected[15:]


@pytest.mark.trio
async def test_a_pool_lends_pages_to_a_roster() -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
    async with open_fabric(FabricConfig(rails=("local",))) as fabric, open_pool(fabric, layout, pages=4) as pool:
        supply = PoolSupply(pool)
        first, second = supply.lease(1), supply.lease(2)
        assert (supply.pages, supply.free, len({*first, *second})) == (4, 1, 3)
        with pytest.raises(BusyError):
            supply.lease(2)
        supply.release(second)
        supply.release(first)
        assert supply.free == 4
        with pytest.raises(InternalError):
            supply.release(first)


def outcome(text: str, error: str = "") -> LoadOutcome:
    return LoadOutcome(LoadRequest("p", 3), text, error, 0.1, 0.5)


@pytest.mark.parametrize(
    ("reported", "wrong", "lost", "fine"),
    [
        (Observed([outcome("abc")] * 3, sent_bytes=2e9, open_seconds=2.0, exposed_seconds=0.5), 0, 0, True),
        (Observed([outcome("abc"), outcome("abd")]), 1, 0, False),
        (Observed([outcome("abc"), outcome("ab", "APIError: broke")]), 0, 1, False),
        (Observed([outcome("abc")], leaked_pages=1), 0, 0, False),
        (Observed([outcome("abc")], dirty_ends=["decode-3"]), 0, 0, False),
        (Observed(), 0, 0, False),
    ],
)
def test_the_verdict_of_the_demo(reported: Observed, wrong: int, lost: int, fine: bool) -> None:
    summary = summarize(SETTINGS, reported, {LoadRequest("p", 3): "abc"}, 1.0)
    assert (summary.wrong_answers, summary.lost, summary.fine) == (wrong, lost, fine)
    assert summary.requests == len(reported.outcomes)
    if reported.open_seconds:
        assert (summary.gbytes_per_s, summary.hidden_share) == (1.0, 0.75)
        assert summary.per_token_p50_ms == pytest.approx(200)

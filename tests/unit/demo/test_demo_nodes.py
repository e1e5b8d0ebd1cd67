"""Both ends of the demo in one process, over the fake engine: the protocol, a refusal, a wrong page, a lost page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

pytest.importorskip("torch", reason="the demo needs torch")
pytest.importorskip("transformers", reason="the demo needs transformers")

from asyncfabric import FabricConfig, TransferError
from asyncfabric.kv import KvStream
from asyncfabric.kv.posting import Post, Posting
from asyncfabric.testing import FakeEngine, FakeNetwork
from asyncfabric_services.children.line_channel import LineChannel
from asyncfabric_services.demo.pair import decode, prefill
from asyncfabric_services.demo.pair.node import PairNode, run_node
from asyncfabric_services.demo.pair.protocol import (
    Finish,
    Meet,
    PairAnswer,
    PairGoodbye,
    PairHello,
    Pushed,
    Start,
    ToChild,
    ToParent,
)
from asyncfabric_services.demo.prompts import jobs_of_lengths
from asyncfabric_services.demo.settings import DemoSettings

SETTINGS = DemoSettings(layers=2, hidden=64, new_tokens=5, pool_tokens=64, chunk=24, deadline=20.0)


class BenchWorker:
    """One node under test: its orders go in, its reports come out."""

    def __init__(
        self, serve: Callable[[PairNode], Awaitable[None]], settings: DemoSettings, network: FakeNetwork
    ) -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        self._serve = serve
        self._settings = settings
        self._node_channel = LineChannel(theirs, theirs, ToChild)
        self._network = network
        self.channel = LineChannel(ours, ours, ToParent)
        self.orders, self._orders_out = trio.open_memory_channel[ToChild](8)

    async def run(self) -> None:
        def make_engine(config: FabricConfig) -> FakeEngine:
            return FakeEngine(config, self._network)

        start = Start(self._settings, b"of this demo only")
        await run_node(self._serve, start, self._node_channel, self._orders_out, make_engine)

    async def next(self, kind: type[Any]) -> Any:
        """Return the next message of one kind."""
        while not isinstance(message := await self.channel.receive(), kind):
            assert message is not None
        return message


async def conduct(
    lengths: list[int], prefill_settings: DemoSettings, decode_settings: DemoSettings
) -> list[PairAnswer]:
    """Do what the parent does, with both nodes as tasks; return the answers."""
    network = FakeNetwork()
    first, second = (
        BenchWorker(prefill.serve, prefill_settings, network),
        BenchWorker(decode.serve, decode_settings, network),
    )
    answers = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            nursery.start_soon(second.run)
            hellos = [await worker.next(PairHello) for worker in (first, second)]
            await first.orders.send(Meet(hellos[1].address, hellos[1].layout))
            await second.orders.send(Meet(hellos[0].address, hellos[0].layout))
            for job in jobs_of_lengths(lengths):
                await second.orders.send(job)
                pushed, answer = await first.next(Pushed), await second.next(PairAnswer)
                assert pushed.pages == answer.arrivals - 1 >= 2 * -(-job.tokens // prefill_settings.page_tokens)
                assert sum(write.bytes for write in pushed.writes) == pushed.bytes
                answers.append(answer)
            for worker in (first, second):
                await worker.orders.send(Finish())
                assert (await worker.next(PairGoodbye)).leaked_pages == 0
    return answers


def run_both(
    lengths: list[int], prefill_settings: DemoSettings = SETTINGS, decode_settings: DemoSettings = SETTINGS
) -> list[PairAnswer]:
    return trio.run(conduct, lengths, prefill_settings, decode_settings)


@pytest.mark.slow
def test_every_prompt_is_answered_as_in_one_process() -> None:
    answers = run_both([1, 16, 17, 50])
    assert [answer.differences for answer in answers] == [[], [], [], []]
    assert [answer.prompt_tokens for answer in answers] == [1, 16, 17, 50]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "named"), [("seed", 1, "model: "), ("layers", 3, "layers: "), ("hidden", 128, "head_dim: ")]
)
def test_another_model_is_refused_by_the_name_of_the_field(field: str, value: int, named: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_both([20], decode_settings=msgspec.structs.replace(SETTINGS, **{field: value}))
    refusals = caught.value.subgroup(ValueError)
    assert refusals is not None
    assert f"the layouts differ in {named}" in flat(refusals)


@pytest.mark.slow
def test_nodes_with_other_page_sizes_give_the_same_bits() -> None:
    answers = run_both([1, 17, 50], decode_settings=msgspec.structs.replace(SETTINGS, page_tokens=8))
    assert [answer.differences for answer in answers] == [[], [], []]


@pytest.mark.slow
def test_a_page_written_to_the_place_of_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Posting.add

    def add_wrong(self: Posting, post: Post) -> None:
        batch = post.batch._replace(target_offsets=post.batch.target_offsets[::-1].copy())
        add(self, post._replace(batch=batch))

    monkeypatch.setattr(Posting, "add", add_wrong)
    (answer,) = run_both([20], msgspec.structs.replace(SETTINGS, chunk=0))
    assert "first logits differ" not in answer.differences  # the context was right, the pages were not
    assert answer.differences[-1] == "pages differ from the cache of one process"
    assert any(text.startswith("logits of token") for text in answer.differences)


@pytest.mark.slow
def test_a_page_that_is_never_written_is_lost_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Posting.add

    def add_less(self: Posting, post: Post) -> None:
        _, sources, targets = post.batch
        add(self, post._replace(batch=post.batch._replace(source_offsets=sources[1:], target_offsets=targets[1:])))

    monkeypatch.setattr(Posting, "add", add_less)
    impatient = msgspec.structs.replace(SETTINGS, deadline=1.0, chunk=0)
    with pytest.raises(ExceptionGroup) as caught:
        run_both([20], impatient, impatient)
    assert caught.value.subgroup(TimeoutError) is not None
    assert "3 of 5 pieces had arrived" in flat(caught.value)


@pytest.mark.slow
def test_a_failed_push_ends_the_forward_pass_and_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def push_never(self: KvStream, layer: int, tokens_ready: int) -> int:
        raise ValueError("this layer cannot be pushed")

    monkeypatch.setattr(KvStream, "push", push_never)
    with pytest.raises(ExceptionGroup) as caught:
        run_both([20])
    failed = caught.value.subgroup(TransferError)
    assert failed is not None
    assert "this layer cannot be pushed" in flat(failed)


def flat(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return " ".join(flat(inner) for inner in error.exceptions)
    return str(error)

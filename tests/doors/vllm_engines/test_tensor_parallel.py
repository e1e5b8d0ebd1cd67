"""Engines of different tensor parallelism over our connector: right text, all blocks come back."""

from __future__ import annotations

import pytest

from nodes import ASK, OURS, TCP, Node, hold_a_cancelled_load, kill_in_mid_transfer, prompt

SIZES = [
    (1, 2, "HND"),
    (2, 1, "NHD"),
    (1, 2, "NHD"),
    (2, 1, "HND"),
    (1, 4, "NHD"),  # of two heads: each is kept by two workers
    (4, 1, "HND"),
    (2, 4, "NHD"),
    (4, 2, "HND"),
    (4, 4, "NHD"),
]
LEASE_S = 300


@pytest.mark.parametrize(("here", "there", "order"), SIZES)
def test_text_equals_that_of_one_engine(here: int, there: int, order: str) -> None:
    with (
        Node("P", OURS, ranks=here, order=order, lease_s=LEASE_S, blocks=48, packed=there == 1) as first,
        Node("D", OURS, ranks=there, order=order, lease_s=LEASE_S, blocks=80) as second,
    ):
        first.ready(), second.ready()
        for number, length in enumerate((1, 16, 17, 300)):
            tokens, name = prompt(length, number), f"length {length}"
            second.computed()
            second.add(name, tokens, 3, first.prefill(name, tokens))
            assert second.result(name)["tokens"] == first.alone(tokens, 3), length
            assert second.computed() == 3, "of the prompt its last token alone"
        names = {f"side {number}": prompt(60 + number, 50 + number) for number in range(4)}
        for name, tokens in names.items():
            second.add(name, tokens, 2, first.prefill(name, tokens))
        found = {name: second.result(name)["tokens"] for name in names}
        assert second.computed() == 2 * len(names)
        assert found == {name: first.alone(tokens, 2) for name, tokens in names.items()}
        first.emptied(), second.emptied()


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (4, 1)])
def test_layers_are_pushed_as_they_are_computed_when_decode_offers_first(here: int, there: int) -> None:
    tokens = prompt(300, 1)
    with Node("P", OURS, ranks=here, lease_s=LEASE_S) as first, Node("D", OURS, ranks=there) as second:
        first.ready(), second.ready()
        known = first.prefill("known", tokens)
        second.add("known", tokens, 3, known)
        expected = second.result("known")
        first.emptied()
        source = known["asyncfabric"] | {"transfer": "early"}
        second.add("early", tokens, 3, {"do_remote_prefill": True, "asyncfabric": source})
        second.waits("early")
        before = first.ask("report")["transferred"]["pushed_bytes"]
        first.add("early", tokens, 1, ASK | {"asyncfabric": {"transfer": "early"}})
        assert first.result("early")["pushed"] == 2 * before, "all of it when the prompt is done"
        assert second.result("early")["tokens"] == expected["tokens"]
        first.emptied(), second.emptied()


@pytest.mark.parametrize(("here", "there"), [(1, 2), (4, 1)])
def test_a_cancelled_load_gives_the_blocks_of_all_workers_back(here: int, there: int) -> None:
    tokens = prompt(300, 5)
    with (
        Node("P", OURS, ranks=here, lease_s=LEASE_S, **TCP) as first,
        Node("D", OURS, ranks=there, lease_s=LEASE_S, **TCP) as second,
    ):
        first.ready(), second.ready()
        hold_a_cancelled_load(first, second, tokens)
        second.emptied(), first.emptied()
        params = first.prefill("unwanted", tokens)
        second.post("add", "unwanted", tokens, 1, params)
        second.post("abort", "unwanted")
        assert second.answers(2) == [None, None]
        second.emptied(), first.emptied()


@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 2)])
def test_after_kill_9_of_prefill_in_mid_transfer_decode_computes_again(here: int, there: int) -> None:
    tokens = prompt(300, 9)
    with Node("D", OURS, ranks=there, **TCP) as second:
        with Node("P1", OURS, ranks=here, **TCP) as first:
            first.ready(), second.ready()
            kill_in_mid_transfer(first, second, tokens)
        second.emptied()


def test_an_engine_whose_heads_lie_in_another_order_computes_for_itself() -> None:
    tokens = prompt(100, 3)
    with Node("P", OURS, order="NHD", lease_s=LEASE_S) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        second.add("other", tokens, 2, first.prefill("other", tokens))
        found = second.result("other")["tokens"]
        assert second.computed() == len(tokens) + 1
        assert found == second.alone(tokens, 2)
        first.emptied(), second.emptied()

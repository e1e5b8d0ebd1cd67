"""vLLM's NixlConnector over the face: pull and push, other sizes, aborts, leases, kills, an engine that joins later.

Each engine is a process with vLLM's scheduler and both roles of its connector; text is right exactly if all bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nodes import Node

PULL, PUSH = "NixlPullConnector", "NixlPushConnector"
TCP = {"ASYNCFABRIC_NIXL_RAILS": "tcp"}
"""A frozen process serves no reads over this rail, so what is in flight stays in flight."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + position * 31) % 31000 + 10 for position in range(length)]


def node(name: str, connector: str, *, blocks: int = 64, lease_s: int = 30, **environment: str) -> Node:
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_producer" if name.startswith("P") else "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    return Node(name, transfer, blocks=blocks, **environment)


@pytest.fixture(scope="module", params=[PULL, PUSH])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Return engines for prefill and decode with different numbers of blocks."""
    with node("P", request.param, blocks=48) as first, node("D", request.param, blocks=80) as second:
        first.ready(), second.ready()
        yield first, second


def test_text_equals_that_of_one_engine_for_prompts_of_any_length(pair: tuple[Node, Node]) -> None:
    first, second = pair
    for number, length in enumerate((1, 15, 16, 17, 100, 300)):
        tokens, name = prompt(length, number), f"length {length}"
        second.computed()
        second.add(name, tokens, 4, first.prefill(name, tokens))
        assert second.result(name)["tokens"] == first.alone(tokens, 4), length
        assert second.computed() == 4, "of the prompt its last token alone"
    first.emptied(), second.emptied()


def test_requests_side_by_side_do_not_mix_their_blocks(pair: tuple[Node, Node]) -> None:
    first, second = pair
    second.computed()
    names = {f"side {number}": prompt(90 + number, 50 + number) for number in range(5)}
    for name, tokens in names.items():
        second.add(name, tokens, 3, first.prefill(name, tokens))
    found = {name: second.result(name)["tokens"] for name in names}
    assert second.computed() == 3 * len(names)
    assert found == {name: first.alone(tokens, 3) for name, tokens in names.items()}
    first.emptied(), second.emptied()


def test_an_abort_at_either_engine_gives_all_blocks_back(pair: tuple[Node, Node]) -> None:
    first, second = pair
    first.freeze()  # so that the abort comes before the engine has computed all
    first.post("add", "early", prompt(700, 3), 1, None)
    first.post("abort", "early")
    first.thaw()
    assert first.answers(2) == [None, None]
    first.emptied()
    if second.connector == PULL:  # of a push that was never registered vLLM waits for the lease
        params = first.prefill("late", prompt(100, 4))
        second.freeze()
        second.post("add", "late", prompt(100, 4), 3, params)
        second.post("abort", "late")
        second.thaw()
        assert second.answers(2) == [None, None]
        second.emptied(), first.emptied()


def test_blocks_that_no_engine_asks_for_come_back_when_their_lease_ends() -> None:
    with node("P", PULL, lease_s=1) as first:
        first.ready().prefill("lonely", prompt(100))
        assert first.ask("report")["free"] < first.blocks - 1
        assert first.emptied()["transferred"]["num_kv_expired_reqs"] == 1


def test_after_kill_9_of_prefill_in_mid_transfer_decode_computes_again_and_meets_one_that_joins_later() -> None:
    tokens = prompt(300, 9)
    with node("D", PULL, **TCP) as second:
        with node("P1", PULL, **TCP) as first:
            first.ready(), second.ready()
            second.add("well", tokens, 2, first.prefill("well", tokens))
            expected = second.result("well")["tokens"]
            params = first.prefill("cut", tokens)
            second.computed()
            first.freeze()
            second.add("cut", tokens, 2, params)
            begun = second.until(lambda report: report["loading"] == ["cut"])["steps"]
            assert second.until(lambda report: report["steps"] > begun + 2)["loading"] == ["cut"]
            first.kill()
        assert second.result("cut")["tokens"] == expected
        assert second.computed() == len(tokens) + 1
        assert second.emptied()["transferred"]["num_failed_transfers"] >= 1
        with node("P2", PULL, **TCP) as third:
            second.add("again", tokens, 2, third.ready().prefill("again", tokens))
            assert second.result("again")["tokens"] == expected
            assert second.computed() == 2
            second.emptied(), third.emptied()


def test_after_kill_9_of_decode_in_mid_push_prefill_gets_its_blocks_back_and_serves_another() -> None:
    tokens = prompt(300, 11)
    with node("P", PUSH, lease_s=2, **TCP) as first, node("D1", PUSH, **TCP) as second:
        first.ready(), second.ready()
        params = first.prefill("well", tokens)
        second.add("well", tokens, 2, params)
        expected = second.result("well")["tokens"]
        first.emptied()
        params = first.prefill("cut", tokens)
        second.freeze()  # it takes no bytes any more; its registration is sent by the engine that goes on
        second.post("add", "cut", tokens, 2, params)
        second.kill()
        first.emptied()
        with node("D2", PUSH, **TCP) as third:
            third.ready().add("again", tokens, 2, first.prefill("again", tokens))
            assert third.result("again")["tokens"] == expected
            third.emptied(), first.emptied()

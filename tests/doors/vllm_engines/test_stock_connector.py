"""vLLM's NixlConnector where things go wrong: leases, kills in mid-transfer, an engine that joins later."""

from __future__ import annotations

from nodes import PULL, PUSH, TCP, Node, kill_in_mid_transfer, prompt


def test_blocks_that_no_engine_asks_for_come_back_when_their_lease_ends() -> None:
    with Node("P", PULL, lease_s=1) as first:
        first.ready().prefill("lonely", prompt(100))
        assert first.ask("report")["free"] < first.blocks - 1
        assert first.emptied()["transferred"]["num_kv_expired_reqs"] == 1


def test_after_kill_9_of_prefill_in_mid_transfer_decode_computes_again_and_meets_one_that_joins_later() -> None:
    tokens = prompt(300, 9)
    with Node("D", PULL, **TCP) as second:
        with Node("P1", PULL, **TCP) as first:
            first.ready(), second.ready()
            expected = kill_in_mid_transfer(first, second, tokens)
        assert second.emptied()["transferred"]["num_failed_transfers"] >= 1
        with Node("P2", PULL, **TCP) as third:
            second.add("again", tokens, 2, third.ready().prefill("again", tokens))
            assert second.result("again")["tokens"] == expected
            assert second.computed() == 2
            second.emptied(), third.emptied()


def test_after_kill_9_of_decode_in_mid_push_prefill_gets_its_blocks_back_and_serves_another() -> None:
    tokens = prompt(300, 11)
    with Node("P", PUSH, lease_s=2, **TCP) as first, Node("D1", PUSH, **TCP) as second:
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
        with Node("D2", PUSH, **TCP) as third:
            third.ready().add("again", tokens, 2, first.prefill("again", tokens))
            assert third.result("again")["tokens"] == expected
            third.emptied(), first.emptied()

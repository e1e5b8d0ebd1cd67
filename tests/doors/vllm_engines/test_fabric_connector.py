"""Our connector beyond what all connectors do: early offers, strides, cancels, kills, refusals, metrics."""

from __future__ import annotations

import time

from nodes import ASK, OURS, TCP, Node, hold_a_cancelled_load, kill_in_mid_transfer, prompt

AT_ONCE_S = 4.0
"""Less than any deadline of the connector, on a machine that has other work."""


BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, keys and values, heads, tokens, numbers of a head, bytes of a number."""


def test_layers_are_pushed_while_the_prompt_is_computed_if_decode_offers_first() -> None:
    tokens = prompt(300, 1)
    with Node("P", OURS) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        known = first.prefill("known", tokens)
        second.add("known", tokens, 3, known)
        expected = second.result("known")
        first.emptied()
        source = {"transfer": "early", "addresses": known["asyncfabric"]["addresses"]}
        second.add("early", tokens, 3, {"do_remote_prefill": True, "asyncfabric": source})
        second.waits("early")
        before = first.ask("report")["transferred"]["pushed_bytes"]
        first.add("early", tokens, 1, ASK | {"asyncfabric": {"transfer": "early"}})
        assert first.result("early")["pushed"] == 2 * before, "all of it when the prompt is done"
        assert second.result("early")["tokens"] == expected["tokens"]
        assert 'vllm:asyncfabric_load_seconds_count{engine="0"} 2.0' in second.ask("metrics")
        first.emptied(), second.emptied()


def test_prefill_counts_each_byte_that_it_pushes_once() -> None:
    tokens = prompt(100, 12)  # 7 blocks
    with Node("P", OURS) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        for name in ("one", "two"):
            second.add(name, tokens, 1, first.prefill(name, tokens))
            second.result(name)
        pushed, loaded = first.emptied()["transferred"], second.emptied()["transferred"]
        whole = 2 * 7 * BLOCK_BYTES
        assert pushed["pushed_bytes"] == loaded["load_bytes"] == whole
        assert f'vllm:asyncfabric_pushed_bytes_total{{engine="0"}} {whole:.1f}' in first.ask("metrics")
        assert first.alone(tokens, 2)
        assert first.emptied()["transferred"]["pushed_bytes"] == whole, "a request of its own pushes nothing"


def test_block_strides_are_read_and_may_differ_between_the_engines() -> None:
    tokens = prompt(200, 2)
    with Node("P", OURS, packed=True) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        second.add("strided", tokens, 3, first.prefill("strided", tokens))
        assert second.result("strided")["tokens"] == first.alone(tokens, 3)
        assert second.computed() == 3
        first.emptied(), second.emptied()


def test_engines_whose_blocks_differ_compute_for_themselves() -> None:
    tokens = prompt(100, 3)
    with Node("P", OURS, head_size=32) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        second.add("other", tokens, 2, first.prefill("other", tokens))
        found = second.result("other")["tokens"]
        assert second.computed() == len(tokens) + 1
        assert found == second.alone(tokens, 2)
        first.emptied()
        assert second.emptied()["transferred"]["failed_loads"] == 1


def test_blocks_whose_lease_ended_are_refused_and_computed_again() -> None:
    tokens = prompt(100, 4)
    with Node("P", OURS, lease_s=1) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        params = first.prefill("late", tokens)
        assert first.emptied()["transferred"]["expired_requests"] == 1
        steps, begun = first.ask("report")["steps"], time.monotonic()
        second.add("late", tokens, 2, params)
        found = second.result("late")["tokens"]
        assert time.monotonic() - begun < AT_ONCE_S, "an engine without requests answers at once"
        assert first.ask("report")["steps"] == steps, "it takes no step"
        assert second.computed() == len(tokens) + 1
        assert found == first.alone(tokens, 2)
        second.emptied()


def test_a_cancel_that_comes_before_its_request_is_confirmed_at_once_and_ends_the_request() -> None:
    tokens = prompt(100, 6)
    with Node("P", OURS, lease_s=300) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        known = first.prefill("known", tokens)
        second.add("known", tokens, 3, known)
        second.result("known")
        steps = first.emptied()["steps"]
        source = {"transfer": "gone", "addresses": known["asyncfabric"]["addresses"]}
        second.add("gone", tokens, 3, {"do_remote_prefill": True, "asyncfabric": source})
        second.waits("gone")
        begun = time.monotonic()
        second.ask("abort", "gone")
        assert second.emptied()["transferred"]["cancelled_loads"] == 1
        assert time.monotonic() - begun < AT_ONCE_S
        assert first.ask("report")["steps"] == steps, "it takes no step"
        first.add("gone", tokens, 1, ASK | {"asyncfabric": {"transfer": "gone"}})
        first.result("gone")
        assert first.emptied()["transferred"].get("expired_requests", 0) == 0, "its lease is not waited for"


def test_an_offer_for_a_preempted_request_pushes_nothing_until_it_is_computed_again() -> None:
    tokens = prompt(460, 7)
    with Node("P", OURS, blocks=32, step_tokens=16) as first, Node("D", OURS) as second:
        first.ready(), second.ready()
        known = first.prefill("known", tokens)
        second.add("known", tokens, 3, known)
        expected = second.result("known")["tokens"]
        first.emptied()
        first.post("add", "other", prompt(10, 8), 450, None)
        first.post("add", "late", tokens, 1, ASK | {"asyncfabric": {"transfer": "late"}})
        first.answers(2)
        first.until(lambda report: report["preempted"] and report["free"] <= 15)  # half of its blocks are the other's
        source = {"transfer": "late", "addresses": known["asyncfabric"]["addresses"]}
        second.add("late", tokens, 3, {"do_remote_prefill": True, "asyncfabric": source})
        assert second.result("late")["tokens"] == expected
        first.emptied(), second.emptied()


def test_a_cancelled_load_gives_its_blocks_back_when_the_source_has_confirmed() -> None:
    tokens = prompt(300, 5)
    with Node("P", OURS, **TCP) as first, Node("D", OURS, **TCP) as second:
        first.ready(), second.ready()
        hold_a_cancelled_load(first, second, tokens)
        assert second.emptied()["transferred"]["cancelled_loads"] == 1
        first.emptied()


def test_after_kill_9_of_prefill_in_mid_transfer_decode_computes_again_and_meets_one_that_joins_later() -> None:
    tokens = prompt(300, 9)
    with Node("D", OURS, **TCP) as second:
        with Node("P1", OURS, **TCP) as first:
            first.ready(), second.ready()
            expected = kill_in_mid_transfer(first, second, tokens)
        assert second.emptied()["transferred"]["failed_loads"] == 1
        with Node("P2", OURS, **TCP) as third:
            second.add("again", tokens, 2, third.ready().prefill("again", tokens))
            assert second.result("again")["tokens"] == expected
            assert second.computed() == 2
            second.emptied(), third.emptied()


def test_after_kill_9_of_decode_in_mid_push_prefill_gets_its_blocks_back_and_serves_another() -> None:
    tokens = prompt(300, 11)
    with Node("P", OURS, **TCP) as first, Node("D1", OURS, **TCP) as second:
        first.ready(), second.ready()
        params = first.prefill("well", tokens)
        second.add("well", tokens, 2, params)
        expected = second.result("well")["tokens"]
        first.emptied()
        source = {"transfer": "cut", "addresses": params["asyncfabric"]["addresses"]}
        second.add("cut", tokens, 2, {"do_remote_prefill": True, "asyncfabric": source})
        second.waits("cut")  # its offer is out
        second.freeze()
        first.add("cut", tokens, 1, ASK | {"asyncfabric": {"transfer": "cut"}})
        assert first.result("cut")["pushed"] > 0
        second.kill()
        first.emptied()
        with Node("D2", OURS, **TCP) as third:
            third.ready().add("again", tokens, 2, first.prefill("again", tokens))
            assert third.result("again")["tokens"] == expected
            third.emptied(), first.emptied()


def test_a_request_whose_parameters_name_no_engine_is_computed_and_harms_nobody() -> None:
    tokens = prompt(100, 14)
    with Node("D", OURS) as only:
        expected = only.ready().alone(tokens, 2)
        for number, addresses in enumerate((["a"], ["AAAA"], [], ["AAAA"] * 2)):
            source = {"transfer": f"nowhere {number}", "addresses": addresses}
            only.add(f"bad {number}", tokens, 2, {"do_remote_prefill": True, "asyncfabric": source})
            assert only.result(f"bad {number}")["tokens"] == expected, addresses
        only.emptied()
    with Node("P", OURS, lease_s=1, step_tokens=1024, blocks=128) as only:
        only.ready()
        for number, asked in enumerate(([], "name", {"transfer": {}}, {"transfer": 3})):
            only.add(f"bad {number}", tokens, 1, ASK | {"asyncfabric": asked})
            assert only.result(f"bad {number}")["params"]["asyncfabric"]["transfer"] == f"P/bad {number}", asked
        only.freeze()  # so that both are in one step
        only.post("add", "one", prompt(300, 15), 1, ASK | {"asyncfabric": {"transfer": "same"}})
        only.post("add", "other", prompt(300, 16), 1, ASK | {"asyncfabric": {"transfer": "same"}})
        only.thaw()
        assert only.answers(2) == [None, None]
        names = {only.result(each)["params"]["asyncfabric"]["transfer"] for each in ("one", "other")}
        assert names == {"same", "P/other"}
        only.emptied()

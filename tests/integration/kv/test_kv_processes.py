"""Streams between real processes: whole, cancelled in the middle, the source killed or stopped, writes that come late.

After each of them every page is free again, and what is then written into the pages stays as it is.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from availability import need
from processes import Process

LAYOUT: dict[str, Any] = {
    "layers": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "page_tokens": 32,
    "dtype": "float16",
    "context_bytes": 4096,
}
PAGE_BYTES = 2 * 4 * 64 * 32 * 2
PAGES = 256
TOKENS = 32 * 120

pytestmark = pytest.mark.slow


def node(*rails: str, confirm_s: float = 5.0, pages: int = PAGES, **options: Any) -> Process:
    """Start a node. It calls nobody dead for being slow: a loaded machine lets processes wait for seconds.

    Over tcp a death is known by silence alone, so who has to notice one waits for less.
    """
    options.setdefault("peer_deadline_host", 20.0)
    process = Process("kv_node.py")
    process.send(rails=list(rails), options=options, layout=LAYOUT, pages=pages, confirm_s=confirm_s)
    return process


def untouched(target: Process, free: int = PAGES) -> dict[str, Any]:
    """Every page comes back; returns what the pool reports then. The pages hold poison afterwards."""
    report = target.ask("everything")
    assert (report["free"], report["quarantined"]) == (free, 0)
    return report


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_pages_arrive_whole_from_two_sources_at_once(rail: str) -> None:
    need(rail)
    with node(rail) as target, node(rail) as first, node(rail) as second:
        target.receive()
        for name, source in (("a", first), ("b", second)):
            answer = target.ask("request", address=source.receive()["address"], tokens=TOKENS - 5, name=name)
            assert answer["expected"] == 8 * 120 + 1
        for name in "ab":
            assert target.ask("wait", name=name) == {"arrived": 8 * 120 + 1, "wrong": 0, "exposed": False}
            assert target.ask("leave", name=name)["free"]
        assert untouched(target)["fences"] == 0
        for source in (first, second):
            assert source.ask("drained") == {"served": 1, "unclean": 0, "free": True, "refused": []}
            source.close()
        assert target.ask("foreign")["bytes"] == 0
        target.close()


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_cancelled_in_the_middle(rail: str) -> None:
    """The source stops, drains, confirms: the pages are free at once and without a fence, both sides reuse them."""
    need(rail)
    with node(rail) as target, node(rail) as source:
        target.receive()
        address = source.receive()["address"]
        for turn in range(3):
            target.ask("request", address=address, tokens=TOKENS, name="cut", gated=True)
            source.ask("allow", layers=4)
            target.ask("until", name="cut", arrived=1 + turn)
            left = target.ask("leave", name="cut")
            assert left["free"] and not left["exposed"]
            assert untouched(target)["fences"] == 0
            assert source.ask("drained") == {"served": turn + 1, "unclean": 0, "free": True, "refused": []}
            assert target.ask("foreign")["bytes"] == 0
        target.ask("request", address=address, tokens=TOKENS, name="whole")
        assert target.ask("wait", name="whole")["wrong"] == 0
        target.ask("leave", name="whole")
        target.close()
        source.close()


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_the_source_is_killed_in_the_middle(rail: str) -> None:
    """Its request fails by name, its pages are fenced and come back, the next source fills them."""
    need(rail)
    with node(rail, peer_deadline_host=3.0, confirm_s=0.5) as target, node(rail) as other:
        target.receive()
        elsewhere = other.receive()["address"]
        for round_number in range(3):
            with node(rail) as source:
                address = source.receive()["address"]
                target.ask("request", address=address, tokens=TOKENS, name="cut", gated=True)
                source.send(do="allow", layers=7)
                target.ask("until", name="cut", arrived=1 + 300 * round_number)
                source.send_signal(signal.SIGKILL)
                error = target.fail("wait", name="cut")
                assert error["error"] == "PeerError", error
                target.ask("leave", name="cut")
                assert untouched(target)["fences"] == round_number + 1
                assert target.ask("foreign")["bytes"] == 0
        target.ask("request", address=elsewhere, tokens=TOKENS, name="next")
        assert target.ask("wait", name="next")["wrong"] == 0
        target.ask("leave", name="next")
        target.close()
        other.close()


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_the_leaseholder_is_killed_in_the_middle(rail: str) -> None:
    """Its streams end, the source's pages come back, and the source serves the next."""
    need(rail)
    with node(rail, peer_deadline_host=4.0) as source, node(rail) as other:
        address = source.receive()["address"]
        other.receive()
        with node(rail) as target:
            target.receive()
            target.ask("request", address=address, tokens=TOKENS, name="cut", gated=True)
            source.ask("allow", layers=4)
            target.ask("until", name="cut", arrived=1)
            target.send_signal(signal.SIGKILL)
            drained = source.ask("drained")
            assert drained["free"] and drained["served"] == 1
        other.ask("request", address=address, tokens=TOKENS, name="next")
        assert other.ask("wait", name="next")["wrong"] == 0
        other.ask("leave", name="next")
        other.close()
        source.close()


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_a_stopped_source_comes_back_too_late(rail: str) -> None:
    """SIGSTOP in the middle: no confirmation, so the pages wait for a fence; continued, it changes nothing any more."""
    need(rail)
    with (
        node(rail, peer_deadline_host=1.0, drain_deadline=1.0, confirm_s=0.3) as target,
        node(rail) as source,
    ):
        target.receive()
        target.ask("request", address=source.receive()["address"], tokens=TOKENS, name="cut", gated=True)
        source.ask("allow", layers=2)
        target.ask("until", name="cut", arrived=1)
        source.send(do="allow", layers=6)
        source.send_signal(signal.SIGSTOP)
        assert not target.ask("leave", name="cut")["free"]
        # Stopped in the middle of a copy it cannot be fenced off before it goes on, stopped elsewhere it can.
        source.send_signal(signal.SIGCONT)
        assert untouched(target)["fences"] == 1
        source.receive()
        assert source.ask("drained")["free"]
        assert target.ask("foreign")["bytes"] == 0
        source.close()
        target.close()


def test_writes_that_come_late_find_their_key_dead() -> None:
    """The source's rail holds each write for 3 s and the source does not listen: only the fence is left.

    Hung up on, it connects again and writes once more with its old key, which is refused.
    """
    need("local")
    with (
        node("fault+local", confirm_s=0.05) as target,
        node("fault+local?delay_us=3000000&reorder=16&seed=5") as source,
    ):
        target.receive()
        target.ask("request", address=source.receive()["address"], tokens=TOKENS, name="late", deaf=True)
        source.ask("posted")
        left = target.ask("leave", name="late")
        assert left["exposed"] and not left["free"]
        assert untouched(target)["fences"] == 1
        source.ask("allow", layers=1)
        drained = source.ask("drained")
        assert drained["free"] and drained["unclean"] == 1 and drained["refused"] == ["StaleKeyError"]
        assert target.ask("foreign")["bytes"] == 0, "a late write landed in pages that were free"
        source.close()
        target.close()


def test_nobody_else_is_harmed_by_a_fence() -> None:
    """While others receive, the pages of a lost source wait; the fence comes when nobody does."""
    need("local")
    with node("local", confirm_s=0.2) as target, node("local") as good:
        target.receive()
        address = good.receive()["address"]
        with node("local") as bad:
            target.ask("request", address=bad.receive()["address"], tokens=64, name="bad", gated=True)
            target.ask("request", address=address, tokens=64, name="good", gated=True)
            bad.ask("allow", layers=2)
            target.ask("until", name="bad", arrived=1)
            bad.send_signal(signal.SIGKILL)
            assert target.fail("wait", name="bad")["error"] == "PeerError"
            assert not target.ask("leave", name="bad")["free"]
            good.ask("allow", layers=8)
            assert target.ask("wait", name="good")["wrong"] == 0
            target.ask("leave", name="good")
        assert untouched(target)["fences"] == 1
        target.close()
        good.close()

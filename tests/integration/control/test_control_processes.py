"""The control plane between real processes: two transports, wrong keys, kill -9, restarts, stopped processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Process, nothing_is_kept

from asyncfabric.control import make_keys

DEADLINE_S = 1.5
CONFIG = {"heartbeat_s": 0.1, "peer_deadline_s": 30.0, "connect_deadline_s": 30.0}  # nobody is lost for being slow
Start = Callable[..., tuple[Process, dict[str, Any]]]
pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a node and returns where and who it is."""
    pairs: dict[str, tuple[str, str]] = {}
    folder = tmp_path / "s"
    with ExitStack() as stack:

        def start(
            name: str, bind: str = "ipc", *, trusts: str = "abc", **config: float
        ) -> tuple[Process, dict[str, Any]]:
            for one in {name, *trusts}:
                pairs.setdefault(one, make_keys())
            process = stack.enter_context(Process("control_node.py"))
            keyed = {"keys": pairs[name], "trusted": [pairs[one][0] for one in trusts]} if bind[:3] == "tcp" else {}
            process.send(name=name, bind=bind, config={**CONFIG, **config, "ipc_folder": str(folder)}, **keyed)
            return process, process.receive()

        yield start


@pytest.mark.parametrize("bind", ["ipc", "tcp"])
def test_three_processes_talk_and_the_death_of_one_is_reported_to_the_others(start: Start, bind: str) -> None:
    (a, at_a), (b, at_b), (c, at_c) = (start(name, bind) for name in "abc")
    for process in (a, b, c):
        process.ask("listen", channel="x")
        process.ask("watch")
    assert a.ask("connect", address=at_b["address"])["peer"] == at_b["identity"]
    assert b.ask("connect", address=at_c["address"])["peer"] == at_c["identity"]
    assert c.ask("connect", address=at_a["address"])["peer"] == at_a["identity"]
    texts = [f"{number}" * 50 for number in range(200)]
    for source, to, target, sender in ((a, at_b, b, at_a), (b, at_a, a, at_b), (c, at_b, b, at_c)):
        source.ask("send", to=to["identity"], channel="x", texts=texts)
        assert target.ask("take", channel="x", count=200)["arrivals"] == [[sender["identity"], text] for text in texts]
    for one in (a, b):
        assert one.ask("until", name="c", state="ready")["peer"] == at_c["identity"]
    c.send_signal(signal.SIGKILL)
    for one in (a, b):
        lost = one.ask("until", name="c", state="lost")
        assert lost["peer"] == at_c["identity"]
        assert "silent" not in lost["reason"], "a connection that breaks is noticed before any deadline"
    assert a.fail("send", to=at_c["identity"], channel="x", texts=["x"])["error"] == "PeerError"
    a.ask("send", to=at_b["identity"], channel="x", texts=["after"])
    assert b.ask("take", channel="x", count=1)["arrivals"][0][1] == "after"
    for one in (a, b):
        assert one.ask("statistics")["errors"] == {}
        one.close()


def test_a_process_that_stands_still_is_lost_by_its_deadline(start: Start) -> None:
    (a, at_a), (b, at_b) = start("a", peer_deadline_s=DEADLINE_S), start("b", peer_deadline_s=DEADLINE_S)
    for process in (a, b):
        process.ask("watch")
    a.ask("connect", address=at_b["address"])
    b.send_signal(signal.SIGSTOP)
    assert a.ask("until", name="b", state="lost")["reason"].startswith("silent for 1.5")
    b.send_signal(signal.SIGCONT)
    # It learns that it was lost, and both can begin anew, as the same incarnations.
    b.ask("until", name="a", state="lost")
    assert b.ask("connect", address=at_a["address"])["peer"] == at_a["identity"]
    assert a.ask("until", name="b", state="ready")["peer"] == at_b["identity"]


def test_a_loop_that_stood_still_loses_nobody_who_spoke_meanwhile(start: Start) -> None:
    (a, _), (b, at_b) = start("a"), start("b", peer_deadline_s=DEADLINE_S)
    for process in (a, b):
        process.ask("watch")
    a.ask("connect", address=at_b["address"])
    b.ask("until", name="a", state="ready")
    b.ask("block", seconds=DEADLINE_S + 0.5)
    assert b.ask("statistics")["lost"] == a.ask("statistics")["lost"] == 0
    a.close()
    assert b.ask("until", name="a", state="lost")["reason"] == "left"


def test_a_key_that_is_not_trusted_stays_outside(start: Start) -> None:
    (b, at_b), (a, at_a) = start("b", "tcp", trusts="b"), start("a", "tcp", trusts="ab")
    answer = a.fail("connect", address=at_b["address"])
    assert answer["error"] == "RefusedError" and "does not trust our key" in answer["text"]
    answer = b.fail("connect", address=at_a["address"])
    assert answer["error"] == "RefusedError" and "not trusted here" in answer["text"]
    assert b.ask("statistics") == {"ready": 0, "lost": 0, "errors": {"unauthenticated": 1}}
    a.close()
    b.close()


def test_a_wrong_server_key_is_no_way_in(start: Start) -> None:
    (b, at_b), (a, at_a) = start("b", "tcp"), start("a", "tcp")
    endpoint = at_b["address"].partition("#")[0]
    answer = a.fail("connect", address=f"{endpoint}#{at_a['address'].partition('#')[2]}")  # a trusted key, not b's
    assert answer["error"] == "PeerError" and "handshake" in answer["text"]
    assert b.ask("statistics")["ready"] == 0


@pytest.mark.parametrize("bind", ["ipc", "tcp"])
def test_a_restart_under_the_same_name_replaces_and_the_old_one_is_refused(start: Start, bind: str) -> None:
    (b, at_b), (old, at_old) = start("b", bind), start("a", bind)
    b.ask("watch")
    b.ask("listen", channel="x")
    old.ask("watch")
    old.ask("connect", address=at_b["address"])
    b.ask("until", name="a", state="ready")
    old.send_signal(signal.SIGSTOP)  # alive, but nobody can know
    new, at_new = start("a", bind)
    assert at_new["identity"][0] == at_old["identity"][0] and at_new["identity"][1] > at_old["identity"][1]
    new.ask("connect", address=at_b["address"])
    lost = b.ask("until", name="a", state="lost")
    assert lost["peer"] == at_old["identity"] and lost["reason"].startswith("replaced by a@")
    assert b.ask("until", name="a", state="ready")["peer"] == at_new["identity"]
    old.send_signal(signal.SIGCONT)
    old.ask("until", name="b", state="lost")
    assert "earlier incarnation" in old.fail("connect", address=at_b["address"])["text"]
    new.ask("send", to=at_b["identity"], channel="x", texts=["new"])
    assert b.ask("take", channel="x", count=1)["arrivals"] == [[at_new["identity"], "new"]]
    assert b.ask("statistics")["errors"]["retired"] >= 1


def test_sockets_of_killed_processes_are_swept(start: Start) -> None:
    a, at_a = start("a")
    left = Path(at_a["address"].removeprefix("ipc://"))
    a.send_signal(signal.SIGKILL)
    a.child.wait()
    assert left.exists()
    start("b")
    assert not left.exists()


def test_a_directory_that_was_killed_comes_back_and_the_nodes_with_it(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    bind = f"ipc://{folder}/directory.sock"
    lease_ns = 2_000_000_000
    directory, _ = start("d", bind)
    directory.ask("serve", lease_ns=lease_ns)
    directory.ask("join", address=bind, role="directory")
    (a, at_a), (b, at_b) = start("a"), start("b")
    a.ask("join", address=bind, role="prefill")
    b.ask("join", address=bind, role="decode")
    everybody = [["a", "ready"], ["b", "ready"], ["d", "ready"]]
    for one in (a, b, directory):
        one.ask("until_nodes", wanted=everybody)
    b.ask("drain")
    everybody[1][1] = "draining"
    a.ask("until_nodes", wanted=everybody)

    directory.send_signal(signal.SIGKILL)
    directory.child.wait()
    a.ask("connect", address=at_b["address"])  # what was agreed goes on without a directory
    assert len(a.ask("nodes")["nodes"]) == 3, "a view must outlive its directory"
    again, at_again = start("d", bind)
    again.ask("serve", lease_ns=lease_ns)
    again.ask("join", address=bind, role="directory")
    seen = again.ask("until_nodes", wanted=everybody)["nodes"]
    assert [*at_a["identity"], "prefill", "ready"] in seen and [*at_b["identity"], "decode", "draining"] in seen
    answer = a.ask("until_nodes", wanted=everybody)
    while at_again["identity"] not in [node[:2] for node in answer["nodes"]]:
        answer = a.ask("until_nodes", wanted=everybody)
    assert ["lost", "b"] not in answer["kinds"]

    b.send_signal(signal.SIGKILL)
    everybody.pop(1)
    for one in (a, again):
        one.ask("until_nodes", wanted=everybody)
    assert ["lost", "b"] in a.ask("until_nodes", wanted=everybody)["kinds"]
    a.ask("leave")
    assert ["left", "a"] in again.ask("until_nodes", wanted=[["d", "ready"]])["kinds"]


@pytest.mark.parametrize("bind", ["ipc", "tcp"])
def test_a_directory_and_its_nodes_keep_nothing_of_a_node_that_dies_and_returns(start: Start, bind: str) -> None:
    (directory, at_directory), (a, at_a) = start("d", bind, trusts="abcd"), start("a", bind, trusts="abcd")
    directory.ask("serve", lease_ns=30_000_000_000)
    for one, role in ((directory, "directory"), (a, "prefill")):
        one.ask("join", address=at_directory["address"], role=role)
    a.ask("listen", channel="x")
    rest = [["a", "ready"], ["d", "ready"]]

    def die(number: int) -> None:
        b, at_b = start("b", bind, trusts="abcd")
        b.ask("join", address=at_directory["address"], role="decode")
        a.ask("connect", address=at_b["address"])  # by a socket of its own; the directory has accepted one
        b.ask("listen", channel="x")
        for source, to, target in ((a, at_b, b), (b, at_a, a)):
            source.ask("send", to=to["identity"], channel="x", texts=[f"{number}"])
            target.ask("take", channel="x", count=1)
        a.ask("until_nodes", wanted=[rest[0], ["b", "ready"], rest[1]])
        b.send_signal(signal.SIGKILL)
        b.child.wait()

    def forgotten() -> None:
        for one in (a, directory):
            one.ask("until_nodes", wanted=rest)

    nothing_is_kept({"the directory": directory, "a node": a}, die, forgotten)

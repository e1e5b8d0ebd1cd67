"""Two router processes over the same nodes: each chooses by what the other assigned, until that one is gone.

Idle nodes are chosen by name, so a router alone would send one request after the other to the same node.
"""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

from cluster import Cluster, Service, ask, bare_cluster  # noqa: E402

pytestmark = pytest.mark.slow
NODES = ("prefill-1", "prefill-2", "decode-1", "decode-2")
ROUTERS = ("router-1", "router-2")
PROMPT, LONG, SHORT = "what one router assigned, the other one counts", 1500, 2
MOST = 60  # short requests until one goes where it is to go; shares are sent a few times a second
PASSES = "asyncfabric_runner_pass_seconds_count"


def read(one: socket.socket) -> bytes:
    return b"".join(iter(lambda: one.recv(65536), b""))


class LongRequest:
    """A request that its router has at a node; asked again when it ends before the test is through with it."""

    def __init__(self, router: Service) -> None:
        self._router = router
        self._one = self._asked()

    def keep(self) -> None:
        """Ask again when it has ended."""
        self._one.setblocking(False)
        try:
            while self._one.recv(65536):
                pass
        except BlockingIOError:
            return
        self._one.close()
        self._one = self._asked()

    def close(self) -> None:
        self._one.close()

    def _asked(self) -> socket.socket:
        one = ask(self._router, PROMPT, LONG)
        one.recv(1)  # the answer has begun
        return one


def start(made: Cluster) -> None:
    made.start(*NODES, *ROUTERS)
    for router in ROUTERS:
        for role in ("prefill", "decode"):
            made[router].until(f"asyncfabric_router_{role}_nodes", lambda nodes: nodes == 2)


def ask_until_at(router: Service, node: Service, long: LongRequest | None) -> None:
    """Ask a router for short answers until one is computed by this node."""
    for _ in range(MOST):
        if long is not None:
            long.keep()
        before = node.metric(PASSES)
        with closing(ask(router, PROMPT, SHORT)) as one:
            assert b"[DONE]" in read(one)
        if node.metric(PASSES) > before:
            return
    raise AssertionError(f"{MOST} requests of {router.name} passed {node.name}, which had the least to do")


def test_a_router_avoids_the_node_that_another_one_loads(tmp_path: Path) -> None:
    with bare_cluster(tmp_path) as made:
        start(made)
        first, second = (made[name] for name in ROUTERS)
        with closing(LongRequest(first)) as long:
            busy, other = made.busy_and_other("decode")
            assert busy.name == "decode-1"
            ask_until_at(second, other, long)
            first.kill()  # what it assigned is forgotten, and its node is the first by name again
        busy.until("asyncfabric_kv_held_pages", lambda pages: pages == 0)
        ask_until_at(second, busy, None)
        for name in (*NODES, ROUTERS[1]):
            assert made[name].end() == 0

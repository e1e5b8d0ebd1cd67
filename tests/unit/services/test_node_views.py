"""What nodes show of themselves: pages of a view, names of nodes, peers of a link, addresses that others reach."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="nodes need starlette")

import trio
import trio.testing
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from asyncfabric import ClosedError, FabricAddress, Waiting
from asyncfabric.actors import Identity, Joined, Member, Membership, labels_of
from asyncfabric.control import DirectoryClient, LinkConfig, open_link, serve_directory
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.names import REMEMBERED, NodeNames
from asyncfabric_services.nodes.stage import reached_at

pytestmark = pytest.mark.trio


async def reported(routes: list[Route], path: str) -> tuple[int, dict[str, Any]]:
    (route,) = [route for route in routes if route.path == path]
    response = await route.endpoint(None)
    return response.status_code, json.loads(response.body)


async def test_each_page_of_a_view_is_answered_with_the_name_of_its_node() -> None:
    line = Waiting("r1", "pages", 1, 6, ("r0 (7 pages)",), time.monotonic() - 2, {"lease": 3})
    view = View(
        lambda: [line, Waiting("a", "b", 0, 1)], lambda: [{"peer": "x"}], more={"nodes": lambda: [{"name": "n"}]}
    )
    routes = node_routes(Condition("decode-1", "decode", "ready"), CollectorRegistry(), view)
    status, why = await reported(routes, "/why")
    assert (status, why["node"], why["role"]) == (200, "decode-1", "decode")
    first, second = why["why"]
    assert 2 <= first.pop("for_s") < 1000 and second["for_s"] is None
    assert first == {
        "what": "r1",
        "waits_for": "pages",
        "have": 1,
        "need": 6,
        "missing_from": ["r0 (7 pages)"],
        "detail": {"lease": 3},
    }
    assert (await reported(routes, "/peers"))[1]["peers"] == [{"peer": "x"}]
    assert (await reported(routes, "/regions"))[1]["regions"] == []
    assert (await reported(routes, "/nodes"))[1]["nodes"] == [{"name": "n"}]


async def test_a_node_that_closes_reports_it_and_one_without_a_view_has_no_pages() -> None:
    def closed() -> list[Waiting]:
        raise ClosedError("the fabric is closed")

    condition = Condition("n", "prefill", "draining")
    status, page = await reported(node_routes(condition, CollectorRegistry(), View(closed)), "/why")
    assert (status, page["node"], "closed" in page["error"]) == (503, "n", True)
    status, page = await reported(node_routes(condition, CollectorRegistry(), View(closed)), "/look")
    assert (status, page["health"]["state"], "closed" in page["error"]) == (503, "draining", True)
    assert {route.path for route in node_routes(condition, CollectorRegistry())} == {
        "/health",
        "/health/ready",
        "/health/live",
        "/metrics",
        "/look",
    }


async def test_a_look_has_all_pages_that_are_shown_and_numbers_that_json_knows() -> None:
    registry = CollectorRegistry()
    gauge(registry, "training", "loss", "Of the last step.").set(float("nan"))
    BoundedCounter(registry, "router", "tokens_total", "Tokens.", kind=("prompt",)).add(3, kind="prompt")
    view = View(peers=lambda: [{"peer": "x"}], more={"updates": lambda: [{"version": 1}], "nodes": lambda: [{}]})
    status, look = await reported(node_routes(Condition("n", "coordinator", "draining"), registry, view), "/look")
    assert (status, look["health"]["state"]) == (200, "draining"), "one that drains is looked at like any other"
    assert look["metrics"]['asyncfabric_router_tokens_total{kind="prompt"}'] == 3
    assert "asyncfabric_training_loss" not in look["metrics"]
    assert look | {"health": 0, "metrics": 0} == {
        "health": 0,
        "metrics": 0,
        "why": [],
        "peers": [{"peer": "x"}],
        "updates": [{"version": 1}],
    }


def _member(name: str, incarnation: int) -> Member:
    return Member(Identity(name, 1), "prefill", fabric_address=bytes(FabricAddress(incarnation, b"engine")))


async def test_numbers_of_fabrics_are_spoken_as_names_of_nodes() -> None:
    names = NodeNames()
    names.learn(_member("prefill-1", 0xAB))
    names.learn(Member(Identity("broken", 1), "prefill", fabric_address=b"not an address"))
    names.learn(Member(Identity("router", 1), "router"))
    text = "write to <Peer 3: 00000000000000ab> and fabric 00000000000000ab, not fabric 00000000000000ac"
    assert names.spoken(text) == "write to prefill-1 and prefill-1, not fabric 00000000000000ac"
    assert (names.of(0xAB), names.of(1)) == ("prefill-1", "")
    for number in range(REMEMBERED):
        names.learn(_member(f"n{number}", 1000 + number))
    assert names.of(0xAB) == "", "the oldest is forgotten, so that the memory is bounded"
    assert names.of(1000) == "n0"


async def test_names_come_from_the_directory_and_outlive_their_nodes(tmp_path: Path) -> None:
    config = LinkConfig(ipc_folder=str(tmp_path / "ipc"))
    with trio.fail_after(60):
        async with (
            open_link("dir", config=config) as link,
            serve_directory(link),
            DirectoryClient(link, link.address) as watcher,
            trio.open_nursery() as nursery,
        ):
            names = NodeNames()
            nursery.start_soon(follow, watcher, names.take)
            address = bytes(FabricAddress(0xAB, b"engine"))
            async with (
                open_link("prefill-1", config=config) as other,
                DirectoryClient(other, link.address) as client,
                watcher.watch() as changes,
            ):
                await client.register("prefill", other.address, labels_of(address))
                while (await changes.receive()).kind != "joined":
                    pass
                (row,) = link_rows(link)
                assert (row["peer"], row["plane"], row["state"]) == ("prefill-1", "control", "ready")
                assert row["address"] == other.address and row["silent_s"] >= 0
                await client.leave()
                while (await changes.receive()).kind != "left":
                    pass
            await trio.testing.wait_all_tasks_blocked()
            assert names.of(0xAB) == "prefill-1"
            assert link.peers() == []
            nursery.cancel_scope.cancel()


async def test_work_that_a_router_gave_is_counted_by_member() -> None:
    membership, one, other = Membership(), Identity("a", 1), Identity("b", 1)
    for identity in (one, other):
        membership.apply(Joined(Member(identity, "decode")))
    with membership.assigned(one), membership.assigned(one):
        assert (membership.assigned_to(one), membership.assigned_to(other)) == (2, 0)
    assert membership.assigned_to(one) == 0


@pytest.mark.parametrize(
    ("address", "advertise", "reached"),
    [
        ("http://127.0.0.1:8100", "node-7", "http://127.0.0.1:8100"),
        ("http://0.0.0.0:8100", "node-7", "http://node-7:8100"),
        ("http://[::]:8100", "fd00::7", "http://[fd00::7]:8100"),
        ("http://0.0.0.0:8100", "", f"http://{socket.gethostname()}:8100"),
    ],
)
async def test_all_interfaces_are_reached_by_a_name(address: str, advertise: str, reached: str) -> None:
    assert reached_at(address, advertise) == reached

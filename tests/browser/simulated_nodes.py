"""A directory with a dashboard, and many nodes in its table whose HTTP answers are made up. A process; run by tests.

`simulated_nodes.py FOLDER COUNT`: a router, half prefill, half decode. Prints where the dashboard is, and ends when its
standard input does. The nodes have no sessions: what is tried here is the dashboard alone.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial

import trio
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from asyncfabric.control import Directory, LinkConfig, open_link, serve_directory
from asyncfabric.control.directory import Decision, DirectoryTable
from asyncfabric.control.messages import Identity
from asyncfabric_services.dashboard.routes import open_dashboard
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes.directory_service import node_rows
from asyncfabric_services.nodes.stage import HTTP_LABEL, Stage
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.server import Doorway, serve_until
from asyncfabric_services.settings.schema import Settings

LEASE_NS = 3_600_000_000_000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
EVIL = "<img src=x onerror=alert(1)>"
RAILS = 3  # of each prefill node that carry bytes


def role_of(number: int) -> str:
    return "router" if number == 0 else "prefill" if number % 2 else "decode"


def name_of(number: int) -> str:
    return f"{role_of(number)}-{(number + 1) // 2}"


def look(number: int, count: int, at: float) -> dict[str, object]:
    """Return what a node reports at this moment."""
    role = role_of(number)
    metrics: dict[str, float] = {
        "asyncfabric_node_inside_requests": (number * 7) % 5 if role != "router" else 2 * count
    }
    peers: list[dict[str, object]] = []
    why: list[dict[str, object]] = []
    if role == "router":
        metrics |= {
            'asyncfabric_router_requests_total{endpoint="chat",status="200"}': int(40 * at),
            'asyncfabric_router_first_token_seconds_bucket{le="0.1"}': int(20 * at),
            'asyncfabric_router_first_token_seconds_bucket{le="0.25"}': int(39 * at),
            'asyncfabric_router_first_token_seconds_bucket{le="+Inf"}': int(40 * at),
        }
    else:
        held = int(60 + 50 * math.sin(at / 5 + number))
        metrics |= {"asyncfabric_kv_held_pages": held, "asyncfabric_kv_free_pages": 128 - held}
    if role == "prefill":
        sent = int(7e6 * (1 + number * 37 % 101) * at)
        for near in range(RAILS):
            peer = 2 * ((number + near * 7) % (count // 2)) + 2
            peers.append(_peer(name_of(peer if peer < count else 2), sent))
        metrics['asyncfabric_written_bytes_total{fabric="fabric"}'] = RAILS * sent
        metrics["asyncfabric_prefill_computed_tokens_total"] = int(700 * at)
    elif role == "decode":
        metrics['asyncfabric_runner_computed_tokens_total{kind="answer"}'] = int((50 + number) * at)
    if role == "decode" and number % 6 == 0:
        what = EVIL if number == count - 2 else f"stream {number}"
        why = [_wait(what, name_of(number - 1), int(at * 10) % 54, number)]
    return {
        "health": {"name": name_of(number), "role": role, "state": "ready"},
        "metrics": metrics,
        "peers": peers,
        "why": why,
    }


def _peer(name: str, sent: int) -> dict[str, object]:
    return {
        "plane": "fabric",
        "peer": name,
        "state": "connected",
        "provider": "tcp",
        "bytes_sent": sent,
        "ops_in_flight": sent % 4,
    }


def _wait(what: str, whom: str, have: int, number: int) -> dict[str, object]:
    return {"what": what, "waits_for": "pieces", "have": have, "need": 54, "missing_from": [whom], "for_s": number / 40}


class Asked:
    """How often nodes were asked, and the nodes that answer them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.times = 0

    async def serve(self, number: int, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                while (piece := await stream.receive_some(65536)) and not piece.endswith(b"\r\n\r\n"):
                    pass
                self.times += 1
                body = json.dumps(look(number, self.count, trio.current_time())).encode()
                await stream.send_all(HEAD % len(body) + body)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the directory has given up

    async def open(self, nursery: trio.Nursery, directory: Directory) -> None:
        """Listen for each node and put it into the table."""
        for number in range(self.count):
            serve = partial(trio.serve_tcp, partial(self.serve, number), 0, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            http = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            identity = Identity(name_of(number), number + 1)
            labels, role = {HTTP_LABEL: http}, role_of(number)
            await directory._shared.decide(partial(_register, identity, role, labels))


def _register(identity: Identity, role: str, labels: dict[str, str], table: DirectoryTable) -> Decision:
    return table.register(identity, role, "ipc:///none", labels)


async def main(folder: str, count: int) -> None:
    condition, stop, asked = Condition("dir", "directory"), trio.Event(), Asked(count)
    stage = Stage(Settings(), condition, CollectorRegistry(), RequestAdmission(condition, 1))
    async with (
        open_link("dir", role="directory", bind="ipc", config=LinkConfig(ipc_folder=folder)) as link,
        serve_directory(link, lease_ns=LEASE_NS) as directory,
        trio.open_nursery() as nursery,
    ):
        await asked.open(nursery, directory)
        async with open_dashboard(link, lambda: node_rows(stage, link, directory), stop) as routes:

            async def times(_: Request) -> JSONResponse:
                return JSONResponse({"times": asked.times, "cpu_s": time.process_time()})

            def listening(address: str) -> None:
                stage.http = address
                print(address, flush=True)

            app = Starlette(routes=[*routes, *node_routes(condition, stage.registry), Route("/times", times)])
            nursery.start_soon(serve_until, app, stage.admission, condition, Doorway(), stop, listening)
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            stop.set()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))

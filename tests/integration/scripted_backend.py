"""A backend under the test's control, and a router over a real socket in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio
from prometheus_client import CollectorRegistry

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.app import router_app
from asyncfabric_services.router.ask import Limits
from asyncfabric_services.router.backend import Capacity, GenerateRequest, ServedModel
from asyncfabric_services.router.server import Doorway, serve_until
from asyncfabric_services.runner.tokenizer import ByteTokenizer

PATIENCE = 20.0
ANSWER = b"The quick brown fox"


class ScriptedBackend:
    """Repeats ANSWER over and over, token by token, as far as the test permits.

    Attributes:
        permits: tokens that it may still state before it waits for the test.
        inside: requests whose scope is entered.
        left: requests whose scope was left.
        refusal: raised at the door.
        stated: tokens that it reported it far.
        max_tokens: of its model.
        failure: raised instead of a token when no permit is left.
    """

    def __init__(self) -> None:
        self.permits = 1 << 30
        self.inside: list[GenerateRequest] = []
        self.left: list[GenerateRequest] = []
        self.refusal: Exception | None = None
        self.failure: Exception | None = None
        self.stated = 0
        self.max_tokens = 1000
        self._more = trio.Event()

    def permit(self, count: int) -> None:
        """Let it give that many tokens more."""
        self.permits += count
        self._more.set()
        self._more = trio.Event()

    def models(self) -> Sequence[ServedModel]:
        return [ServedModel("tiny", ByteTokenizer(), self.max_tokens)]

    def capacity(self) -> Capacity:
        return Capacity(len(self.inside), 0, 8)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[int]]:
        if self.refusal is not None:
            raise self.refusal
        self.inside.append(request)
        try:
            async with aclosing(self._tokens(request)) as tokens:
                yield tokens
        finally:
            self.inside.remove(request)
            self.left.append(request)

    async def _tokens(self, request: GenerateRequest) -> AsyncGenerator[int, None]:
        for index in range(request.max_tokens):
            await trio.lowlevel.checkpoint()
            if self.permits == 0 and self.failure is not None:
                raise self.failure
            while self.permits == 0:
                await self._more.wait()
            self.permits -= 1
            self.stated += 1
            yield ANSWER[index % len(ANSWER)]


@dataclass
class Site:
    """A running router."""

    backend: ScriptedBackend
    address: str
    condition: Condition
    admission: RequestAdmission
    registry: CollectorRegistry
    stop: trio.Event
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a condition; fails when it does not come."""
        with trio.fail_after(PATIENCE):
            while not true():
                await trio.lowlevel.checkpoint()

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def post(self, path: str, body: object, *headers: str) -> trio.SocketStream:
        """Send a request over a connection of its own and return it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        stream = await self.connect()
        head = [
            f"POST {path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(raw)}",
            *headers,
        ]
        await stream.send_all("\r\n".join(head).encode() + b"\r\n\r\n" + raw)
        return stream


async def receive_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    """Return what came when `mark` is in it; fails when the connection ends before."""
    data = b""
    with trio.fail_after(PATIENCE):
        while mark not in data:
            part = await stream.receive_some()
            assert part, data
            data += part
    return data


async def receive_all(stream: trio.SocketStream) -> bytes:
    """Return what comes until the server closes."""
    data = b""
    with trio.fail_after(PATIENCE):
        while part := await stream.receive_some():
            data += part
    return data


@asynccontextmanager
async def open_site(
    *,
    most_requests: int = 8,
    most_waiting: int = 0,
    longest_wait: float = 30.0,
    deadline: float = 30.0,
    drain: float = 10.0,
    stall: float = 10.0,
) -> AsyncIterator[Site]:
    """Run a router; at the end of the scope it must drain by itself, with nobody left inside."""
    backend, condition, registry = ScriptedBackend(), Condition("here", "router"), CollectorRegistry()
    admission = RequestAdmission(condition, most_requests, most_waiting, longest_wait)
    app = router_app(backend, admission, condition, registry, Limits(16, deadline))
    async with trio.open_nursery() as nursery:
        send, listening = trio.open_memory_channel[str](1)
        site = Site(backend, "", condition, admission, registry, trio.Event())

        async def run() -> None:
            doorway = Doorway(port=0, drain_seconds=drain, stall_seconds=stall)
            await serve_until(app, admission, condition, doorway, site.stop, send.send_nowait)
            site.ended.set()

        nursery.start_soon(run)
        site.address = await listening.receive()
        yield site
        site.stop.set()
        with trio.fail_after(PATIENCE):
            await site.ended.wait()
        assert not backend.inside
    send.close()
    listening.close()


in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=False)

"""The dashboard of a real directory over HTTP: what is asked and when, what viewers receive, how they are sent away."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for needed in ("hypercorn", "starlette"):
    pytest.importorskip(needed, reason=f"the directory needs {needed}")

import trio  # noqa: E402
from cluster import PATIENCE, Cluster, bare_cluster  # noqa: E402

from asyncfabric.control import DirectoryClient, LinkConfig, open_link, read_keys  # noqa: E402
from asyncfabric_services.dashboard.rows import applied  # noqa: E402

pytestmark = pytest.mark.slow
LOOK = {
    "health": {"name": "n", "role": "prefill", "state": "ready"},
    "metrics": {"asyncfabric_node_inside_requests": 3},
}
EVIL = "<img src=x onerror=alert(1)>"


class Viewer:
    """Reads `/events`; `rows` is what it knows."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._text = b""
        self.rows: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        self.last_id = ""

    async def receive(self) -> bool:
        """Take the next message; False at the end of the stream."""
        while b"\nevent: " not in self._text or b"\n\n" not in self._text.partition(b"\nevent: ")[2]:
            piece = await self._stream.receive_some()
            if not piece:
                return False
            self._text += piece
        message, _, self._text = self._text.partition(b"\nevent: ")[2].partition(b"\n\n")
        kind, given, _, data = message.decode().split("\n")
        body = json.loads(data.removeprefix("data: "))
        self.rows = body["nodes"] if kind == "snapshot" else applied(self.rows, body)
        self.events += body["events"]
        self.kinds.append(kind)
        self.last_id = given.removeprefix("id: ")
        return True

    async def until(self, seen: Callable[[], bool], seconds: float = PATIENCE) -> None:
        with trio.fail_after(seconds):
            while not seen():
                assert await self.receive(), "the directory ended the stream"

    def field(self, name: str, field: str) -> Any:
        return self.rows.get(name, {}).get(field)


@asynccontextmanager
async def viewer(address: str, last_id: str = "") -> AsyncIterator[Viewer]:
    head = f"GET /events HTTP/1.1\r\nhost: localhost\r\nlast-event-id: {last_id}\r\n\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2])) as stream:
        await stream.send_all(head.encode())
        yield Viewer(stream)


@asynccontextmanager
async def node(made: Cluster, name: str, answer: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[Any]:
    """Be a node of the cluster, whose HTTP endpoint answers so; gives a function that loses it without a word."""
    keys = read_keys(made.folder / "link.key")
    config = LinkConfig(ipc_folder=str(made.folder / "ipc"))
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        http = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with (
            open_link(name, role="prefill", bind="ipc", keys=keys, config=config) as link,
            DirectoryClient(link, made["directory"].link) as client,
        ):
            await client.register("prefill", link.address, {"http": http})
            yield client
        nursery.cancel_scope.cancel()


def answering(body: dict[str, Any], asked: list[float]) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            if not await stream.receive_some():
                return  # the last viewer has left
            asked.append(trio.current_time())
            text = json.dumps(body).encode()
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)

    return answer


async def silent(stream: trio.SocketStream) -> None:
    async with stream:
        while await stream.receive_some():
            pass


async def play(made: Cluster) -> None:
    directory = made["directory"]
    asked: list[float] = []
    hostile = LOOK | {"why": [{"what": EVIL, "waits_for": "\x00", "have": 1, "need": 2, "missing_from": [EVIL]}]}
    async with node(made, "prefill-1", answering(hostile, asked)), node(made, "prefill-2", silent) as second:
        await trio.sleep(1.2)  # two rounds, were there any
        assert asked == [], "nobody looks, so no node is asked"
        async with viewer(directory.address) as first:
            await first.until(lambda: first.field("prefill-1", "requests") == 3, 3.0)
            assert first.kinds[0] == "snapshot" and set(first.rows) == {"directory", "prefill-1", "prefill-2"}
            assert [event["node"] for event in first.events[:2]] == ["prefill-1", "prefill-2"], "of before it came, too"
            assert first.rows["prefill-1"]["waits"] == [[EVIL, "\x00", 1.0, 2.0, [EVIL], 0]], "as it is: text"
            await first.until(lambda: first.field("prefill-2", "state") == "silent", 4.0)
            before = len(asked)
            await trio.sleep(1.0)
            assert len(asked) > before, "one that is slow holds up no other"
            async with viewer(directory.address) as other:
                await other.until(lambda: "prefill-1" in other.rows, 3.0)
                count, start = len(asked), trio.current_time()
                while trio.current_time() < start + 2:
                    await first.until(lambda: True)
                    await trio.sleep(0.1)
                assert len(asked) - count <= 5, "one poll for all viewers"
            await second.leave()
            await first.until(lambda: "prefill-2" not in first.rows, 2.0)
            await first.until(lambda: first.events[-1]["kind"] == "left", 2.0)
            seen = first.last_id
        async with viewer(directory.address, seen) as again:
            await again.until(lambda: bool(again.kinds))
            assert again.kinds == ["change"], "it goes on where it was"
        async with viewer(directory.address, "0badcafe-3") as anew:
            await anew.until(lambda: bool(anew.kinds))
            assert anew.kinds == ["snapshot"], "a number of another life of the directory"
        await trio.sleep(0.5)
        count = len(asked)
        await trio.sleep(1.2)
        assert len(asked) == count, "the last one has left"
        async with viewer(directory.address) as last:
            await last.until(lambda: bool(last.kinds))
            directory.child.send_signal(signal.SIGTERM)
            with trio.fail_after(10):
                while await last.receive():
                    pass


def test_viewers_receive_moments_and_nobody_is_asked_for_nobody(tmp_path: Path) -> None:
    with bare_cluster(tmp_path) as made:
        trio.run(play, made)
        assert made["directory"].ended() == 0


def test_the_page_comes_with_its_policy_and_to_its_own_names_only(tmp_path: Path) -> None:
    def get(path: str, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
        with made["directory"].connect() as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            head, _, body = b"".join(iter(lambda: one.recv(65536), b"")).partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body

    with bare_cluster(tmp_path) as made:
        status, headers, page = get("/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert (
            headers["content-security-policy"].startswith("default-src 'self';") and headers["x-content-type-options"]
        )
        assert b"<script>" not in page and b"style=" not in page and b"http://" not in page and b"https://" not in page
        for name, kind in (("page.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
            status, headers, _ = get(f"/dashboard/{name}")
            assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        assert [
            get(path)[0] for path in ("/dashboard/none.js", "/dashboard/..%2froutes.py", "/dashboard/routes.py")
        ] == [404] * 3
        assert get("/", "evil.example")[0] == get("/events", "evil.example")[0] == 421
        assert get("/health/ready")[0] == 200

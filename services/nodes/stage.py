"""What every node process is made of: a condition, metrics, signals, an HTTP endpoint, and a place in the cluster.

Runs on the event loop. What a node does is in its own file; here it is opened, announced, registered and drained.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import trio
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from asyncfabric import DeviceError, PeerError
from asyncfabric.control import DirectoryClient, Link, LinkConfig, LinkKeys, open_link, read_keys
from asyncfabric.control.address import LinkAddress
from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.health.condition import Condition, node_name
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.doorway import doorway_of, queueing
from asyncfabric_services.router.server import StartError, serve_until, set_on_signals
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.telemetry.export import telemetry_of
from asyncfabric_services.terminal import plain

LEAVE_SECONDS = 1.0
_log = logging.getLogger(__name__)
HTTP_LABEL = "http"
"""Label of a node in the directory: where its HTTP endpoint is reached."""
Announce = Callable[[Mapping[str, str]], None]


@dataclass(slots=True)
class Stage:
    """One node process.

    Attributes:
        settings: of the process.
        condition: as `/health` reports it.
        registry: of its metrics.
        admission: requests inside; a drain waits for them.
        stop: set when the process is to end in good order.
        listening: set when the HTTP endpoint listens.
        reported: what is printed when it listens, besides the HTTP address.
        spans: what the node does for requests, while somebody records or exports it.
        http: where others reach its HTTP endpoint, once it listens.
        keys: of its link, once that is open; None for none.
        secret: of its fabric, None for none; never printed. See nodes/secret.py.
        ending: cancelled to end the process before it serves.
    """

    settings: Settings
    condition: Condition
    registry: CollectorRegistry
    admission: RequestAdmission
    stop: trio.Event = field(default_factory=trio.Event)
    listening: trio.Event = field(default_factory=trio.Event)
    reported: dict[str, str] = field(default_factory=dict)
    spans: SpanRing = field(default_factory=SpanRing)
    http: str = ""
    keys: LinkKeys | None = None
    secret: bytes | None = field(default=None, repr=False)
    ending: trio.CancelScope = field(default_factory=trio.CancelScope)


Opened = Callable[[Stage], AbstractAsyncContextManager[Starlette]]


async def serve_process(settings: Settings, role: str, opened: Opened, announce: Announce) -> None:
    """Run a node until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    `opened(stage)` holds the node open and gives its HTTP application; `announce` receives where the process listens.
    Raises StartError, perhaps in groups, when it cannot start, and EnvironmentUnfit, perhaps in groups, when it lacks
    OpenTelemetry, or the directory refuses the node for good: before it listens at once, later after a drain.

    Cancellation: ends without a drain.
    """
    try:
        condition = Condition(node_name(settings.node.name), role)
    except ValueError as error:
        raise StartError(f"node.name: {error}") from None
    telemetry = telemetry_of(condition.name, role)
    admission = (
        queueing(condition, settings)
        if role == "router"
        else RequestAdmission(condition, settings.router.most_requests)
    )
    stage = Stage(settings, condition, CollectorRegistry(), admission)

    inside = gauge(stage.registry, "node_inside", "requests", "Requests or jobs that this node works on.")
    inside.set_function(lambda: stage.admission.count)

    def on_listening(address: str) -> None:
        stage.http = reached_at(address, settings.cluster.advertise)
        stage.listening.set()
        announce({"listening": address, "name": condition.name} | stage.reported)

    with stage.ending:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_on_signals, stage.stop, nursery.cancel_scope)
            async with opened(stage) as app, telemetry.exporting(stage.spans, stage.registry):
                doorway = doorway_of(settings, api=role == "router")
                await serve_until(app, stage.admission, condition, doorway, stage.stop, on_listening)
            nursery.cancel_scope.cancel()
    if not condition.alive:
        raise EnvironmentUnfit(condition.reason)


@asynccontextmanager
async def open_control(stage: Stage) -> AsyncIterator[Link]:
    """Open the node's link as its settings ask.

    Raises StartError for settings that cannot be used.

    Cancellation: closing is shielded and bounded.
    """
    cluster = stage.settings.cluster
    link: Link | None = None
    keys: LinkKeys | None = None
    bind, folder = cluster.bind, ""
    if bind.startswith("ipc:///") and bind.endswith("/"):
        bind, folder = "ipc", bind.removeprefix("ipc://")
    try:
        if cluster.keys is not None:
            keys = stage.keys = read_keys(cluster.keys)
        if keys is not None and keys.unbound and stage.condition.role == "directory":
            _log.warning(
                "keys %s are trusted without a role: a node that has one may register as any; "
                "asyncfabric keys trust KEY --role ROLE --file %s binds it",
                ", ".join(f"{key[:8]}..." for key in keys.unbound),
                cluster.keys,
            )
        async with open_link(
            stage.condition.name,
            role=stage.condition.role,
            bind=bind,
            keys=keys,
            insecure=cluster.plain_tcp == "allow",
            config=LinkConfig(ipc_folder=folder, advertise_host=cluster.advertise),
        ) as link:
            stage.reported["link"] = link.address
            yield link
    except (DeviceError, ValueError) as error:
        if link is not None:
            raise
        settings = "; the settings are cluster.bind, .keys, .plain_tcp and .advertise"  # the text names our arguments
        reported = settings if isinstance(error, ValueError) else ""
        raise StartError(f"the link to other nodes cannot be opened: {error}{reported}") from error


@asynccontextmanager
async def open_directory(stage: Stage, link: Link, labels: Mapping[str, str]) -> AsyncIterator[DirectoryClient]:
    """Be in the directory with these labels from when the node listens until it leaves; drain when it is to stop.

    The node is ready while it is in. One that the directory refuses for good fails, and is made to stop.

    Raises StartError when the settings name no directory.

    Cancellation: the node leaves, if the directory answers within a second.
    """
    async with DirectoryClient(link, directory_address(stage.settings)) as client, trio.open_nursery() as nursery:
        stage.condition.needs["directory"] = lambda: client.missing
        nursery.start_soon(_end_refused, stage, client)
        nursery.start_soon(_be_in, stage, client, link, labels)
        try:
            yield client
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(LEAVE_SECONDS, shield=True):
                await client.leave()


def directory_address(settings: Settings) -> str:
    """Return where the directory is, or the directories; raises StartError when the settings do not name it."""
    address = settings.cluster.directory
    if not address:
        raise StartError("cluster.directory is empty: give the link address that `asyncfabric serve directory` prints")
    try:
        LinkAddress.parse_all(address)
    except ValueError as error:
        raise StartError(f"cluster.directory: {error}") from error
    return address


def reached_at(address: str, advertise: str) -> str:
    """Return the address of a listener as others reach it: all interfaces go by the advertised or the host's name."""
    host = urlsplit(address).hostname or ""
    if host not in ("0.0.0.0", "::"):
        return address
    name = advertise or socket.gethostname()
    return f"{urlsplit(address).scheme}://{f'[{name}]' if ':' in name else name}:{urlsplit(address).port}"


async def _be_in(stage: Stage, client: DirectoryClient, link: Link, labels: Mapping[str, str]) -> None:
    await stage.listening.wait()
    labels = {**labels, HTTP_LABEL: stage.http}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_register, stage, client, link, labels)
        await stage.stop.wait()
        await client.drain()


async def _register(stage: Stage, client: DirectoryClient, link: Link, labels: Mapping[str, str]) -> None:
    try:
        await client.register(stage.condition.role, link.address, labels)
    except PeerError as error:
        _log.warning("%s", error)  # refused for good: _end_refused ends the node


async def _end_refused(stage: Stage, client: DirectoryClient) -> None:
    reason = await client.wait_refused()
    stage.condition.fail(plain(f"the directory refuses {stage.condition.name}: {reason}"))
    _log.error("%s", stage.condition.reason)
    if not stage.listening.is_set():  # nobody is answered yet, and opening may wait for others for ever
        raise EnvironmentUnfit(stage.condition.reason)
    stage.stop.set()

"""Whether a node exports by OTLP, and what: read from OpenTelemetry's environment variables; then opened beside a node.

Runs on the event loop; exports run on threads. OpenTelemetry is imported when something is asked for.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from prometheus_client import CollectorRegistry

from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.router.server import StartError

if TYPE_CHECKING:
    from asyncfabric_services.telemetry.metrics import MetricsExport
    from asyncfabric_services.telemetry.spans import SpansExport

SIGNALS = ("traces", "metrics")
PROTOCOL = "http/protobuf"
CLOSING_S = 5.0
"""How long the end of a node waits for a last export."""


def asked_signals(environment: Mapping[str, str]) -> frozenset[str]:
    """Return which of SIGNALS the environment asks to export; raises StartError for what this exporter cannot do.

    Variables are OpenTelemetry's: an OTLP endpoint asks, OTEL_SDK_DISABLED and OTEL_..._EXPORTER=none do not.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return frozenset()
    return frozenset(signal for signal in SIGNALS if _asked(signal.upper(), environment))


def _asked(signal: str, environment: Mapping[str, str]) -> bool:
    def value(name: str) -> str:
        return environment.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}") or environment.get(
            f"OTEL_EXPORTER_OTLP_{name}", ""
        )

    exporter = environment.get(variable := f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        raise StartError(f"{variable} is {exporter!r}: nodes know otlp and none")
    if exporter == "none" or not (exporter or value("ENDPOINT")):
        return False
    if value("PROTOCOL") not in ("", PROTOCOL):
        raise StartError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {value('PROTOCOL')!r} for {signal.lower()}: nodes send {PROTOCOL}, which "
            "collectors usually take on port 4318"
        )
    return True


class Telemetry:
    """The exporters of a node; made by `telemetry_of`."""

    def __init__(self, spans: SpansExport | None = None, metrics: MetricsExport | None = None) -> None:
        self._spans = spans
        self._metrics = metrics

    @asynccontextmanager
    async def exporting(self, ring: SpanRing, registry: CollectorRegistry) -> AsyncIterator[None]:
        """Export within the scope, and at its end what is left.

        Cancellation: the last export is shielded and takes at most CLOSING_S.
        """
        ring.exporter = self._spans
        async with trio.open_nursery() as nursery:
            if self._metrics is not None:
                nursery.start_soon(self._metrics.run, registry)
            try:
                yield
            finally:
                ring.exporter = None
                nursery.cancel_scope.cancel()
                with trio.move_on_after(CLOSING_S, shield=True):
                    if self._metrics is not None:
                        await self._metrics.export(registry)
                    if self._spans is not None:
                        await trio.to_thread.run_sync(self._spans.close, abandon_on_cancel=True)


def telemetry_of(name: str, role: str, environment: Mapping[str, str] = os.environ) -> Telemetry:
    """Return what a node exports, by its name and role.

    Raises StartError for what cannot be done, EnvironmentUnfit when OpenTelemetry is asked for and not installed.
    """
    signals = asked_signals(environment)
    if not signals:
        return Telemetry()
    try:
        from asyncfabric_services.telemetry.metrics import MetricsExport
        from asyncfabric_services.telemetry.spans import SpansExport, resource_of
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"the environment asks for OpenTelemetry (OTEL_...), and {error}; install it with: "
            "pip install 'asyncfabric[otel]', or set OTEL_SDK_DISABLED=true"
        ) from None
    resource = resource_of(name, role)
    return Telemetry(
        SpansExport(resource) if "traces" in signals else None,
        MetricsExport(resource) if "metrics" in signals else None,
    )

"""Metrics of a fabric: every counter of the engine has one, they state what happened, and a closed fabric is silent."""

from __future__ import annotations

import pytest
from fabrics import open_pair
from prometheus_client import CollectorRegistry, generate_latest

from asyncfabric.observe.metrics import COUNTERS, GAUGES, FabricCollector


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    value = registry.get_sample_value(f"asyncfabric_{name}", {"fabric": "fabric", **labels})
    assert value is not None, f"{name} {labels} is not in:\n{generate_latest(registry).decode()}"
    return value


@pytest.mark.anyio
async def test_what_was_written_is_reported() -> None:
    registry = CollectorRegistry()
    async with open_pair() as p:
        FabricCollector(p.writer, registry)
        counter = p.reader.counter()
        await p.writer.connect(p.reader.address)
        await p.writer.write(p.source[:64], p.key, 0, imm=counter.imm)
        await p.writer.write(p.source[:36], p.key, 0)
        assert _value(registry, "written_bytes_total") == 100
        assert _value(registry, "completed_ops_total") == p.writer.statistics().ops_completed >= 2
        assert _value(registry, "failed_ops_total") == 0
        assert _value(registry, "registered_regions") == p.writer.statistics().regions >= 1
        assert _value(registry, "peers", state="connected") == 1
        assert _value(registry, "waits") == 0
        assert _value(
            registry, "rail_up", rail="0", provider=p.writer.rails[0].provider, device=p.writer.rails[0].device
        )


@pytest.mark.anyio
async def test_each_counter_of_the_engine_has_a_metric() -> None:
    async with open_pair() as p:
        reported = set(COUNTERS) | set(GAUGES) | {"peers"}
        assert set(p.writer.statistics().counters) <= reported


@pytest.mark.anyio
async def test_two_fabrics_share_a_registry_and_a_closed_one_is_silent() -> None:
    registry = CollectorRegistry()
    async with open_pair() as p:
        FabricCollector(p.writer, registry, "writer")
        with pytest.raises(ValueError, match="is called 'writer'"):
            FabricCollector(p.reader, registry, "writer")
        reader = FabricCollector(p.reader, registry, "reader")
        text = generate_latest(registry).decode()
        types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types)), "a family was reported twice, which is no valid exposition"
        names = {sample.labels["fabric"] for family in registry.collect() for sample in family.samples}
        assert names == {"writer", "reader"}
        reader.leave()
        assert b"reader" not in generate_latest(registry)
    assert list(registry.collect()) == []
    with pytest.raises(ValueError, match="needs a name"):
        FabricCollector(p.writer, registry, "")

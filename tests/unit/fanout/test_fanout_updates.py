"""What a coordinator reports of updates: rows with their ages, metrics of the last one, reasons, who is not there."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

pytest.importorskip("starlette", reason="services need starlette")

from prometheus_client import CollectorRegistry

from asyncfabric.control import LocalChannels
from asyncfabric.weights import Mesh, Move, alone, place, plan_weights
from asyncfabric.weights.messages import CodingReport
from asyncfabric.weights.update import COORDINATOR, WEIGHT_CODEC, UpdateReport, open_coordinator
from asyncfabric_services.fanout.blueprint import BlueprintStore
from asyncfabric_services.fanout.coordinator_service import Coordinating
from asyncfabric_services.fanout.update_book import UpdateBook
from asyncfabric_services.health.metrics import values

LINK = CodingReport("trainer-0", "a/0", "delta", 1000, 100, "deltas are 1 % of the bytes")


def report(version: int, sent_bytes: int) -> UpdateReport:
    return UpdateReport(version, ("a/0", "b/0"), 0.5, 0.125, 0.25, 0.3, 0.0625, 0.0, (LINK,), sent_bytes)


def test_rows_and_metrics_are_of_the_last_updates(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    book = UpdateBook(registry)
    assert values(registry)["asyncfabric_weights_committed_timestamp_seconds"] == 0
    book.committed(report(1, 1100))
    with caplog.at_level(logging.WARNING):
        book.aborted(2, "version 2 was not committed: a/0 is gone")
    book.committed(report(3, 100))
    found = values(registry)
    assert [row["version"] for row in book.rows()] == [1, 2, 3]
    assert [row.get("reason") for row in book.rows()] == [None, "a/0 is gone", None]
    assert caplog.messages == ["version 2 was not committed: a/0 is gone"], "once"
    assert book.rows()[2] | {"ago_s": 0, "links": 0} == {
        "version": 3,
        "outcome": "committed",
        "receivers": ["a/0", "b/0"],
        "seconds": 0.5,
        "prepare_s": 0.125,
        "write_s": 0.25,
        "verify_s": 0.3,
        "decide_s": 0.0625,
        "sent_bytes": 100,
        "saved_bytes": 900,
        "links": 0,
        "ago_s": 0,
    }
    assert all(0 <= row["ago_s"] < 60 for row in book.rows())
    for name, value in (("all", 0.5), ("prepare", 0.125), ("write", 0.25), ("verify", 0.3), ("decide", 0.0625)):
        assert found[f'asyncfabric_weights_update_seconds{{stage="{name}"}}'] == value
    assert found['asyncfabric_weights_update_bytes_total{what="sent"}'] == 1200
    assert found['asyncfabric_weights_update_bytes_total{what="saved"}'] == 1800
    assert found['asyncfabric_weights_updates_total{outcome="aborted"}'] == 1
    assert found["asyncfabric_weights_committed_timestamp_seconds"] > 1.7e9


def test_who_is_not_there_is_named_and_counted(tmp_path: Path) -> None:
    whole = place((4, 4), Mesh.of({"all": 1}))
    move = Move("w", "bfloat16", whole, "w", "bfloat16", alone(whole))
    plan = plan_weights([move], trainers=2, receivers=1, replicas=())
    stage: Any = SimpleNamespace(registry=CollectorRegistry())

    async def body() -> None:
        store, post = BlueprintStore(tmp_path / "blueprint"), LocalChannels(WEIGHT_CODEC)
        one = Coordinating(stage, store, tmp_path / "log")
        async with open_coordinator(post.open(COORDINATOR), plan, tmp_path / "log") as coordinator:
            store.coordinator = coordinator
            post.open("trainer-0")
            await trio.testing.wait_all_tasks_blocked()
            waits = [(line.waits_for, line.have, line.need, line.missing_from) for line in one.waits()]
            assert waits == [("a rollout", 0, 1, ()), ("trainers", 1, 2, ("trainer-1",))]
            assert values(stage.registry)["asyncfabric_weights_absent_trainers"] == 1

    trio.run(body)

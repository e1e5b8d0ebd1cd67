"""A node's place in its cluster: names in use, later starts, keys, and what its health reports of all that."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="node services need starlette")
pytest.importorskip("hypercorn", reason="node services need hypercorn")

import trio
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from asyncfabric.control import LinkConfig, directory_client, make_keys, open_link, serve_directory
from asyncfabric.control.keys import LinkKeys, add_trusted, read_keys, trust_file, write_keys
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes import stage as stages
from asyncfabric_services.nodes.stage import Stage, open_control, open_directory, serve_process
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings

pytestmark = pytest.mark.trio
PATIENCE_S = 30.0


def get(url: str) -> tuple[bool, dict[str, Any]]:
    """Return whether a URL answers 200, not 503, and what."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return True, json.loads(answer.read())
    except urllib.error.HTTPError as refusal:
        with refusal:
            assert refusal.code == 503
            return False, json.loads(refusal.read())


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two refusals are final, and no process of its own is there to take signals from."""

    async def no_signals(*_: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(directory_client, "MOST_REFUSALS", 2, raising=False)
    monkeypatch.setattr(stages, "set_on_signals", no_signals)


class Standing:
    """One node: what its process would do but for its work."""

    def __init__(self, settings: Settings, role: str) -> None:
        self.settings = settings
        self.role = role
        self.url = ""
        self.stage: Stage
        self.listening = trio.Event()
        self.ended = trio.Event()
        self.failure: Exception | None = None

    async def run(self) -> None:
        def announce(reported: Mapping[str, str]) -> None:
            self.url = reported["listening"]
            self.listening.set()

        try:
            await serve_process(self.settings, self.role, self._opened, announce)
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                (error,) = error.exceptions
            self.failure = error
        self.ended.set()

    @asynccontextmanager
    async def _opened(self, stage: Stage) -> AsyncIterator[Starlette]:
        self.stage = stage
        async with open_control(stage) as link, open_directory(stage, link, {}):
            yield Starlette(routes=node_routes(stage.condition, stage.registry))

    async def health(self, path: str = "/health") -> tuple[bool, dict[str, Any]]:
        """Return whether it answers 200, and what."""
        return await trio.to_thread.run_sync(get, f"{self.url}{path}")

    async def until(self, state: str) -> dict[str, Any]:
        """Return what `/health` answers once it is in this state."""
        while (answer := (await self.health())[1])["state"] != state:  # noqa: ASYNC110  # asked over HTTP, as a probe does
            await trio.sleep(0.01)
        return answer


def settings_of(name: str, folder: Path, directory: str, **cluster: Any) -> Settings:
    plain = Settings()
    given = {"bind": f"ipc://{folder}/", "directory": directory} | cluster
    return replace(
        plain,
        node=replace(plain.node, name=name),
        http=replace(plain.http, port=0, drain=PATIENCE_S),
        cluster=replace(plain.cluster, **given),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "s"
    made.mkdir(mode=0o700)
    return made


async def test_a_name_in_use_is_refused_to_another_role_and_its_holder_stays(folder: Path) -> None:
    config = LinkConfig(ipc_folder=str(folder))
    with trio.fail_after(PATIENCE_S):
        async with (
            open_link("d", config=config) as link,
            serve_directory(link) as served,
            trio.open_nursery() as nursery,
        ):
            holder = Standing(settings_of("x", folder, link.address), "decode")
            nursery.start_soon(holder.run)
            await holder.listening.wait()
            await holder.until("ready")
            held = served.table.nodes["x"]
            thief = Standing(settings_of("x", folder, link.address), "router")
            nursery.start_soon(thief.run)
            await thief.ended.wait()
            assert isinstance(thief.failure, EnvironmentUnfit) and thief.failure.exit_code == 3
            assert "another role" in str(thief.failure)
            assert served.table.nodes["x"] == held
            assert await holder.health() == (True, {"state": "ready", "role": "decode", "name": "x"})
            nursery.cancel_scope.cancel()


async def test_a_node_that_a_later_start_replaces_fails_drains_and_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_client, "MOST_REFUSALS", 10**9)  # the first is final
    config = LinkConfig(ipc_folder=str(folder))
    with trio.fail_after(PATIENCE_S):
        async with (
            open_link("d", config=config) as link,
            serve_directory(link) as served,
            trio.open_nursery() as nursery,
        ):
            first, second = (Standing(settings_of("x", folder, link.address), "decode") for _ in range(2))
            nursery.start_soon(first.run)
            await first.listening.wait()
            await first.until("ready")
            with first.stage.admission.admit():
                nursery.start_soon(second.run)
                await second.listening.wait()
                await second.until("ready")
                reported = await first.until("failed")
                assert "an earlier incarnation of its name" in reported["reason"]
                assert not (await first.health())[0] and not (await first.health("/health/live"))[0]
            await first.ended.wait()
            assert isinstance(first.failure, EnvironmentUnfit)
            assert served.table.nodes["x"].labels["http"] == second.url
            nursery.cancel_scope.cancel()


async def test_a_node_is_ready_while_it_is_in_the_directory_and_alive_all_the_time(folder: Path) -> None:
    config, where = LinkConfig(ipc_folder=str(folder)), f"ipc://{folder}/d.sock"
    node = Standing(settings_of("n", folder, where), "decode")
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await node.listening.wait()
            for _ in range(2):
                ready, reported = await node.health("/health/ready")
                assert not ready and reported["state"] == "waiting" and where in reported["missing"]["directory"]
                assert (await node.health("/health/live"))[0]
                with node.stage.admission.admit():
                    pass  # the data path never asks the directory
                async with open_link("d", bind=where, config=config) as link, serve_directory(link):
                    assert "missing" not in await node.until("ready")
                    assert (await node.health("/health/ready"))[0] and (await node.health("/health/live"))[0]
                await node.until("waiting")
            nursery.cancel_scope.cancel()


async def test_a_key_that_the_directory_does_not_trust_ends_the_node(tmp_path: Path, folder: Path) -> None:
    ours, theirs = make_keys(), make_keys()
    write_keys(tmp_path / "key", *ours)
    (tmp_path / "key.trusted").write_text(f"{theirs[0]}\n")
    (tmp_path / "key.trusted").chmod(0o600)
    with trio.fail_after(PATIENCE_S):
        async with open_link("d", bind="tcp", keys=LinkKeys(*theirs)) as link, serve_directory(link):
            settings = settings_of("n", folder, link.address, bind="tcp", keys=tmp_path / "key")
            node = Standing(settings, "prefill")
            await node.run()
            assert isinstance(node.failure, EnvironmentUnfit)
            assert "does not trust our key" in str(node.failure)


async def test_a_key_of_another_role_ends_the_node_at_its_first_attempt_and_the_directory_names_loose_keys(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory_client, "MOST_REFUSALS", 10**9)  # it is not counted
    for name in ("d", "n"):
        write_keys(tmp_path / name, *make_keys())
    ours, theirs = (read_keys(tmp_path / name).public for name in "dn")
    add_trusted(trust_file(tmp_path / "n"), ours)
    add_trusted(trust_file(tmp_path / "d"), theirs, roles=frozenset(["decode", "prefill"]))
    condition = Condition("d", "directory")
    settings = settings_of("d", folder, "", bind="tcp", keys=tmp_path / "d")
    directory = Stage(settings, condition, CollectorRegistry(), RequestAdmission(condition, 1))
    with trio.fail_after(PATIENCE_S):
        async with open_control(directory) as link, serve_directory(link) as served, trio.open_nursery() as nursery:
            assert f"keys {ours[:8]}... are trusted without a role" in caplog.text  # its own: it could be any
            settings = settings_of("n", folder, link.address, bind="tcp", keys=tmp_path / "n")
            thief = Standing(settings, "router")
            await thief.run()
            assert isinstance(thief.failure, EnvironmentUnfit) and thief.failure.exit_code == 3
            reported = str(thief.failure)
            assert re.search(
                r"n@\w+ as router under the key .{8}\.\.\., which is trusted as decode or prefill", reported
            ), reported
            assert "asyncfabric keys trust KEY --role ROLE" in reported and not served.table.nodes
            assert link.statistics().protocol_errors["key_role"] == 1
            holder = Standing(settings, "decode")
            nursery.start_soon(holder.run)
            await holder.listening.wait()
            await holder.until("ready")
            assert served.table.nodes["n"].role == "decode"
            nursery.cancel_scope.cancel()


async def test_a_key_that_is_bound_to_another_role_starts_no_node(tmp_path: Path, folder: Path) -> None:
    write_keys(tmp_path / "key", *make_keys(), frozenset(["decode"]))
    node = Standing(settings_of("n", folder, "tcp://x:1#curve=00", bind="tcp", keys=tmp_path / "key"), "router")
    await node.run()
    assert isinstance(node.failure, StartError)
    assert re.search(r"bound to decode, and n is router: .*keys new FILE --role router", str(node.failure))


@pytest.mark.parametrize("name", ["a b", "a\x1b[2J", "é", "a/b", "a\n", "a" * 65])
async def test_a_name_that_would_need_quoting_starts_no_node(name: str, folder: Path) -> None:
    with pytest.raises(StartError, match=r"node\.name: .* 1\.\.64"):
        await serve_process(settings_of(name, folder, ""), "decode", Standing(Settings(), "x")._opened, print)
    with pytest.raises(ValueError, match=r"1\.\.64"):
        await open_link(name, config=LinkConfig(ipc_folder=str(folder))).__aenter__()

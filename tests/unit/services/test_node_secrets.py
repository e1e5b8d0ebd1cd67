"""The secret of nodes' fabrics: who gets it from the directory, what stands in for it without keys, and its ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="node services need starlette")

import trio
from prometheus_client import CollectorRegistry

import asyncfabric as af
from asyncfabric.control import DirectoryClient, LinkConfig, SecretGrant, make_keys, open_link, serve_directory
from asyncfabric.control.directory_messages import ClusterSecret
from asyncfabric.control.keys import read_keys, write_keys
from asyncfabric.integrations.rails_variable import SECRET_VARIABLE, config_from
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.nodes.directory_service import grant_of
from asyncfabric_services.nodes.rails import open_rails
from asyncfabric_services.nodes.secret import open_member_link
from asyncfabric_services.nodes.stage import Stage, open_control
from asyncfabric_services.nodes.vllm.node import secret_for_workers
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.settings.schema import Settings

pytestmark = pytest.mark.trio
PATIENCE_S = 30.0
SECRET = b"only for nodes with a fabric"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "s"
    made.mkdir(mode=0o700)
    return made


def stage_of(name: str, role: str, folder: Path, directory: str = "", keys: Path | None = None) -> Stage:
    """Return a node's stage."""
    plain = Settings()
    cluster = replace(plain.cluster, bind=f"ipc://{folder}/", directory=directory, keys=keys)
    condition = Condition(name, role)
    return Stage(replace(plain, cluster=cluster), condition, CollectorRegistry(), RequestAdmission(condition, 8))


def keys_in(folder: Path) -> Path:
    """Return a new key file."""
    path = folder / "link.key"
    write_keys(path, *make_keys())
    return path


@asynccontextmanager
async def directory(folder: Path, keys: Path | None) -> AsyncIterator[str]:
    """Serve a directory as its process does; gives its address."""
    stage = stage_of("d", "directory", folder, keys=keys)
    async with open_control(stage) as link, serve_directory(link, grant=grant_of(stage)):
        yield link.address


@pytest.mark.parametrize(("role", "gets"), [("decode", True), ("router", False), ("operator", False), ("", False)])
async def test_only_roles_with_a_fabric_get_the_secret(folder: Path, role: str, gets: bool) -> None:
    config = LinkConfig(ipc_folder=str(folder))
    async with (
        open_link("d", role="directory", config=config) as d,
        open_link("n", role=role, config=config) as n,
        serve_directory(d, grant=SecretGrant(SECRET, {"decode", "prefill"})),
        DirectoryClient(n, d.address) as client,
    ):
        with trio.fail_after(PATIENCE_S):
            if gets:
                assert await client.fabric_secret() == SECRET
                assert await client.fabric_secret() == SECRET
            else:
                with pytest.raises(af.PeerError, match="has no fabric"):
                    await client.fabric_secret()


async def test_a_directory_that_comes_late_or_again_is_asked_and_another_secret_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, place = LinkConfig(ipc_folder=str(folder)), f"ipc://{folder}/d.sock"
    async with open_link("n", role="decode", config=config) as n, DirectoryClient(n, place) as client:
        got: list[bytes] = []

        async def wait() -> None:
            got.append(await client.fabric_secret())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.1)
            assert not got
            for secret in (SECRET, SECRET, b"of another cluster's directory"):
                async with (
                    open_link("d", bind=place, config=config) as d,
                    serve_directory(d, grant=SecretGrant(secret, {"decode"})),
                ):
                    with trio.fail_after(PATIENCE_S):
                        await client.register("decode", n.address)
                        while not client.is_connected or client.missing:  # noqa: ASYNC110
                            await trio.sleep(0.01)
                with trio.fail_after(PATIENCE_S):
                    while client.is_connected:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                assert ("has another secret" in caplog.text) is (secret != SECRET)
        assert got == [SECRET]
        assert SECRET.decode() not in caplog.text


async def test_a_secret_is_not_given_over_plain_tcp() -> None:
    async with open_link("d", bind="tcp", insecure=True) as link:
        with pytest.raises(ValueError, match="open its link with keys"):
            async with serve_directory(link, grant=SecretGrant(SECRET, {"decode"})):
                pass


async def test_the_secret_is_in_no_text() -> None:
    for value in (ClusterSecret(SECRET), SecretGrant(SECRET, {"decode"}), stage_of("n", "decode", Path())):
        if isinstance(value, Stage):
            value.secret = SECRET
        assert SECRET.decode() not in repr(value) + str(value)


async def test_it_follows_from_the_directorys_key_and_from_nothing_else(tmp_path: Path) -> None:
    path = keys_in(tmp_path)
    first, again = read_keys(path), read_keys(path)
    assert first.fabric_secret == again.fabric_secret and len(first.fabric_secret) == 32
    assert first.fabric_secret != bytes.fromhex(first.secret)
    write_keys(tmp_path / "other.key", *make_keys())
    assert read_keys(tmp_path / "other.key").fabric_secret != first.fabric_secret


async def test_nodes_with_keys_are_peers_and_a_fabric_without_the_secret_is_none(folder: Path) -> None:
    keys = keys_in(folder)
    with trio.fail_after(PATIENCE_S):
        async with directory(folder, keys) as place:
            one, two = (stage_of(name, role, folder, place, keys) for name, role in (("p", "prefill"), ("e", "expert")))
            async with (
                open_member_link(one),
                open_member_link(two),
                open_rails(one.settings, one.secret) as source,
                open_rails(two.settings, two.secret) as target,
                open_rails(one.settings) as stranger,
            ):
                assert [rail.admission for rail in source.rails] == ["secret"]
                await source.connect(target.address)
                with pytest.raises(af.PeerError, match="secret"):
                    await stranger.connect(target.address)
                with pytest.raises(af.PeerError, match="secret"):
                    await source.connect(stranger.address)


async def test_without_keys_the_fabric_is_open_and_the_log_has_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_of("p", "prefill", folder)  # no directory either: nothing is waited for
    with caplog.at_level(logging.WARNING):
        async with open_member_link(stage):
            assert stage.secret is None
    assert "the fabric is open" in caplog.text and "cluster.keys" in caplog.text


async def test_keys_of_a_node_whose_directory_has_none_are_an_error(folder: Path) -> None:
    async with directory(folder, None) as place:
        stage = stage_of("p", "prefill", folder, place, keys_in(folder))
        with trio.fail_after(PATIENCE_S), pytest.RaisesGroup(EnvironmentUnfit, allow_unwrapped=True):
            async with open_member_link(stage):
                pass
        assert not stage.condition.alive and "the directory has no keys" in stage.condition.reason


async def test_a_node_that_waits_for_its_directory_can_be_stopped(folder: Path) -> None:
    stage = stage_of("p", "prefill", folder, f"ipc://{folder}/none.sock", keys_in(folder))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def stop() -> None:
                await trio.sleep(0.05)
                stage.stop.set()

            with stage.ending:
                async with open_member_link(stage):
                    pytest.fail("there is no directory")
    assert stage.ending.cancelled_caught and stage.condition.alive


def read(path: str) -> bytes:
    """Return what a path leads to."""
    with open(path, "rb") as file:
        return file.read()


async def test_processes_of_an_engine_get_the_secret_and_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {SECRET_VARIABLE: "before"}
    monkeypatch.setattr("os.environ", environment)
    with secret_for_workers(None):
        assert environment == {SECRET_VARIABLE: "before"}
    with secret_for_workers(SECRET):
        path = environment[SECRET_VARIABLE]
        assert path == config_from(environment).secret
        assert read(path) == read(path) == SECRET
    assert environment == {SECRET_VARIABLE: "before"}
    with pytest.raises(FileNotFoundError):
        read(path)

"""A cluster over two and three hosts (network namespaces): tcp with keys, one address each, and cables that are pulled.

The settings are those of docs/guide/cluster.md, "On several hosts".
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

import socket  # noqa: E402

from availability import need  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from cluster import Cluster, Service, complete, ending  # noqa: E402
from hosts import CARD, Host, open_hosts  # noqa: E402
from plain_model import PlainModel  # noqa: E402

from asyncfabric_services.keys.command import keys  # noqa: E402
from asyncfabric_services.runner.model import ModelChoice  # noqa: E402

pytestmark = pytest.mark.slow
PORT = 7400
WRITTEN = 'asyncfabric_written_bytes_total{fabric="fabric"}'
LOST = 'asyncfabric_peers{fabric="fabric",state="lost"}'
RETRIES = 'asyncfabric_router_retries_total{because="lost"}'
PROMPT = "Pages cross from host to host. " * 120  # 3,720 tokens: seconds of prefill


class HostedService(Service):
    """A node on a host."""

    def __init__(self, host: Host, name: str, log: Path, settings: dict[str, str]) -> None:
        self.host = host
        super().__init__(name.partition("-")[0], name, log, settings, namespace=host.namespace)

    def connect(self) -> socket.socket:
        with self.host.inside():
            return super().connect()


class HostedCluster(Cluster):
    """Nodes on hosts; which node is where is stated before it starts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {"CLUSTER__PATIENCE": "60s", "CACHE__PREFIXES": "drop"})  # pages move for each answer
        self.places: dict[str, Host] = {}

    def put(self, places: dict[str, Host]) -> None:
        """Start nodes on their hosts, side by side."""
        self.places |= places
        self.start(*places)

    def service(self, name: str, settings: dict[str, str]) -> Service:
        host = self.places[name]
        own = {
            "CLUSTER__BIND": f"tcp://{host.address}:{PORT + len(self.started)}",
            "CLUSTER__KEYS": str(key_file(self.folder, host)),
            "CLUSTER__RAILS": f"tcp?address={host.address}" if name == "decode-1" else f"tcp:{CARD}",
        }
        return HostedService(host, name, self.folder / f"{name}.log", settings | own)

    def ask(self, prompt: str, count: int) -> str:
        """Ask the router, on its own host."""
        with self.places["router"].inside(), self.client() as client:
            return complete(client, prompt, count)


def key_file(folder: Path, host: Host) -> Path:
    return folder / f"{host.namespace}.key"


def keys_for(folder: Path, hosts: list[Host]) -> None:
    """Make a key for each host and let all trust each other, as a user does."""
    run = CliRunner()
    for host in hosts:
        made = run.invoke(keys, ["new", str(key_file(folder, host))], standalone_mode=False)
        assert made.exception is None, made.output
    for host in hosts:
        for other in hosts:
            public = key_file(folder, other).with_name(f"{key_file(folder, other).name}.pub")
            done = run.invoke(
                keys,
                ["trust", str(public), "--file", str(key_file(folder, host)), "--note", other.namespace],
                standalone_mode=False,
            )
            assert done.exception is None, done.output


def until_pages_move(prefill: Service) -> None:
    prefill.until("asyncfabric_kv_held_pages", lambda pages: pages > 0)
    written = prefill.metric(WRITTEN)
    prefill.until(WRITTEN, lambda now: now > written)


class Separation:
    """A cable that is out until one end of the fabric has lost the other, which may not know it yet."""

    def __init__(self, host: Host, end: Service) -> None:
        self._host = host
        self._end = end
        self._before = end.metric(LOST)
        host.pull()

    def mend(self) -> None:
        self._end.until(LOST, lambda now: now > self._before)
        self._host.plug()


def test_cables_are_pulled_between_two_and_three_hosts(tmp_path: Path) -> None:
    need("tcp:lo")
    expected = PlainModel(ModelChoice(layers=3, hidden=64, query_heads=4, kv_heads=2), 4096).text(PROMPT, 20)
    with open_hosts(3) as (first, second, third):
        keys_for(tmp_path, [first, second, third])
        made = HostedCluster(tmp_path)
        with ending(made), ThreadPoolExecutor(1) as pool:
            made.put({"directory": first})
            made.put({"router": first, "prefill-1": first, "decode-1": second})
            made.until_routed(prefill=1, decode=1)
            assert made.ask(PROMPT, 20) == expected

            # Two hosts: the cable comes back, and with it the one node that can answer.
            answer = pool.submit(made.ask, PROMPT, 20)
            until_pages_move(made["prefill-1"])
            cut = Separation(second, made["decode-1"])
            assert not answer.done()
            cut.mend()
            assert answer.result() == expected
            retries = made["router"].metric(RETRIES)
            assert retries >= 1
            made["decode-1"].until_no_page_is_out()

            # Three hosts: another node takes over while the cable is out.
            made.put({"decode-2": third})
            made.until_routed(prefill=1, decode=2)
            answer = pool.submit(made.ask, PROMPT, 20)  # of two that have nothing to do, the first by name is asked
            until_pages_move(made["prefill-1"])
            cut = Separation(second, made["decode-1"])
            assert answer.result() == expected
            assert made["router"].metric(RETRIES) > retries
            cut.mend()
            made.until_routed(prefill=1, decode=2)
            for name in ("prefill-1", "decode-1", "decode-2"):
                made[name].until_no_page_is_out()
            assert made["decode-2"].end() == 0
            assert made.ask(PROMPT, 20) == expected, "the node that was cut off twice serves again"

            # The third host stays away: what its prefill node was writing holds nobody up.
            made.put({"prefill-0": third})
            made.until_routed(prefill=2, decode=1)
            answer = pool.submit(made.ask, PROMPT, 20)  # of its two prefill nodes the first by name is asked
            until_pages_move(made["prefill-0"])
            third.pull()
            assert answer.result() == expected
            made["decode-1"].until_no_page_is_out()
            third.plug()
            for name in ("router", "decode-1", "prefill-1", "directory"):
                assert made[name].end() == 0, made[name].log.read_text()[-3000:]

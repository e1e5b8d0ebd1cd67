"""What the actors of one cluster leave for each other in Ray's key-value store: addresses that outlive an actor.

Blocking calls, from the threads of an actor or of the launcher. The store is Ray's own head; no secret is put there.
"""

from __future__ import annotations

import socket
import time

from ray.experimental import internal_kv

TRIES, PAUSE_SECONDS = 20, 0.25


class ClusterAddresses:
    """The addresses of one cluster, by name."""

    def __init__(self, cluster: str) -> None:
        self._prefix = f"asyncfabric/{cluster}/"

    def get(self, name: str) -> str:
        """Return an address, "" when nobody has put one yet."""
        return (internal_kv._internal_kv_get(self._prefix + name) or b"").decode()

    def put(self, name: str, address: str) -> None:
        """Put an address in the place of the one before."""
        internal_kv._internal_kv_put(self._prefix + name, address, overwrite=True)

    def port_at(self, name: str, host: str) -> int:
        """Return the port that was used at this host before, so that who restarts is found again; else a free one.

        Waits a while for a port that is still taken: who had it may be about to end.
        """
        before, _, port = self.get(name).partition("#")[0].removeprefix("tcp://").rpartition(":")
        for _ in range(TRIES if before == host else 0):
            if found := _bindable(host, int(port)):
                return found
            time.sleep(PAUSE_SECONDS)
        return _bindable(host, 0)

    def below(self, folder: str) -> dict[str, str]:
        """Return all addresses whose names begin with `folder/`, by the rest of their names."""
        start = f"{self._prefix}{folder}/"
        names = [bytes(key).decode().removeprefix(start) for key in internal_kv._internal_kv_list(start)]
        return {name: address for name in sorted(names) if (address := self.get(f"{folder}/{name}"))}

    def forget(self, name: str) -> None:
        """Remove an address, if there is one."""
        internal_kv._internal_kv_del(self._prefix + name)

    def count(self, name: str) -> int:
        """Return how often this was called for the name before."""
        before = int(self.get(name) or 0)
        self.put(name, str(before + 1))
        return before

    def clear(self) -> None:
        """Remove all that the cluster has put."""
        internal_kv._internal_kv_del(self._prefix, del_by_prefix=True)


def _bindable(host: str, port: int) -> int:
    """Return the port, or for 0 a free one; 0 when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])

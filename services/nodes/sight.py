"""The view of a prefill or decode node: what its fabric, its pool and its link know, with the names of other nodes.

On the event loop. The names of other nodes come from the directory, by the addresses of their fabrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from asyncfabric import Fabric, Waiting
from asyncfabric.control import Link
from asyncfabric.kv import KvInbox, KvOutbox, waiting
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.paged_model import PagedModel


class FabricSight:
    """What a node with a fabric shows. `end` is its inbox or outbox."""

    def __init__(self, model: PagedModel, link: Link, names: NodeNames, end: KvInbox | KvOutbox) -> None:
        self._model = model
        self._link = link
        self._names = names
        self._end = end

    def view(self) -> View:
        """Return the view of the node."""
        return View(self.waits, self.peers, self.regions)

    def waits(self) -> list[Waiting]:
        """Return who waits, nodes by their names."""
        return named_waits(waiting(self._model.fabric, [self._model.pool], [self._end]), self._names)

    def peers(self) -> list[Row]:
        """Return the peers of the fabric, then those of the control plane."""
        return fabric_peers(self._model.fabric, self._names) + link_rows(self._link)

    def regions(self) -> list[Row]:
        """Return the registered regions and what they are for."""
        pool = self._model.pool
        owners = {pool.region.id: "pages"}
        if pool.context_region is not None:
            owners[pool.context_region.id] = "contexts"
        return fabric_regions(self._model.fabric, owners)


def named_waits(waits: Iterable[Waiting], names: NodeNames) -> list[Waiting]:
    """Return waits with the names of nodes where they have the numbers of fabrics."""
    spoken = names.spoken
    return [
        replace(
            line,
            what=spoken(line.what),
            waits_for=spoken(line.waits_for),
            missing_from=tuple(map(spoken, line.missing_from)),
        )
        for line in waits
    ]


def fabric_peers(fabric: Fabric, names: NodeNames) -> list[Row]:
    """Return the peers of a fabric as rows."""
    return [
        {
            "plane": "fabric",
            "peer": names.of(peer.incarnation) or f"fabric {peer.incarnation:016x}",
            "state": peer.state,
            "incarnation": f"{peer.incarnation:016x}",
            "provider": peer.provider,
            "lanes": peer.lanes,
            "bytes_sent": peer.bytes_sent,
            "ops_in_flight": peer.ops_in_flight,
        }
        for peer in fabric.statistics().peers
    ]


def fabric_regions(fabric: Fabric, owners: Mapping[int, str]) -> list[Row]:
    """Return the registered regions of a fabric as rows; `owners` states what some are for."""
    rows = [{"owner": owners.get(region.id, "")} | asdict(region) for region in fabric.regions()]
    return [row | {"age_s": round(row["age_s"], 3), "cost_s": round(row["cost_s"], 6)} for row in rows]

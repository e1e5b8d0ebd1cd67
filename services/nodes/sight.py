"""The view of a prefill or decode node: what its fabric, its pool and its link know, with the names of other nodes.

On the event loop. The names of other nodes come from the directory, by the addresses of their fabrics.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from asyncfabric import Waiting
from asyncfabric._control import Link
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
        model, spoken = self._model, self._names.spoken
        return [
            replace(
                line,
                what=spoken(line.what),
                waits_for=spoken(line.waits_for),
                missing_from=tuple(map(spoken, line.missing_from)),
            )
            for line in waiting(model.fabric, [model.pool], [self._end])
        ]

    def peers(self) -> list[Row]:
        """Return the peers of the fabric, then those of the control plane."""
        rows: list[Row] = [
            {
                "plane": "fabric",
                "peer": self._names.of(peer.incarnation) or f"fabric {peer.incarnation:016x}",
                "state": peer.state,
                "incarnation": f"{peer.incarnation:016x}",
                "provider": peer.provider,
                "lanes": peer.lanes,
                "bytes_sent": peer.bytes_sent,
                "ops_in_flight": peer.ops_in_flight,
            }
            for peer in self._model.fabric.statistics().peers
        ]
        return rows + link_rows(self._link)

    def regions(self) -> list[Row]:
        """Return the registered regions and what they are for."""
        pool = self._model.pool
        owners = {pool.region.id: "pages"}
        if pool.context_region is not None:
            owners[pool.context_region.id] = "contexts"
        rows = [{"owner": owners.get(region.id, "")} | asdict(region) for region in self._model.fabric.regions()]
        return [row | {"age_s": round(row["age_s"], 3), "cost_s": round(row["cost_s"], 6)} for row in rows]

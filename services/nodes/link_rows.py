"""Peers of the control plane as rows of a node's view. On the event loop; loads no torch, for router and directory."""

from __future__ import annotations

from asyncfabric.control import Link
from asyncfabric_services.health.view import Row


def link_rows(link: Link) -> list[Row]:
    """Return the peers of the control plane."""
    return [
        {
            "plane": "control",
            "peer": peer.identity.name,
            "state": peer.state,
            "incarnation": f"{peer.identity.incarnation:x}",
            "address": peer.address,
            "silent_s": round(peer.silent_s, 3),
        }
        for peer in link.peers()
    ]

"""Forwarding: when receivers pass on what they have received, and who does. Pure.

Two roads are worth it. Inside a node several ranks may want the same bytes, and the network carries them once. And when
trainers are too few for many replicas, each replica forwards to a later one over its own idle sending side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncfabric.weights.plan.assignment import choose, heads
from asyncfabric.weights.plan.parts import Relay

if TYPE_CHECKING:
    from asyncfabric.weights.plan.plan import Plan


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs to know of the network, as plain numbers.

    Attributes:
        rail_gbytes_per_s: of one rank's network port, each way.
        node_gbytes_per_s: of one rank's port inside a node (NVLink), each way; 0: there is none.
        node_ranks: ranks of a replica that share a node.
    """

    rail_gbytes_per_s: float
    node_gbytes_per_s: float = 0.0
    node_ranks: int = 1


GAIN = 0.97
"""Forwarding has costs that this estimate does not see, so it has to save 3 percent."""


def choose_relay(plan: Plan, rates: Rates, replicas: int) -> Relay:
    """Return the forwarding whose busiest port is done first.

    Args:
        plan: a plan without replicas.
        rates: of the network.
        replicas: how many there will be.
    """
    if rates.rail_gbytes_per_s <= 0 or rates.node_ranks < 1:
        raise ValueError(f"the rail's rate and node_ranks must be above 0, got {rates}")
    inside = [0] if rates.node_gbytes_per_s <= 0 or rates.node_ranks == 1 else [0, rates.node_ranks]
    best, best_s = Relay(), float("inf")
    for node_ranks in inside:
        options = plan.with_relay(Relay(node_ranks))
        receiver = options.pieces.receiver[options.row_piece]
        weights = options.piece_bytes[options.row_piece]
        head = heads(options, 0)
        outside = head == receiver
        received = np.bincount(receiver[outside], weights=weights[outside], minlength=options.receivers)
        forwarded = np.bincount(head[~outside], weights=weights[~outside], minlength=options.receivers)
        pieces = options.row_piece[outside]
        senders = choose(options.groups, options.piece_group[pieces], weights[outside], options.trainers)
        sent = float(np.bincount(senders, weights=weights[outside]).max())
        node_s = float(forwarded.max()) / (rates.node_gbytes_per_s * 1e9) if node_ranks else 0.0
        receive_s = float(received.max()) / (rates.rail_gbytes_per_s * 1e9)
        send_s = sent / (rates.rail_gbytes_per_s * 1e9)
        fed = max(1, min(replicas, int(receive_s / send_s))) if send_s else replicas
        for width in {replicas, fed}:
            seconds = max(receive_s, width * send_s, node_s)
            if seconds < best_s * GAIN:
                best, best_s = Relay(node_ranks, width if width < replicas else 0), seconds
    return best

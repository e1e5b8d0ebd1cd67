"""asyncfabric.weights: new weights from all ranks of a trainer straight into all replicas. The public door; no logic.

Describe what goes where: Placement (place, boxes), Target (alone, fused, stacked), Move; or card and moves_between; or,
for a model of transformers, holdings of asyncfabric.weights.tensors (needs torch), held_by, card_of, causal_moves.
Plan it:               plan_weights, join_replica, leave_replica; Rates or Relay state whether receivers forward.
Read it:               sent_by, forwarded_by, Plan.expected, Plan.region_bytes; to_bytes, from_bytes, Plan.digest,
draw_plan. Carry it out:          execute is the reference in numpy; HeldShard.convert casts and quantises.
"""

from asyncfabric.weights.plan.assignment import imbalance, join_replica, leave_replica, seat_replicas
from asyncfabric.weights.plan.batch import Batch, Forwards, all_sent, forwarded_by, sent_by
from asyncfabric.weights.plan.cards import CARDS, ModelCard, Parameter, card, parameters
from asyncfabric.weights.plan.causal import card_of, causal_moves
from asyncfabric.weights.plan.execute import HeldShard, ReplicaMemory, execute, open_shard, run_layout
from asyncfabric.weights.plan.formats import BLOCK, ITEM_BYTES, STORED_AS
from asyncfabric.weights.plan.geometry import Pieces
from asyncfabric.weights.plan.holdings import Held, Holding, LocalTensor, held_by, local_tensors
from asyncfabric.weights.plan.layouts import ReplicaLayout, TrainerLayout, moves_between
from asyncfabric.weights.plan.parts import Expected, MoveKind, RegionSizes, Relay, Replica
from asyncfabric.weights.plan.placement import Mesh, Placement, Replicate, Shard, Shares, boxes, place, shares
from asyncfabric.weights.plan.plan import Plan, from_bytes, to_bytes
from asyncfabric.weights.plan.planner import CHUNK_BYTES, plan_weights
from asyncfabric.weights.plan.relay import Rates
from asyncfabric.weights.plan.rules import SAME_NAMES, Rule, causal_rules, moves_by_rules
from asyncfabric.weights.plan.table import draw_plan
from asyncfabric.weights.plan.target import SCALE_SUFFIX, Move, Target, alone, fused, stacked

__all__ = [
    "BLOCK",
    "CARDS",
    "CHUNK_BYTES",
    "ITEM_BYTES",
    "SAME_NAMES",
    "SCALE_SUFFIX",
    "STORED_AS",
    "Batch",
    "Expected",
    "Forwards",
    "Held",
    "HeldShard",
    "Holding",
    "LocalTensor",
    "Mesh",
    "ModelCard",
    "Move",
    "MoveKind",
    "Parameter",
    "Pieces",
    "Placement",
    "Plan",
    "Rates",
    "RegionSizes",
    "Relay",
    "Replica",
    "ReplicaLayout",
    "ReplicaMemory",
    "Replicate",
    "Rule",
    "Shard",
    "Shares",
    "Target",
    "TrainerLayout",
    "all_sent",
    "alone",
    "boxes",
    "card",
    "card_of",
    "causal_moves",
    "causal_rules",
    "draw_plan",
    "execute",
    "forwarded_by",
    "from_bytes",
    "fused",
    "held_by",
    "imbalance",
    "join_replica",
    "leave_replica",
    "local_tensors",
    "moves_between",
    "moves_by_rules",
    "open_shard",
    "parameters",
    "place",
    "plan_weights",
    "run_layout",
    "seat_replicas",
    "sent_by",
    "shares",
    "stacked",
    "to_bytes",
]

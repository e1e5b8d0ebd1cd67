"""asyncfabric.moe: tokens to the ranks of their experts and back, over any provider. The public door; no logic.

    async with open_moe(fabric, MoeGroup(rank, addresses), MoeConfig(...)) as moe:
        handle = await moe.dispatch(x, indices, weights)
        y = await moe.combine(run_experts(handle.rows, handle.tokens_per_expert), handle)

How it works, and its invariants: docs/explain/moe.md.
"""

from asyncfabric.moe.cards import CARD_CODEC, Card, CardChannel
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.faults import MissingRankError
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.host.exchange import MoeExchange, open_moe
from asyncfabric.moe.host.handle import MoeHandle
from asyncfabric.moe.host.loop_caller import LoopCaller
from asyncfabric.moe.host.session import buffer_bytes
from asyncfabric.moe.host.training import MoeTraining, TrainingStep, gradient_config, open_moe_training

__all__ = [
    "CARD_CODEC",
    "Card",
    "CardChannel",
    "LoopCaller",
    "MissingRankError",
    "MoeConfig",
    "MoeExchange",
    "MoeGroup",
    "MoeHandle",
    "MoeTraining",
    "TrainingStep",
    "buffer_bytes",
    "gradient_config",
    "open_moe",
    "open_moe_training",
]

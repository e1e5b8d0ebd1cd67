"""The module `deep_ep` for programs whose PYTHONPATH begins with the folder above: DeepEP's interface over asyncfabric.

Names only, those of `deep_ep.utils` too; see `asyncfabric.integrations.deep_ep`.
"""

import sys

from asyncfabric.integrations.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    events,
    topk_idx_t,
)

sys.modules[f"{__name__}.utils"] = events

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]

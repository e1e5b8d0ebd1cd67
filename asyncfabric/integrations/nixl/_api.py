"""What programs import from `nixl._api`.

Names only.
"""

from __future__ import annotations

from asyncfabric.integrations.nixl import _bindings as nixlBind
from asyncfabric.integrations.nixl.agent import nixl_agent
from asyncfabric.integrations.nixl.agent_config import DEFAULT_COMM_PORT, nixl_agent_config, nixl_thread_sync_t
from asyncfabric.integrations.nixl.handles import nixl_prepped_dlist_handle, nixl_xfer_handle

nixl_backend_handle = int

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBind",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

"""asyncfabric.integrations.nixl: the Python interface of NIXL over fabrics, for engines that speak it unchanged.

Both sides of a transfer have to run it. Three ways put it in the place of the module `nixl`: `install()` in the
program; the folder `pythonpath()` first on PYTHONPATH; ASYNCFABRIC_NIXL=1 in the environment of vLLM and SGLang, which
load it as a plugin. Without one of these nothing is changed by installing asyncfabric.
"""

from asyncfabric.integrations.nixl.agent import nixl_agent
from asyncfabric.integrations.nixl.agent_config import nixl_agent_config, nixl_thread_sync_t
from asyncfabric.integrations.nixl.installing import install, pythonpath, uninstall

__all__ = ["install", "nixl_agent", "nixl_agent_config", "nixl_thread_sync_t", "pythonpath", "uninstall"]

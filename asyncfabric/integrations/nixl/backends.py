"""Which backends of NIXL the face stands in for, and which it refuses by name.

Values. All network backends are one and the same fabric here: FabricConfig names the rails it has.
"""

from __future__ import annotations

from asyncfabric.integrations.nixl.errors import nixlInvalidParamError, nixlNotFoundError

NETWORK = ("GPUNETIO", "LIBFABRIC", "MOONCAKE", "UCCL", "UCX", "UCX_MO")
STORAGE = ("AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX")
MEMORY = ["DRAM_SEG", "VRAM_SEG"]


def check_backend(name: str) -> None:
    """Raise nixlNotFoundError for a backend that the face has not."""
    if name in STORAGE:
        raise nixlNotFoundError(
            f"backend {name!r} is storage, which asyncfabric does not offer: run this agent on NIXL itself, without "
            "ASYNCFABRIC_NIXL and without the folder of asyncfabric on PYTHONPATH"
        )
    if name not in NETWORK:
        raise nixlNotFoundError(f"backend {name!r} is unknown; asyncfabric stands in for {', '.join(NETWORK)}")


def check_made(name: str, made: dict[str, int]) -> None:
    """Raise nixlInvalidParamError for a backend that the agent has already."""
    if name in made:
        raise nixlInvalidParamError(f"backend {name!r} was created already")


def check_chosen(chosen: list[str], made: dict[str, int]) -> None:
    """Raise KeyError, as NIXL does, for a backend that the agent has not."""
    for name in chosen or ():
        if name not in made:
            raise KeyError(f"backend {name!r} is none of this agent, which has {sorted(made)}")


class BackendNames:
    """Methods of nixl_agent about backends: names that an agent has, and what NIXL reports about each."""

    def __init__(self) -> None:
        self.plugin_list: list[str] = list(NETWORK)
        self.backends: dict[str, int] = {}

    def get_plugin_list(self) -> list[str]:
        """Return the backends that the face stands in for."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Return the memory types of a backend; none for one that is unknown."""
        return list(MEMORY) if backend in self.plugin_list else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return the parameters of a backend: none, the fabric is configured by FabricConfig."""
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Return the memory types of a backend of the agent."""
        return list(MEMORY) if backend in self.backends else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Return the parameters of a backend of the agent: none."""
        return {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Add a network backend by its name.

        Raises:
            nixlNotFoundError: storage, or unknown.
            nixlInvalidParamError: the agent has it.
        """
        check_backend(backend)
        check_made(backend, self.backends)
        self.backends[backend] = len(self.backends) + 1

"""Which backends of NIXL the face stands in for, and which it refuses by name.

Values. All network backends are one and the same fabric here: which rails it has is said by FabricConfig.
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

"""The enumerations of NIXL's bindings, by its names: memory types, operations, states, modes.

Values, any thread.
"""

from __future__ import annotations

from enum import IntEnum


class nixl_mem_t(IntEnum):
    """Where memory is."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(IntEnum):
    """What a transfer does, seen from its initiator."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(IntEnum):
    """How a call of NIXL's own bindings ends."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_cost_t(IntEnum):
    """How a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


DRAM, VRAM = nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG

MEMORY_TYPES = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}
"""The texts that callers name memory types by."""

OPERATIONS = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}


def memory_type(name: str) -> nixl_mem_t:
    """Return the memory type of a text; raises KeyError, as NIXL does."""
    if name not in MEMORY_TYPES:
        raise KeyError(f"memory type {name!r}: expected one of {sorted(MEMORY_TYPES)}")
    return MEMORY_TYPES[name]

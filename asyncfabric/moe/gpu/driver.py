"""Structs and numbers of the CUDA driver that shared pages need; `asyncfabric._cuda_driver` calls it. Values."""

from __future__ import annotations

import ctypes

POSIX_DESCRIPTOR, LOCATION_DEVICE, ALLOCATION_PINNED, READ_WRITE, RECOMMENDED = 1, 1, 1, 3, 1
PORTABLE_MAPPED, ALREADY_PINNED = 3, 712
DYNAMIC_SHARED_BYTES, SHARED_SHARE = 8, 9
MULTIPROCESSORS, VMM, POSIX_HANDLES, MAJOR = 16, 102, 103, 75


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]

"""The child of gpu.py: asks libcuda what the GPUs can do, and really opens memory of one in a process beside this one.

That process is forked before CUDA starts here, and gets both kinds of handle over a socket. One JSON object out.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from typing import Any

ATTRIBUTES = {"rdma": 116, "ordering": 118, "dmabuf": 124, "vmm": 102, "descriptors": 103}
LENGTH = 2 << 20
WORD = 0x0123456789ABCDEF
POSIX, PINNED, ON_DEVICE, READ_WRITE = 1, 1, 1, 3
LAZY_PEER_ACCESS = 1


class Refused(Exception):
    """A call of the driver failed; the text names it."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class Wanted(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", Location), ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("where", Location), ("rights", ctypes.c_int))


class LegacyHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


class Cuda:
    """libcuda with the primary context of one GPU current in this thread."""

    def __init__(self) -> None:
        """Start the driver; no context yet."""
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call; raises Refused with the driver's own word for what was wrong."""
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            word = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(word))
            raise Refused(f"{name.partition('_v')[0]}: {(word.value or b'').decode() or status}")

    def enter(self, ordinal: int) -> None:
        """Make the primary context of a GPU current."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuCtxSetCurrent", context)

    def mapped(self, handle: ctypes.c_ulonglong) -> ctypes.c_uint64:
        """Map a memory handle for GPU 0."""
        base = ctypes.c_uint64()
        access = Access(Location(ON_DEVICE, 0), READ_WRITE)
        self.call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(LENGTH), ctypes.c_size_t(0),
                  ctypes.c_uint64(0), ctypes.c_ulonglong(0))  # fmt: skip
        self.call("cuMemMap", base, ctypes.c_size_t(LENGTH), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        self.call("cuMemSetAccess", base, ctypes.c_size_t(LENGTH), ctypes.byref(access), ctypes.c_size_t(1))
        return base

    def store(self, base: ctypes.c_uint64) -> None:
        """Put the word at an address of GPU memory."""
        word = ctypes.c_uint64(WORD)
        self.call("cuMemcpyHtoD_v2", base, ctypes.byref(word), ctypes.c_size_t(8))

    def check(self, base: ctypes.c_uint64) -> None:
        """Raise Refused unless the word is at an address."""
        word = ctypes.c_uint64()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(word), base, ctypes.c_size_t(8))
        if word.value != WORD:
            raise Refused("the other process saw other bytes")


def visit(link: socket.socket) -> None:
    """Be the other process: open what comes over the link, look at the word in it, say what was refused."""
    note, descriptors, _, _ = socket.recv_fds(link, 64, 1)
    if not note:
        return
    said = {}
    try:
        cuda = Cuda()
        cuda.enter(0)
        for name, opened in (("descriptor", _by_descriptor), ("legacy", _by_legacy)):
            try:
                cuda.check(opened(cuda, note, descriptors))
                said[name] = ""
            except Refused as error:
                said[name] = str(error)
    except Refused as error:
        said = {"descriptor": str(error), "legacy": str(error)}
    link.sendall(json.dumps(said).encode())


def _by_descriptor(cuda: Cuda, _: bytes, descriptors: list[int]) -> ctypes.c_uint64:
    if not descriptors:
        raise Refused("no descriptor came over the socket")
    handle = ctypes.c_ulonglong()
    cuda.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptors[0]), POSIX)
    return cuda.mapped(handle)


def _by_legacy(cuda: Cuda, note: bytes, _: list[int]) -> ctypes.c_uint64:
    if not any(note):
        raise Refused("cuIpcGetMemHandle was refused")
    base = ctypes.c_uint64()
    cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), LegacyHandle.from_buffer_copy(note), LAZY_PEER_ACCESS)
    return base


def share(cuda: Cuda, link: socket.socket) -> dict[str, str]:
    """Make memory of both kinds, send the handles, return what the other process says."""
    cuda.enter(0)
    handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
    wanted = Wanted(PINNED, POSIX, Location(ON_DEVICE, 0))
    cuda.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(LENGTH), ctypes.byref(wanted), ctypes.c_ulonglong(0))
    cuda.store(cuda.mapped(handle))
    cuda.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX, ctypes.c_ulonglong(0))
    plain, legacy = ctypes.c_uint64(), LegacyHandle()
    cuda.call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(LENGTH))
    cuda.store(plain)
    cuda.library.cuIpcGetMemHandle(ctypes.byref(legacy), plain)  # all zero when that is refused
    socket.send_fds(link, [bytes(legacy)], [descriptor.value])
    os.close(descriptor.value)
    said: dict[str, str] = json.loads(link.recv(4096) or b'{"descriptor": "the other process died", "legacy": ""}')
    return said


def look(cuda: Cuda) -> dict[str, Any]:
    """Return what the driver says of each GPU, and who reaches whose memory."""
    count = ctypes.c_int()
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    gpus = []
    for ordinal in range(count.value):
        has = {}
        for name, number in ATTRIBUTES.items():
            value = ctypes.c_int()
            cuda.library.cuDeviceGetAttribute(ctypes.byref(value), number, ordinal)
            has[name] = value.value
        gpus.append(has)
    reach = []
    for ordinal in range(count.value):
        row = []
        for other in range(count.value):
            can = ctypes.c_int()
            cuda.library.cuDeviceCanAccessPeer(ctypes.byref(can), ordinal, other)
            row.append(can.value == 1 or other == ordinal)
        reach.append(row)
    return {"gpus": gpus, "reach": reach}


def main() -> None:
    """Fork the other process, ask, print the answer."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        visit(theirs)
        os._exit(0)
    theirs.close()
    said: dict[str, Any] = {}
    try:
        cuda = Cuda()
        said = look(cuda)
        if said["gpus"]:
            said["sharing"] = share(cuda, ours)
    except (Refused, OSError, AttributeError) as error:
        said["error"] = str(error)
    finally:
        ours.close()
        os.waitpid(child, 0)
    print(json.dumps(said))


if __name__ == "__main__":
    main()

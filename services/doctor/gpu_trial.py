"""The child of gpu.py: asks libcuda what the GPUs can do, and really opens memory of one in a process beside this one.

That process is forked before CUDA starts here, and gets both kinds of handle over a socket. One JSON object out.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from typing import Any

from asyncfabric.bench.gpu_driver import Driver, memory, open_driver
from asyncfabric.errors import DeviceError

ATTRIBUTES = {"rdma": 116, "ordering": 118, "dmabuf": 124, "vmm": 102, "descriptors": 103}
LENGTH = 2 << 20
WORD = 0x0123456789ABCDEF
LAZY_PEER_ACCESS = 1


class LegacyHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


def mapped(driver: Driver, handle: int) -> int:
    """Map a memory handle for GPU 0; return the address."""
    base = memory.reserve(driver, LENGTH)
    memory.map_handle(driver, base, LENGTH, handle)
    memory.allow(driver, 0, base, LENGTH)
    return base


def store(driver: Driver, base: int) -> None:
    """Put the word at an address of GPU memory."""
    word = ctypes.c_uint64(WORD)
    driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(base), ctypes.byref(word), ctypes.c_size_t(8))


def check(driver: Driver, base: int) -> None:
    """Raise DeviceError unless the word is at an address."""
    word = ctypes.c_uint64()
    driver.call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(base), ctypes.c_size_t(8))
    if word.value != WORD:
        raise DeviceError("the other process saw other bytes")


def visit(link: socket.socket) -> None:
    """Be the other process: open what comes over the link, look at the word in it, report what was refused."""
    note, descriptors, _, _ = socket.recv_fds(link, 64, 1)
    if not note:
        return
    stated = {}
    try:
        driver = open_driver()
        driver.enter(0)
        for name, opened in (("descriptor", _by_descriptor), ("legacy", _by_legacy)):
            try:
                check(driver, opened(driver, note, descriptors))
                stated[name] = ""
            except DeviceError as error:
                stated[name] = str(error)
    except DeviceError as error:
        stated = {"descriptor": str(error), "legacy": str(error)}
    link.sendall(json.dumps(stated).encode())


def _by_descriptor(driver: Driver, _: bytes, descriptors: list[int]) -> int:
    if not descriptors:
        raise DeviceError("no descriptor came over the socket")
    return mapped(driver, memory.import_descriptor(driver, descriptors[0]))


def _by_legacy(driver: Driver, note: bytes, _: list[int]) -> int:
    if not any(note):
        raise DeviceError("cuIpcGetMemHandle was refused")
    base = ctypes.c_uint64()
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), LegacyHandle.from_buffer_copy(note), LAZY_PEER_ACCESS)
    return base.value


def share(driver: Driver, link: socket.socket) -> dict[str, str]:
    """Make memory of both kinds, send the handles, return what the other process reports."""
    driver.enter(0)
    handle = memory.create(driver, 0, LENGTH)
    store(driver, mapped(driver, handle))
    descriptor = memory.export_descriptor(driver, handle)
    plain, legacy = ctypes.c_uint64(), LegacyHandle()
    driver.call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(LENGTH))
    store(driver, plain.value)
    driver.status("cuIpcGetMemHandle", ctypes.byref(legacy), plain)  # all zero when that is refused
    socket.send_fds(link, [bytes(legacy)], [descriptor])
    os.close(descriptor)
    stated: dict[str, str] = json.loads(link.recv(4096) or b'{"descriptor": "the other process died", "legacy": ""}')
    return stated


def look(driver: Driver) -> dict[str, Any]:
    """Return what the driver reports of each GPU, and who reaches whose memory."""
    count = driver.count()
    gpus = [{name: _attribute(driver, each, number) for name, number in ATTRIBUTES.items()} for each in range(count)]
    reach = [[driver.reaches(one, other) or one == other for other in range(count)] for one in range(count)]
    return {"gpus": gpus, "reach": reach}


def _attribute(driver: Driver, ordinal: int, number: int) -> int:
    try:
        return driver.attribute(ordinal, number)
    except DeviceError:  # an attribute that is newer than the driver
        return 0


def main() -> None:
    """Fork the other process, ask, print the answer."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        visit(theirs)
        os._exit(0)
    theirs.close()
    stated: dict[str, Any] = {}
    try:
        driver = open_driver()
        stated = look(driver)
        if stated["gpus"]:
            stated["sharing"] = share(driver, ours)
    except (DeviceError, OSError, AttributeError) as error:
        stated["error"] = str(error)
    finally:
        ours.close()
        os.waitpid(child, 0)
    print(json.dumps(stated))


if __name__ == "__main__":
    main()

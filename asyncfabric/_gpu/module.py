"""Module: kernels as PTX, compiled by the driver for the current context; Function: one of them, launched on a stream.

Any thread on which the module's context is current.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

from asyncfabric._gpu.driver import Driver

DYNAMIC_SHARED_BYTES, SHARED_SHARE = 8, 9
"""Numbers of CUfunction_attribute."""


class Function:
    """A kernel of a loaded module."""

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        """Use a CUfunction; `Module.function` makes them."""
        self._driver = driver
        self._handle = handle
        self._shared_bytes = 0

    def reserve_shared(self, length_bytes: int, share_percent: int) -> None:
        """Give each block of later launches shared memory.

        Args:
            length_bytes: of a block, beyond what the kernel declares.
            share_percent: of the multiprocessor's fast memory that is shared memory while the kernel runs.

        Raises:
            DeviceError: the device has too little.
        """
        self._driver.call("cuFuncSetAttribute", self._handle, DYNAMIC_SHARED_BYTES, length_bytes)
        self._driver.call("cuFuncSetAttribute", self._handle, SHARED_SHARE, share_percent)
        self._shared_bytes = length_bytes

    def launch(self, grid: tuple[int, int], threads: int, stream: int, arguments: Sequence[Any]) -> None:
        """Launch it; the values of the arguments are read before this returns.

        Args:
            grid: blocks in x and in y.
            threads: of a block.
            stream: its CUstream as a number; 0 is the default stream of the current context.
            arguments: objects of ctypes, in the order of the kernel's parameters.

        Raises:
            DeviceError: the driver refuses.
        """
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        shape = (*grid, 1, threads, 1, 1)
        self._driver.call("cuLaunchKernel", self._handle, *shape, self._shared_bytes, c_void_p(stream), pointers, None)


class Module:
    """Kernels loaded into the context that is current. The driver loads no code while a kernel spins."""

    def __init__(self, driver: Driver, text: bytes) -> None:
        """Let the driver compile PTX.

        Raises:
            DeviceError: it does not compile it.
        """
        self._driver = driver
        self._handle = c_void_p()
        driver.call("cuModuleLoadData", byref(self._handle), text)

    def function(self, name: str) -> Function:
        """Return a kernel by its name.

        Raises:
            DeviceError: there is none of that name.
        """
        found = c_void_p()
        self._driver.call("cuModuleGetFunction", byref(found), self._handle, name.encode())
        return Function(self._driver, found)

    def unload(self) -> None:
        """Unload it; no kernel of it may run any more."""
        self._driver.call("cuModuleUnload", self._handle)

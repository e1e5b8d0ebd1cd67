"""The door to the binding of CUDA's driver, for programs that measure, try or show a GPU with kernels of their own.

Blocking ctypes calls; libcuda is opened by `open_driver`, so that importing this needs no GPU. No logic here.
"""

from asyncfabric._gpu import Driver, Module, memory, open_driver

__all__ = ["Driver", "Module", "memory", "open_driver"]

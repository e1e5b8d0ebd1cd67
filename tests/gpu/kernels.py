"""Kernels of the tests, compiled where they run: what stores to a watch word, and what waits for a counter's flag.

Through cupy's compiler, since torch has none that is small. A machine without it skips, loudly.
"""

from __future__ import annotations

from typing import Any

import pytest

SOURCE = r"""
extern "C" __global__ void bump(volatile unsigned long long* word, unsigned long long value) {
  __threadfence_system();
  *word = value;
}
extern "C" __global__ void wait_then_store(volatile unsigned long long* flag, unsigned long long first,
                                           volatile unsigned long long* word, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    while (*flag < first + i) {}
    __threadfence_system();
    *word = first + i;
  }
}
extern "C" __global__ void wait_then_copy(volatile unsigned long long* flag, unsigned long long target,
                                          const int* source, int* out, int count) {
  while (*flag < target) {}
  __threadfence_system();
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = ((volatile const int*) source)[i];
}
extern "C" __global__ void occupy(volatile unsigned long long* flag, unsigned long long target) {
  while (*flag < target) {}
}
"""


def kernel(name: str) -> Any:
    """Return a kernel that is compiled and loaded: the driver loads no code while another kernel spins."""
    cupy = pytest.importorskip("cupy", reason="THE KERNEL TESTS NEED cupy: nothing was run")
    found = cupy.RawKernel(SOURCE, name)
    words = cupy.ones(16, dtype=cupy.uint64)
    at = words.data.ptr
    arguments = {
        "bump": (at, cupy.uint64(1)),
        "wait_then_store": (at, cupy.uint64(1), at + 64, cupy.int32(1)),
        "wait_then_copy": (at, cupy.uint64(1), at, at + 64, cupy.int32(1)),
        "occupy": (at, cupy.uint64(1)),
    }
    found((1,), (1,), arguments[name])
    cupy.cuda.get_current_stream().synchronize()
    return found


def on_stream(stream: Any) -> Any:
    """Make cupy launch on a torch stream: a context manager."""
    import cupy

    return cupy.cuda.Stream.from_external(stream)

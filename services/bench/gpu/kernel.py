"""A kernel that answers the host: it waits until a word holds the next number, then stores that number to another word.

PTX, so that a bench needs no CUDA compiler: the driver compiles it. Made from
    for (i = 0; i < rounds; ++i) { while (*flag < first + i) {} __threadfence_system(); *word = first + i; }
"""

from __future__ import annotations

import ctypes

from asyncfabric.bench.gpu_driver import Module, open_driver

ECHO = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry echo(.param .u64 flag, .param .u64 first, .param .u64 word, .param .u32 rounds)
{
  .reg .pred %p<4>;
  .reg .b32 %r<3>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [first];
  ld.param.u64 %rd3, [word];
  ld.param.u32 %r1, [rounds];
  mov.u32 %r2, 0;
next:
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 bra done;
spin:
  ld.volatile.global.u64 %rd4, [%rd1];
  setp.lt.u64 %p2, %rd4, %rd2;
  @%p2 bra spin;
  membar.sys;
  st.volatile.global.u64 [%rd3], %rd2;
  add.s64 %rd2, %rd2, 1;
  add.s32 %r2, %r2, 1;
  bra next;
done:
  ret;
}
"""


class EchoKernel:
    """The kernel, loaded into the context that is current. The driver loads no code while another kernel spins."""

    def __init__(self) -> None:
        """Load it.

        Raises:
            DeviceError: the driver refuses.
        """
        self._echo = Module(open_driver(), ECHO).function("echo")

    def start(self, flag: int, first: int, word: int, rounds: int, stream: int) -> None:
        """Launch: addresses of two host words that the GPU reaches, the first number, how many, a stream's handle."""
        values = (ctypes.c_uint64(flag), ctypes.c_uint64(first), ctypes.c_uint64(word), ctypes.c_uint32(rounds))
        self._echo.launch((1, 1), 1, stream, values)

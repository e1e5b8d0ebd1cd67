"""The child of ptrace.py: writes the word that it is given into its parent's memory, and prints what went wrong."""

from __future__ import annotations

import ctypes
import os
import sys


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def main() -> None:
    """Read an address and a word, write."""
    address, word = sys.stdin.readline().split()
    libc = ctypes.CDLL(None, use_errno=True)
    text = ctypes.create_string_buffer(word.encode(), len(word))
    local = _Span(ctypes.addressof(text), len(word))
    remote = _Span(int(address), len(word))
    if libc.process_vm_writev(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != len(word):
        print(os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()

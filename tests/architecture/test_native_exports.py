"""What the loader sees of the extension: nothing that could mix with another library of the process.

A C++ runtime that is linked statically, as some toolchains do, is a second copy beside torch's. Were its symbols
visible, the two would share some tables and not others: reading a number from a stream ended the process by SIGSEGV.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

_engine = pytest.importorskip("asyncfabric._native._engine", reason="reads the compiled engine: make build")


def test_only_what_python_calls_is_visible() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("THE EXTENSION'S SYMBOLS WERE NOT READ: no nm here")
    listed = subprocess.run([nm, "-D", "--defined-only", _engine.__file__], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == {"PyInit__engine"}

"""The `asyncfabric` command ends with its own status, whatever torch's threads still do."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A worker thread of trio is such a thread: it drops the tensors of its last call after it returned the result.
PROGRAM = """
import threading, torch

def work():
    tensor = torch.ones(64, 64)
    while True:
        product = tensor @ tensor
        del product
        busy.set()

busy = threading.Event()
threading.Thread(target=work, daemon=True).start()
busy.wait()
from asyncfabric_services.cli import main
main()
"""


@pytest.mark.parametrize(("arguments", "status"), [(("--version",), 0), (("no-such-command",), 2)])
def test_a_thread_that_holds_tensors_does_not_abort_it(arguments: tuple[str, ...], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert done.stdout if status == 0 else "no-such-command" in done.stderr

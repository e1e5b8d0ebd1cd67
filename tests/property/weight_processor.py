"""The device of GPUs in host memory, with its kernels compiled for a processor; wants torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncfabric.weights.memory.gpu import kernels
from asyncfabric.weights.memory.gpu.device import TorchDevice


class OnProcessor(TorchDevice):
    """The device of GPUs in host memory, with its kernels.

    Attributes:
        launched: names of the kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("cpu")
        self.launched: list[str] = []

        def launch(name: str, grid: tuple[int, int], arguments: list[Any]) -> None:
            self.launched.append(name)
            run = getattr(library, f"run_{name}")
            wide = min(grid[0], 9)  # grids may have any size: small ones are quick here
            if name.startswith(("whole", "lay")):
                run(*arguments, grid[0])  # but a block for each tile
            elif name == "bring":
                run(*arguments, grid[0])
            else:
                run(*arguments, wide, grid[1]) if name == "sums" else run(ctypes.byref(arguments[0]), wide)

        self._kernels = kernels.WeightKernels(self._device, launch)


def kernels_on_processor(folder: Path) -> ctypes.CDLL:
    """Compile them."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("THE KERNELS OF WEIGHTS WERE NOT RUN: no c++ here")
    made = folder / "kernels.so"
    source = Path(__file__).with_name("kernels_on_processor.cc")
    flags = ["-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
    subprocess.run([compiler, *flags, "-o", made, source], check=True, timeout=200)
    return ctypes.CDLL(str(made))

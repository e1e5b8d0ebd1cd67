"""Faults planted in the kernels of an exchange, each built and tested: who sees it. `python planted.py [NAME...]`.

Needs nvcc; faults of order need no GPU. A fault that no test fails on is an error, and so is one whose place is no
longer in the source. As many processes as `--together=N` states try them, each its share, one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import FAULTS, ORDER

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "asyncfabric/moe/gpu/_generated/kernels.ptx"
MOST_FAILURES, DEADLINE_S = 2, 4.0


def build(number: int, folder: Path) -> None:
    """Compile kernels that have a fault, into a copy of the sources."""
    fault, root = FAULTS[number], folder / f"{number}"
    shutil.copytree(ROOT / "native/cuda", root / "native/cuda")
    place = root / "native/cuda/moe" / fault.file
    text = place.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: its place is {text.count(fault.right)} times in {fault.file}")
    place.write_text(text.replace(fault.right, fault.wrong))
    subprocess.run([sys.executable, root / "native/cuda/embed.py"], check=True)  # into the root of the copy


class Failures:
    """A plugin of pytest that keeps the names of tests that failed."""

    def __init__(self) -> None:
        """None yet."""
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed when it was called."""
        if report.when == "call" and report.failed:
            self.names.append(report.nodeid.split("::")[-1])


def try_one(number: int, kernels: Path) -> bool:
    """Run the tests of a fault with its kernels, in this process; return whether one failed."""
    import nvlink_fixture

    from asyncfabric.moe.gpu import launch

    fault, failures, begin, text = FAULTS[number], Failures(), time.monotonic(), kernels.read_bytes()
    launch.kernel_text = lambda: text
    nvlink_fixture.DEADLINE_S = DEADLINE_S
    arguments = [
        "-q",
        "-p",
        "no:benchmark",
        f"--maxfail={MOST_FAILURES}",
        "--tb=no",
        "--no-header",
        "-p",
        "no:warnings",
    ]
    chosen = fault.chosen if fault.tests == ORDER else f"trio and ({fault.chosen})"
    code = pytest.main([*arguments, fault.tests, "-k", chosen], plugins=[failures])
    verdict = "seen" if failures.names else f"NOT SEEN (pytest: {code})"
    print(f"\n{verdict}: {fault.name}: {', '.join(failures.names)} ({time.monotonic() - begin:.0f} s)", flush=True)
    return bool(failures.names)


def work(folder: Path, numbers: list[int]) -> int:
    """Try some faults; return how many were not seen. A GPU that a fault broke is left by starting anew."""
    import torch

    missed = 0
    for place, number in enumerate(numbers):
        missed += not try_one(number, folder / f"{number}" / KERNELS)
        try:
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            print(f"starting anew: {error}", flush=True)
            rest = [str(each) for each in numbers[place + 1 :]]
            return missed + subprocess.call([sys.executable, __file__, f"--work={folder}", *rest])
    return missed


def main(arguments: list[str]) -> int:
    """Try all faults, or those whose names contain one of the arguments; return how many were not seen."""
    options = dict(each[2:].split("=") for each in arguments if each.startswith("--"))
    words = [each for each in arguments if not each.startswith("--")]
    os.chdir(ROOT)
    sys.path.insert(0, str(Path(__file__).parent))
    if "work" in options:
        return work(Path(options["work"]), [int(word) for word in words])
    chosen = [n for n, fault in enumerate(FAULTS) if not words or any(word in fault.name for word in words)]
    together = int(options.get("together", "1"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: build(number, Path(folder)), chosen))
        shares = [chosen[first::together] for first in range(together)]
        command = [sys.executable, __file__, f"--work={folder}"]
        missed = sum(pool.map(lambda share: subprocess.call([*command, *map(str, share)]), filter(None, shares)))
    print(f"{len(chosen) - missed} of {len(chosen)} faults were seen")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

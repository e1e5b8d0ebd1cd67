"""Faults planted in the kernels of an exchange, each built and tested: who sees it. `python planted.py [NAME...]`.

Needs nvcc. A fault that no test fails on is an error, and so is one whose place is no longer in the source. As many
processes as `--together=N` says try them, each its share, one after the other.
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
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVLINK, PROXIED = "tests/gpu/test_nvlink_moe.py", "tests/gpu/test_proxied_moe.py"
MOST_FAILURES, DEADLINE_S = 2, 4.0


class Fault(NamedTuple):
    """A line of a kernel that is made wrong, and the tests that look for it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    chosen: str


FAULTS = (
    Fault(
        "the last token of all is not taken",
        "dispatch.cuh",
        "number < most * ex.ranks;",
        "number + 1 < most * ex.ranks;",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "a token is loaded before it has come",
        "dispatch.cuh",
        "const bool came = !far || packed || load_acquire(word) == step;",
        "const bool came = true;",
        NVLINK,
        "slow or 7168",
    ),
    Fault(
        "any step's word will do",
        "words.cuh",
        "return load_acquire(word) == step;",
        "return load_acquire(word) != 0;",
        NVLINK,
        "many_steps or graph or slow",
    ),
    Fault(
        "a token is read from its neighbour's slot",
        "dispatch.cuh",
        "in<char>(ex, item.source, step, ex.slots) + static_cast<uint64_t>(place) * ex.slot_bytes",
        "in<char>(ex, item.source, step, ex.slots) + static_cast<uint64_t>(place ^ 1) * ex.slot_bytes",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "weights of two choices change places",
        "combine.cuh",
        "__shfl_sync(kAll, pair.weight, choice)",
        "__shfl_sync(kAll, pair.weight, choice ^ 1)",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "sums are added up the other way round the circle",
        "combine.cuh",
        "const uint32_t rank = (ex.rank + far) % ex.ranks;",
        "const uint32_t rank = (ex.rank + ex.ranks - far) % ex.ranks;",
        NVLINK,
        "float32",
    ),
    Fault(
        "products are not rounded before they are added",
        "combine.cuh",
        "__fadd_rn(sums[c][e], __fmul_rn(values[e], weights[i]))",
        "__fmaf_rn(values[e], weights[i], sums[c][e])",
        NVLINK,
        "plain or many_steps",
    ),
    Fault(
        "nobody waits for those who read late",
        "combine.cuh",
        "if (blockIdx.x == 0 && number == 0)\n      await(",
        "if (blockIdx.x == 0 && number == 99)\n      await(",
        NVLINK,
        "nobody_sends",
    ),
    Fault(
        "padding is left as it was",
        "dispatch.cuh",
        "  clear_padding(ex, go, steps[1], first, stride, places);\n",
        "",
        NVLINK,
        "alignment",
    ),
    Fault("the count is not read", "route.cuh", "if (go.count == nullptr) return", "return", NVLINK, "count_is_read"),
    Fault(
        "scales of the token before",
        "dispatch.cuh",
        "go.scales[static_cast<uint64_t>(token) * ex.scales + i]",
        "go.scales[static_cast<uint64_t>(token ^ (token + 1 < tokens)) * ex.scales + i]",
        NVLINK,
        "scale_block or many_steps",
    ),
    Fault(
        "a sum's word is stored without a fence",
        "combine.cuh",
        "store_release(out<uint32_t>(ex, source, step, ex.back_words) + token * ex.parts + number, step);",
        "static_cast<volatile uint32_t*>(out<uint32_t>(ex, source, step, ex.back_words))"
        "[token * ex.parts + number] = step;",
        NVLINK,
        "7168 or 5120 or 6144",
    ),
    Fault(
        "the gate does not wait for rows that came apart",
        "gate.cuh",
        "if (!await_arrival(ex, more, kRest,",
        "if (!await_arrival(ex, false, kRest,",
        PROXIED,
        "private_tokens",
    ),
    Fault(
        "packed rows are counted on from step to step",
        "gate.cuh",
        "      ex.state->packed[rank] = 0;\n",
        "",
        PROXIED,
        "many_steps or graph or plain",
    ),
    Fault(
        "the proxy is told before all is packed",
        "gate.cuh",
        "store_release(ex.told[go.back], step);",
        "store_release(ex.told[go.back], step + 1);",
        PROXIED,
        "many_steps or graph or private_tokens",
    ),
    Fault(
        "sums are packed in the order of tokens",
        "combine.cuh",
        "packed ? go.places[static_cast<uint64_t>(ex.ranks) * ex.max_tokens + slot] : token;",
        "token;",
        PROXIED,
        "many_steps or private_tokens or without_tokens",
    ),
    Fault(
        "a token's word leaves before the token",
        "dispatch.cuh",
        "    if (sends) {\n      wait_stores();\n      fence_copies();\n    }\n",
        "",
        NVLINK,
        "slow or 7168 or prefill",
    ),
)


def build(number: int, folder: Path) -> Path:
    """Compile kernels that have a fault."""
    fault, sources = FAULTS[number], folder / f"{number}"
    shutil.copytree(ROOT / "native/cuda", sources)
    place = sources / "moe" / fault.file
    text = place.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: its place is {text.count(fault.right)} times in {fault.file}")
    place.write_text(text.replace(fault.right, fault.wrong))
    compiled, carried = folder / f"{number}.out", folder / f"{number}.ptx"
    subprocess.run(
        ["nvcc", "-std=c++17", "-ptx", "-arch=compute_90", "-o", compiled, sources / "moe/kernels.cu"], check=True
    )
    subprocess.run([sys.executable, sources / "embed.py", compiled, "8.3", carried], check=True)
    return carried


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
    import nvlink_scene

    from asyncfabric.moe.nvlink import launch

    fault, failures, begin, text = FAULTS[number], Failures(), time.monotonic(), kernels.read_bytes()
    launch.kernel_text = lambda: text
    nvlink_scene.DEADLINE_S = DEADLINE_S
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
    code = pytest.main([*arguments, fault.tests, "-k", f"trio and ({fault.chosen})"], plugins=[failures])
    verdict = "seen" if failures.names else f"NOT SEEN (pytest: {code})"
    print(f"\n{verdict}: {fault.name}: {', '.join(failures.names)} ({time.monotonic() - begin:.0f} s)", flush=True)
    return bool(failures.names)


def work(folder: Path, numbers: list[int]) -> int:
    """Try some faults; return how many were not seen. A GPU that a fault broke is left by starting anew."""
    import torch

    missed = 0
    for place, number in enumerate(numbers):
        missed += not try_one(number, folder / f"{number}.ptx")
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

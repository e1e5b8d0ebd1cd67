"""`make gpu`: everything that needs a GPU, on a machine that may have no network; writes a report as text and JSON.

Usage: python tests/gpu/run.py [FOLDER]. Builds in place with the Python that runs it, which needs torch with CUDA, cupy
for the kernels of the tests, and the packages of pyproject.toml. What is missing is left out and named in the report.

ASYNCFABRIC_GPU_PARTS names the parts to run, of PARTS; those of DEFAULT_PARTS where it is not set. Figures are taken
alone, tests of exchanges and those that run alone one after the other, the latter named, and the rest side by side
where there are cores for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gpu-report").resolve()
STEPS: list[dict[str, Any]] = []
PRINTING = threading.Lock()
GPU_GIB = """
from torch import cuda
print(*(cuda.get_device_properties(gpu).total_memory >> 30 for gpu in range(cuda.device_count())))
"""
WORKER_GIB = 13  # of a GPU, for a worker of pytest and the processes that its tests start
CORES_A_LANE = 8  # tests of several processes, whose references in torch have four threads each
ASYNCFABRIC = (sys.executable, "-m", "asyncfabric_services")
QUICK = ("--region", "512MiB", "--duration", "0.2s", "--deadline", "300s")
BUSY = ("--polling", "busy", "--spin", "300us")
AWAKE = ("--polling", "busy", "--spin", "2ms")  # longer than a list of 10,000 pages takes: its end is met awake
PAGES = ("pages", "--page-bytes", "32KiB", *AWAKE)
WEIGHTS = ("weights", "--trainers", "HALF", "--rollouts", "HALF", "--side", "8192")  # HALF: of the GPUs
BENCHES: tuple[tuple[int, str, tuple[str, ...]], ...] = (  # GPUs that it takes, name, arguments
    (1, "write", ("write", "--size", "4KiB,16MiB,256MiB", *BUSY)),
    (1, "1,024 pages", (*PAGES, "--pages", "1024")),
    (1, "1,024 pages, 8 in flight", (*PAGES, "--pages", "1024", "--window", "8")),
    (1, "10,000 pages", (*PAGES, "--pages", "10000")),
    (1, "kv", ("kv", "--layers", "32", "--chunks", "8", "--pages", "16384", "--page-bytes", "32KiB", *BUSY)),
    (1, "notify", ("notify", *BUSY)),
    (2, "mesh", ("mesh", "--size", "16MiB,64MiB,256MiB")),
    (1, "weights as they are", (*WEIGHTS, "--model", "8GiB", "--form", "copy")),
    (1, "weights to float8", (*WEIGHTS, "--model", "8GiB", "--form", "fp8")),
    (2, "weights to float8, 30 GB", (*WEIGHTS, "--model", "28GiB", "--form", "fp8")),
    (2, "moe", ("moe",)),
    (2, "moe apart", ("moe", "--apart")),
    (4, "moe by nodes of 2", ("moe", "--node-size", "2")),
    (8, "moe by nodes of 4", ("moe", "--node-size", "4")),
)
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark")
DMA_BUFS = "--gtest_filter=DmaBuf*"
PARTS = ("figures", "vllm", "tests", "conformance", "sanitized", "planted")
DEFAULT_PARTS = "figures tests conformance"  # `vllm` wants vLLM 0.26, `sanitized` and `planted` the tools of CUDA
VLLM_PAIR = ("--equal", "20", "--load", "5", "--kills", "4")
VLLM_NODES = ("--equal", "20", "--kills", "20", "--limit", "200")
SANITIZED = (
    ("page lists", sys.executable, "tests/gpu/sanitized_pages.py"),
    ("words and flags", sys.executable, "tests/gpu/sanitized_words.py"),
)


def step(name: str, *command: str, limit_s: float = 600, needed: bool = False) -> bool:
    """Run one step, keep its output in a file and its last lines in the report."""
    begin = time.monotonic()
    paths = [str(ROOT), str(OUT / "path"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "4", "PYTHONFAULTHANDLER": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    log = OUT / (re.sub(r"\W+", "-", name) + ".txt")
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 124
            end_all_of(process.pid, signal.SIGABRT)  # each Python among them prints where it is
            time.sleep(2)
        finally:
            end_all_of(process.pid, signal.SIGKILL)
    lines = log.read_text(errors="replace").splitlines()
    seconds = round(time.monotonic() - begin, 1)
    with PRINTING:
        STEPS.append({"name": name, "code": code, "seconds": seconds, "end": lines[-40:]})
        print(f"== {name}: {' '.join(command)}", *(line[:200] for line in lines[-25:]), sep="\n")
        print(f"-- {name}: {'ok' if code == 0 else f'FAILED ({code})'} in {seconds} s", flush=True)
    if needed and code:
        finish()
    return code == 0


def end_all_of(session: int, how: signal.Signals) -> None:
    """End what a step left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, how)


def rows_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON rows among the lines of a bench."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def figure_of(row: dict[str, Any]) -> str:
    """Return one row in a line."""
    rate, ratio = row["gbytes_per_s"]["median"], row.get("ratio")
    what = (
        f"{row['bench']:6s} {row['figure']:20s} {row['bytes']:>10d} B x {row['pages']:<6d} window {row['window']:<3d}"
    )
    against = f"{ratio:6.3f} of {row['limit']}" if ratio is not None else row.get("limit", "")
    return f"{what} {rate:8.1f} GB/s  p50 {row['p50_us'] or 0:9.2f} us  p99 {row['p99_us'] or 0:9.2f} us  {against}"


def left_out(name: str, why: str) -> None:
    """Print what was not run."""
    with PRINTING:
        STEPS.append({"name": name, "code": None, "seconds": 0, "end": [why]})
        print(f"== {name}: LEFT OUT: {why}", flush=True)


def finish() -> None:
    """Write the report and end with 1 if anything failed."""
    rows = [row for path in sorted(OUT.glob("bench-*.txt")) for row in rows_of(path.read_text(errors="replace"))]
    report = {"steps": STEPS, "figures": rows}
    (OUT / "report.json").write_text(json.dumps(report, indent=1))
    lines = [
        f"{'left out' if s['code'] is None else 'ok' if s['code'] == 0 else 'FAILED':9s} {s['name']} ({s['seconds']} s)"
        for s in STEPS
    ]
    lines += [figure_of(row) for row in rows]
    (OUT / "report.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(1 if any(s["code"] for s in STEPS) else 0)


@cache
def gpu_memory() -> tuple[int, ...]:
    """Return the GiB of each GPU that a process sees here; asked once, since torch takes seconds to load."""
    found = subprocess.run([sys.executable, "-c", GPU_GIB], capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split()))


def installed(package: str) -> bool:
    """Return whether the Python of all steps, which is this one, finds a package."""
    return importlib.util.find_spec(package) is not None


def spread(*arguments: str) -> tuple[str, ...]:
    """Return the command of some tests, on as many processes as the GPUs have memory for."""
    workers = max(1, min(8, sum(gpu_memory()) // WORKER_GIB))
    processes = ("-n", str(workers), "--dist", "worksteal") if installed("xdist") else ()
    return (*PYTEST, *processes, *arguments)


def exchanges() -> None:
    """Run the tests whose ranks wait for each other on a GPU, one after the other."""
    step("exchanges", *PYTEST, "--durations=15", "tests/gpu", "-m", "exchange", limit_s=600)


def tests() -> None:
    """Run the other tests of this folder that share the GPUs."""
    step("tests", *spread("tests/gpu", "-m", "not alone and not exchange", "--durations=15"), limit_s=900)


def tests_alone() -> None:
    """Run those that need all of a GPU, one after the other, and name each."""
    chosen = ("tests/gpu", "-m", "alone and not exchange")
    step("tests that run alone", *PYTEST, "-rA", "--durations=8", *chosen, limit_s=300)


def demo() -> None:
    """Run the demo on GPUs."""
    step("demo", *ASYNCFABRIC, "demo", "--device", "cuda")


def conformance() -> None:
    """Run the conformance suite over the rail of GPUs."""
    step("conformance", *spread("tests/conformance", "-k", "cuda"), limit_s=900)


def dma_bufs() -> None:
    """Run the native tests that export memory of a GPU."""
    if Path("/usr/include/gtest/gtest.h").exists():
        build = "cd native && cmake --preset release && cmake --build --preset release --target base_tests"
        step("dma-bufs", "bash", "-c", f"{build} && ../build/native-release/base_tests {DMA_BUFS}", limit_s=1200)
    else:
        left_out("dma-bufs", "googletest is not installed")


def sanitized(tool: str) -> None:
    """Run the kernels under one tool of compute-sanitizer."""
    if not shutil.which("compute-sanitizer"):
        left_out(tool, "compute-sanitizer is not here")
        return
    sanitizer = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
    if tool != "synccheck":
        for what, *command in SANITIZED:
            step(f"{tool} of {what}", *sanitizer, *command)
    for path in ("nvlink", "proxied", "nodes"):
        for case in ("decode", "prefill"):
            steps = (sys.executable, "tests/gpu/sanitized_moe.py", path, case)
            step(f"{tool} of MoE, {path}, {case}", *sanitizer, "--target-processes", "all", *steps)


def planted() -> None:
    """Plant faults in kernels and see who finds them."""
    if shutil.which("nvcc"):
        step("planted faults", sys.executable, "tests/gpu/planted.py", limit_s=1200)
    else:
        left_out("planted faults", "no nvcc here")


def side_by_side(*lanes: Sequence[Callable[[], None]]) -> None:
    """Run what is not timed: the steps of a lane in order, as many lanes at once as the cores are enough for."""

    def run(lane: Sequence[Callable[[], None]]) -> None:
        for one in lane:
            one()

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_A_LANE)) as pool:
        list(pool.map(run, lanes))


def figures() -> None:
    """Take the figures, each alone on the machine."""
    gpus = len(gpu_memory())
    half = str(max(1, gpus // 2))
    for needed, name, arguments in BENCHES:
        if gpus < needed:
            left_out(f"bench {name}", f"it takes {needed} GPUs, here are {gpus}")
        else:
            given = [half if each == "HALF" else each for each in arguments]
            step(f"bench {name}", *ASYNCFABRIC, "bench", *given, "--device", "cuda", "--json", *QUICK, limit_s=120)


def vllm() -> None:
    """Run prefill and decode engines of vLLM by each connector that is installed, and nodes of a cluster with them."""
    if not installed("vllm"):
        left_out("vllm", "it cannot be imported here")
        return
    modes = ["connector", "face"]
    if installed("nixl"):
        modes.append("nixl")
    else:
        left_out("vllm over NIXL", "nixl cannot be imported here")
    step("vllm pair", sys.executable, "tests/gpu/vllm_pair.py", *modes, *VLLM_PAIR, limit_s=600)
    step("vllm nodes", sys.executable, "tests/gpu/vllm_nodes.py", *VLLM_NODES, limit_s=500)
    step("vllm weights", sys.executable, "tests/gpu/programs/vllm_weights.py", limit_s=600)


def main() -> None:
    """Build, check, measure, report."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "path").mkdir(exist_ok=True)
    services = OUT / "path" / "asyncfabric_services"  # as pip would install it
    if not services.exists():
        services.symlink_to(ROOT / "services")
    with ThreadPoolExecutor(1) as beside:  # the driver takes half a minute to wake up
        if shutil.which("nvidia-smi"):
            beside.submit(step, "machine", "nvidia-smi", "topo", "-m")
        step("build", sys.executable, "setup.py", "-q", "build_ext", "--inplace", needed=True)
    step("doctor", *ASYNCFABRIC, "doctor", "--provider", "cuda", "--provider", "local")
    step("topo", *ASYNCFABRIC, "topo")
    parts = os.environ.get("ASYNCFABRIC_GPU_PARTS", DEFAULT_PARTS).split()
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"ASYNCFABRIC_GPU_PARTS: {sorted(unknown)} are none of {PARTS}")
    if "figures" in parts:
        figures()
    if "vllm" in parts:
        vllm()
    tools = [partial(sanitized, tool) for tool in ("memcheck", "racecheck", "synccheck")]
    lanes: list[Sequence[Callable[[], None]]] = [
        [exchanges] * ("tests" in parts) + [conformance] * ("conformance" in parts),
        [dma_bufs, demo] * ("conformance" in parts) + [tests] * ("tests" in parts),
        *([tool] for tool in tools if "sanitized" in parts),
        [planted] * ("planted" in parts),
    ]
    side_by_side(*lanes)
    if "tests" in parts:
        tests_alone()
    for part in sorted(set(PARTS) - set(parts)):
        left_out(part, f"ask for it by ASYNCFABRIC_GPU_PARTS={part}")
    finish()


if __name__ == "__main__":
    main()

"""`make gpu`: everything that needs a GPU, on a machine that may have no network; writes a report as text and JSON.

Usage: python tests/gpu/run.py [FOLDER]. Builds in place with the Python that runs it, which needs torch with CUDA, cupy
for the kernels of the tests, and the packages of pyproject.toml. What is missing is left out and named in the report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gpu-report").resolve()
STEPS: list[dict[str, Any]] = []
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark")


def step(name: str, *command: str, limit_s: float = 600, needed: bool = False) -> bool:
    """Run one step, keep its output in a file and its last lines in the report."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = OUT / (re.sub(r"\W+", "-", name) + ".txt")
    with log.open("w") as sink:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = log.read_text(errors="replace").splitlines()
    STEPS.append({"name": name, "code": code, "seconds": round(time.monotonic() - begin, 1), "end": lines[-40:]})
    print(
        "\n".join(line[:200] for line in lines[-25:]),
        f"\n-- {name}: {'ok' if code == 0 else f'FAILED ({code})'}",
        flush=True,
    )
    if needed and code:
        finish()
    return code == 0


def left_out(name: str, why: str) -> None:
    """Say what was not run."""
    STEPS.append({"name": name, "code": None, "seconds": 0, "end": [why]})
    print(f"== {name}: LEFT OUT: {why}", flush=True)


def finish() -> None:
    """Write the report and end with 1 if anything failed."""
    figures = OUT / "figures.json"
    report = {"steps": STEPS, "figures": json.loads(figures.read_text()) if figures.exists() else None}
    (OUT / "report.json").write_text(json.dumps(report, indent=1))
    rows = [
        f"{'left out' if s['code'] is None else 'ok' if s['code'] == 0 else 'FAILED':9s} {s['name']} ({s['seconds']} s)"
        for s in STEPS
    ]
    (OUT / "report.txt").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))
    sys.exit(1 if any(s["code"] for s in STEPS) else 0)


def main() -> None:
    """Build, check, measure, report."""
    OUT.mkdir(parents=True, exist_ok=True)
    workers = (
        ("-n", "8")
        if not subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True, check=False).returncode
        else ()
    )
    step("build", sys.executable, "setup.py", "-q", "build_ext", "--inplace", needed=True)
    if shutil.which("nvidia-smi"):
        step("machine", "nvidia-smi", "topo", "-m")
    step("tests", *PYTEST, *workers, "tests/gpu")
    step("conformance", *PYTEST, *workers, "tests/conformance", "-k", "cuda")
    step("figures", sys.executable, "tests/gpu/figures.py", str(OUT / "figures.json"))
    if shutil.which("compute-sanitizer"):
        pages = "test_writes_reads_and_pages and trio and allocated-allocated"
        step(
            "memcheck",
            "compute-sanitizer",
            "--error-exitcode",
            "9",
            *PYTEST,
            "tests/gpu/test_gpu_two_processes.py",
            "-k",
            pages,
        )
        step(
            "racecheck",
            "compute-sanitizer",
            "--tool",
            "racecheck",
            "--error-exitcode",
            "9",
            *PYTEST,
            "tests/gpu/test_gpu_two_processes.py",
            "-k",
            pages,
        )
    else:
        left_out("memcheck", "no compute-sanitizer here")
    finish()


if __name__ == "__main__":
    main()

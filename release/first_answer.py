"""Time the two commands of the README, from a wheel to the first answer of a cluster: `make first-answer`.

Installs a wheel of dist/ for the Python that runs this, in a fresh environment: a new home, an empty cache, and no
program on the path but those of the environment, so no compiler. Fails when the first answer takes MOST_SECONDS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 180.0
FIRST = "first answer"
KEPT = ("PIP_", "SSL_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy", "LANG")
"""Beginnings of the variables by which pip reaches its index, and of nothing that has to do with us."""


def environment_of(folder: Path) -> dict[str, str]:
    """Make an environment for Python in a folder, and return the variables of a user who has nothing else."""
    venv.create(folder / "venv", with_pip=True)
    (folder / "home").mkdir()
    path = str(folder / "venv" / "bin")
    compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang", "ccache") if shutil.which(name, path=path)]
    assert not compilers, f"{path} has {compilers}"
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    return kept | {"HOME": str(folder / "home"), "PATH": path, "TMPDIR": str(folder)}


def answered_after(command: list[str], environment: dict[str, str]) -> float:
    """Run the demo to its end, show what it prints, and return the seconds until its first answer."""
    began, first = time.monotonic(), 0.0
    with subprocess.Popen(command, env=environment, cwd=environment["HOME"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            print(line, end="", flush=True)
            if FIRST in line and not first:
                first = time.monotonic() - began
    if demo.returncode or not first:
        sys.exit(f"{' '.join(command)} ended with {demo.returncode}, and {'an' if first else 'no'} answer")
    return first


def main() -> None:
    """Install, ask, and report the seconds of both."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = list((ROOT / "dist").glob(f"asyncfabric-*-cp{version.replace('.', '')}-*.whl"))
    if not wheels:
        sys.exit(f"dist/ has no wheel for Python {version}: make wheels VERSIONS={version}")
    with TemporaryDirectory(prefix="af-first-") as folder:
        environment = environment_of(Path(folder))
        programs = Path(environment["PATH"])
        asked = ["install", "-q", "-c", ROOT / "constraints.txt", f"{wheels[0]}[demo]"]
        began = time.monotonic()
        subprocess.run([programs / "pip", *asked], env=environment, cwd=environment["HOME"], check=True)
        installed = time.monotonic() - began
        print(f"pip install: {installed:.1f} s", flush=True)
        answered = answered_after([str(programs / "asyncfabric"), "demo", "kv"], environment)
    total = installed + answered
    print(
        f"first answer after {total:.1f} s: {installed:.1f} s of pip install, {answered:.1f} s of asyncfabric demo kv"
    )
    if total > MOST_SECONDS:
        sys.exit(f"the first answer took more than {MOST_SECONDS:.0f} s")


if __name__ == "__main__":
    main()

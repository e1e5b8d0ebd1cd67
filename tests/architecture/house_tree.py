"""What the architecture tests look at: the files of the repository, without builds, environments and caches.

Runs anywhere; needs no build. Knows nothing of any rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("asyncfabric", "cython_ext", "native", "services", "tests")
CXX = (".h", ".cc", ".cu", ".cuh")
CYTHON = (".pyx", ".pxd", ".pxi")


def source_files(*suffixes: str, under: str | None = None) -> Iterator[Path]:
    """Yield source files with one of the suffixes, in a stable order."""
    for folder in (under,) if under else SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts:
                yield path


def shown(path: Path) -> str:
    """Return a path as people type it."""
    return str(path.relative_to(ROOT))

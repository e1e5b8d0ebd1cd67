"""Rooms stay small: a file past its limit holds a second idea that wants its own file, a folder past it a second room.

Limits in lines: 400 Python, 500 C++ and CUDA, 250 Cython rooms. Packing lines to pass is held by the formatters.
Files that lie directly in a folder: 28 of sources, 40 of tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from house_tree import CXX, CYTHON, ROOT, shown, source_files

LIMITS = {".py": 400, ".pyi": 400} | dict.fromkeys(CXX, 500) | dict.fromkeys(CYTHON, 250)
UNFORMATTED = re.compile(r"# fmt: (?:skip|off)\b")
MOST_UNFORMATTED = 20  # statements of Python that the formatter leaves alone: real tables
WIDEST = 120
MOST_FILES = 28
MOST_TESTS = 40
FULLER = {"asyncfabric/_api": 29}  # still to be cut: a bound for each, which only falls


def test_no_file_is_past_its_limit() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in source_files(*LIMITS)}
    assert len(lines) > 60, "the walk over the sources found next to nothing"
    assert {shown(path): count for path, count in lines.items() if count > LIMITS[path.suffix]} == {}


def too_full(paths: Iterable[Path]) -> dict[str, int]:
    """Return the folders that hold more files directly than they may, with the number.

    A .pxd that types the module beside it is part of that module.
    """
    files = Counter(path.parent for path in paths if path.suffix != ".pxd" or not path.with_suffix(".py").exists())
    most = {
        folder: MOST_TESTS if "tests" in folder.parts else FULLER.get(shown(folder), MOST_FILES) for folder in files
    }
    return {shown(folder): count for folder, count in files.items() if count > most[folder]}


def test_no_folder_is_too_full() -> None:
    assert too_full(source_files(*LIMITS)) == {}


@pytest.mark.parametrize(
    ("folder", "count", "full"),
    [
        ("native/src/engine", MOST_FILES, False),
        ("native/src/engine", MOST_FILES + 1, True),
        ("native/tests/engine", MOST_TESTS, False),
        ("tests/unit", MOST_TESTS + 1, True),
        ("asyncfabric/_api", FULLER["asyncfabric/_api"] + 1, True),
    ],
)
def test_the_check_finds_full_folders(folder: str, count: int, full: bool) -> None:
    paths = [ROOT / folder / f"file_{number}.cc" for number in range(count)]
    assert too_full(paths) == ({folder: count} if full else {})


def unformatted(text: str) -> int:
    """Return how many statements of a source the formatter leaves alone."""
    return len(UNFORMATTED.findall(text))


def test_few_statements_are_kept_from_the_formatter() -> None:
    counted = {shown(path): unformatted(path.read_text()) for path in source_files(".py", ".pyi")}
    found = {name: count for name, count in counted.items() if count}
    assert sum(found.values()) <= MOST_UNFORMATTED, f"run `ruff format` on them, or cut what is packed: {found}"


def test_the_check_sees_what_is_kept_from_the_formatter() -> None:
    assert unformatted("x = f(a,\n      b)  # " + "fmt: skip\n# " + "fmt: off\n") == 2
    assert unformatted("y = 1  # formats: skip\n") == 0


def test_no_line_of_cython_is_too_wide() -> None:
    wide = [
        f"{shown(path)}:{number}"
        for path in source_files(*CYTHON)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDEST
    ]
    assert wide == []

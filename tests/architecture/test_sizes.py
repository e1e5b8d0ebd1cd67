"""Rooms stay small: a file past its limit holds a second idea that wants its own file.

Limits in lines: 400 Python, 500 C++ and CUDA, 250 Cython rooms. Packing lines to pass is held by the formatters.
"""

from __future__ import annotations

from collections import Counter

from house_tree import CXX, CYTHON, shown, source_files

LIMITS = {".py": 400, ".pyi": 400} | dict.fromkeys(CXX, 500) | dict.fromkeys(CYTHON, 250)
WIDEST = 120
MOST_TESTS = 40  # Python files flat in one folder of tests


def test_no_file_is_past_its_limit() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in source_files(*LIMITS)}
    assert len(lines) > 60, "the walk over the sources found next to nothing"
    assert {shown(path): count for path, count in lines.items() if count > LIMITS[path.suffix]} == {}


def test_no_folder_of_tests_is_too_full() -> None:
    files = Counter(shown(path.parent) for path in source_files(".py", under="tests"))
    assert {folder: count for folder, count in files.items() if count > MOST_TESTS} == {}


def test_no_line_of_cython_is_too_wide() -> None:
    wide = [
        f"{shown(path)}:{number}"
        for path in source_files(*CYTHON)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDEST
    ]
    assert wide == []

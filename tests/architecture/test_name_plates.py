"""Each file opens with a name plate of 2 to 12 lines: what lives here, on which thread, what does not belong here.

One-sentence plates are for files under 25 lines and for tests, whose names already say what they check.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house_tree import CXX, CYTHON, ROOT, shown, source_files

LONGEST = 12
SHORT_FILE = 25


def plate_lines(path: Path, text: str) -> int:
    """Return how many lines of name plate a file has, 0 for none."""
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text))
        return len([line for line in docstring.splitlines() if line.strip()]) if docstring else 0
    sign = "//" if path.suffix in CXX else "#"
    count = 0
    for line in text.splitlines():
        if not line.startswith(sign):
            break
        count += not line.startswith(("# cython:", "# distutils:", "#pragma"))
    return count


def fault_of(path: Path, text: str) -> str:
    """Return what is wrong with the plate of a file, "" when nothing is."""
    lines = plate_lines(path, text)
    if lines == 0:
        return "has no name plate"
    if lines > LONGEST:
        return f"has a plate of {lines} lines, at most {LONGEST} are read"
    if lines == 1 and len(text.splitlines()) > SHORT_FILE and "tests" not in path.parts:
        return f"says one line about {len(text.splitlines())} lines of code"
    return ""


def test_each_file_has_a_name_plate() -> None:
    faults = {shown(path): fault_of(path, path.read_text()) for path in source_files(".py", ".pyi", *CXX, *CYTHON)}
    assert {path: fault for path, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "import os\n", "no name plate"),
        ("a.h", "#pragma once\n// late\n", "no name plate"),
        ("a.cc", "// a\n" * 13, "13 lines"),
        ("a.pxi", "# a plate\n" + "x = 1\n" * 40, "one line"),
        ("a.pyx", "# cython: language_level=3\n", "no name plate"),
        ("a.py", '"""Say what lives here."""\n', ""),
    ],
)
def test_the_check_finds_bad_plates(name: str, text: str, fault: str) -> None:
    found = fault_of(ROOT / "native" / name, text)
    assert fault in found if fault else found == ""

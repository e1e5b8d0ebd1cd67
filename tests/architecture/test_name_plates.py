"""Each file opens with a name plate: what lives here, on which thread, what does not belong here; at most 12 lines.

Two lines, or one that fills half of its 120 columns; `see x.h` will do for the other half of a pair whose header has
the plate. Short files and tests, whose names already state what they check, may state less.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from house_tree import CXX, CYTHON, ROOT, shown, source_files

LONGEST = 12
SHORT_FILE = 60  # lines of code that one short sentence can stand for
ONE_LINE = 60  # characters of a plate that holds it all in one line


def plate_of(path: Path, text: str) -> list[str]:
    """Return the lines of a file's name plate, none when there is no plate."""
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        return [line for line in docstring.splitlines() if line.strip()]
    sign = "//" if path.suffix in CXX else "#"
    plate = []
    for line in text.splitlines():
        if not line.startswith(sign):
            break
        if not line.startswith(("# cython:", "# distutils:", "#pragma")):
            plate.append(line)
    return plate


def fault_of(path: Path, text: str) -> str:
    """Return what is wrong with the plate of a file, "" when nothing is."""
    plate = plate_of(path, text)
    lines = len(text.splitlines())
    if not plate:
        return "has no name plate"
    if len(plate) > LONGEST:
        return f"has a plate of {len(plate)} lines, at most {LONGEST} are read"
    if len(plate) > 1 or lines <= SHORT_FILE or "tests" in path.parts:
        return ""
    points_at = re.search(r"\bsee (\w+\.h)\b", plate[0], re.IGNORECASE)
    if points_at is not None and (path.parent / points_at[1]).is_file():
        return ""
    return "" if len(plate[0]) >= ONE_LINE else f"states {len(plate[0])} characters about {lines} lines of code"


def test_each_file_has_a_name_plate() -> None:
    faults = {shown(path): fault_of(path, path.read_text()) for path in source_files(".py", ".pyi", *CXX, *CYTHON)}
    assert {path: fault for path, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "import os\n", "no name plate"),
        ("a.h", "#pragma once\n// late\n", "no name plate"),
        ("a.cc", "// a\n" * 13, "13 lines"),
        ("a.pxi", "# a plate\n" + "x = 1\n" * 80, "9 characters"),
        ("a.cc", "// a.cc: see no_such.h.\n" + "int x;\n" * 80, "characters about"),
        ("a.pyx", "# cython: language_level=3\n", "no name plate"),
        ("a.py", '"""State what lives here."""\n', ""),
    ],
)
def test_the_check_finds_bad_plates(name: str, text: str, fault: str) -> None:
    found = fault_of(ROOT / "native" / name, text)
    assert fault in found if fault else found == ""

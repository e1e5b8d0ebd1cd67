"""Words that have been replaced by the field's own do not come back, in names or in prose."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from house_tree import CXX, CYTHON, ROOT, shown, source_files

INSTEAD = {
    "helm": "engine lock",
    "stairwell": "completion dispatcher",
    "crew": "copy pool",
    "warden": "key revoker",
    "cemetery": "ended-connection table",
    "desk": "admission, handler, queue or store",
    "station": "worker",
    "scene": "fixture, scenario or setup",
    "seating": "rank assignment",
    "attendance": "participants",
    "retelling": "re-report",
}
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def replaced_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and word, where a word of the table is a part of a name or stands by itself."""
    for number, line in enumerate(text.splitlines(), 1):
        for part in PARTS.findall(line):
            word = part.lower()
            if word in INSTEAD or word.removesuffix("s") in INSTEAD:
                yield number, word


def test_replaced_words_do_not_come_back() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    files = [path for path in source_files(".py", ".pyi", ".md", *CXX, *CYTHON) if path.name != "test_words.py"]
    found = [
        f"{shown(path)}:{number}: {word}; say {INSTEAD.get(word) or INSTEAD[word.removesuffix('s')]}"
        for path in (*files, *pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for number, word in (*replaced_words(path.read_text()), *replaced_words(path.name))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["the helm", "class CopyDesk:", "local_crew_test", "STATIONS = 3", "open_scene("])
def test_the_check_finds_them_in_names(text: str) -> None:
    assert list(replaced_words(text))


def test_the_check_lets_longer_words_be() -> None:
    assert not list(replaced_words("a stationary obscene desktop and the screw"))

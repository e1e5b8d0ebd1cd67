"""The page of pitfalls names tests that exist: each is defined in the file that it is listed under."""

from __future__ import annotations

import re

from house_tree import ROOT

PAGE = ROOT / "docs" / "reference" / "pitfalls.md"
NAMED = re.compile(r"`([\w/]+\.(?:py|cc))::(\w+)`")


def missing(text: str) -> list[str]:
    """Return the tests that a page names and nobody has written."""
    absent = []
    for file, name in NAMED.findall(text):
        path = (
            ROOT / file.replace("conformance/", "asyncfabric/testing/conformance/", 1)
            if file.startswith("conformance/")
            else ROOT / file
        )
        defined = rf"def {name}\(" if path.suffix == ".py" else rf"TEST(_P|_F)?\(\w+, {name}\)"
        if not path.is_file() or not re.search(defined, path.read_text()):
            absent.append(f"{file}::{name}")
    return absent


def test_each_pitfall_names_a_test_that_exists() -> None:
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) >= 24
    assert [row for row in rows if not NAMED.search(row)] == []
    assert missing(text) == []


def test_the_check_finds_names_of_nothing() -> None:
    assert missing("`conformance/pages.py::check_no_such_thing`") == ["conformance/pages.py::check_no_such_thing"]
    assert missing("`native/tests/nowhere_test.cc::Test`") == ["native/tests/nowhere_test.cc::Test"]
    assert missing("`conformance/pages.py::check_no_pages`") == []

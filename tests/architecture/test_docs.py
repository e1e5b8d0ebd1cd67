"""The pages hold together: each relative link leads to a file and to a heading that exist, each page has a way in.

Links out of the repository are not followed: tests do not depend on the network.
"""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from house_tree import ROOT, shown

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "native").glob("*.md"),
        *(ROOT / "services").rglob("*.md"),
        *(ROOT / "tests").rglob("*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """Return the anchor that renderers give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page."""
    return {anchor(text) for text in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    bad = []
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        missing_heading = fragment and target.suffix == ".md" and target.is_file() and fragment not in anchors(target)
        if not target.exists() or missing_heading:
            bad.append(link)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_each_page_of_docs_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        names = [link.partition("#")[0] for link in LINK.findall(FENCE.sub("", page.read_text()))]
        waiting += [(page.parent / name).resolve() for name in names if name and not re.match(r"[a-z]+:", name)]
    assert [shown(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in seen] == []


def program(path: str) -> Any:
    """Return a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_show_what_the_tables_hold() -> None:
    draw = program("pictures/draw.py")
    outdated = [name for name, picture in draw.PICTURES.items() if (draw.FOLDER / name).read_text() != picture()]
    assert outdated == [], "run `python docs/pictures/draw.py`"


def test_each_page_stands_in_the_navigation_of_the_site() -> None:
    conf = program("site/conf.py")
    entries = [entry for entries in conf.NAVIGATION.values() for entry in entries]
    stale = [entry for entry in entries if not any(ROOT.glob(f"{entry.replace('**', '**/*')}.md"))]
    names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert stale == []
    assert [name for name in names if not any(fnmatch(name, entry) for entry in entries)] == []


def test_the_reference_is_up_to_date() -> None:
    generate = program("reference/generate.py")
    outdated = [path.name for path, text in generate.pages().items() if not path.exists() or path.read_text() != text]
    assert outdated == [], "run `make docs`"


def test_the_check_finds_broken_links() -> None:
    page = ROOT / "README.md"
    assert broken_links(page, "[a](no_such_file.md) [b](#no-such-heading) [c](LICENSE)") == [
        "no_such_file.md",
        "#no-such-heading",
    ]

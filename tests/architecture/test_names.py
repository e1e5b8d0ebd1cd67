"""Files are nouns, folders are known, and the front of the house stays small.

Needs no build. What may stand at the top of the repository is a decision, so it is listed here by name.
"""

from __future__ import annotations

import subprocess

from house_tree import CXX, CYTHON, ROOT, shown, source_files

FORBIDDEN_WORDS = {"utils", "util", "helpers", "helper", "manager", "common", "misc", "stuff"}
TOP = {
    "pyproject.toml",
    "setup.py",
    "asyncfabric",
    "cython_ext",
    "native",
    "release",
    "services",
    "tests",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    ".ci",
    "docs",
    "constraints.txt",
    "MANIFEST.in",
    ".gitignore",
    ".gitattributes",
}
NATIVE_SOURCES = {"base", "provider", "providers", "engine", "topology", "bench", "rows", "secret"}
PROVIDERS = {"local", "libfabric", "verbs", "cuda", "fault"}


def tracked_top_entries() -> set[str]:
    """Return top-level entries that git knows or would add; a copy without .git lists what is there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return {name.split("/", 1)[0] for name in listed.stdout.split("\0") if name}
    return {path.name for path in ROOT.iterdir()} & TOP


def test_no_file_is_named_after_nothing() -> None:
    bad = [
        shown(path)
        for path in source_files(".py", ".pyi", *CXX, *CYTHON)
        if FORBIDDEN_WORDS
        & {part for folder in path.relative_to(ROOT).parts for part in folder.split(".")[0].split("_")}
    ]
    assert bad == []


def test_the_front_of_the_house_is_as_decided() -> None:
    assert tracked_top_entries() - TOP == set()


def test_native_folders_are_as_decided() -> None:
    source = ROOT / "native" / "src"
    assert {path.name for path in source.iterdir() if path.is_dir()} <= NATIVE_SOURCES
    assert {path.name for path in (source / "providers").iterdir() if path.is_dir()} <= PROVIDERS


def test_files_and_folders_are_snake_case() -> None:
    odd = [shown(path) for path in source_files(".py", *CXX, *CYTHON) if path.stem != path.stem.lower()]
    assert odd == []

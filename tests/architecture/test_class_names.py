"""Class names are unique in asyncfabric and services, so that a name in a traceback or a review means one class.

Two classes may share a name where one base is common to them, and where the table below has the reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from house_tree import shown, source_files

FACES = "the same object for a program of threads: the blocking face has the names of the core"
PROTOCOL = "the protocol that the class of `control` satisfies, so that actors run without sockets"
PUBLIC = "public names of two packages, each with its own meaning there"

SHARED = {
    "Arrival": PROTOCOL,
    "Link": PROTOCOL,
    "SessionChange": PROTOCOL,
    "MessageStream": FACES,
    "_Opening": FACES,
    "Batch": PUBLIC,
    "Gone": PUBLIC,
    "RegionInfo": "the tuple that the compiled border makes, and the public value of the API",
    "Message": PUBLIC,
    "Node": PUBLIC,
    "Stage": PUBLIC,
}
"""Why a name stands more than once."""

Classes = dict[str, list[tuple[str, frozenset[str]]]]


def classes_of(files: Iterable[tuple[str, str]]) -> Classes:
    """Return the classes of (path, text) by name: the path, and the names of the bases."""
    found: Classes = defaultdict(list)
    for path, text in files:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = frozenset(ast.unparse(base).partition("[")[0] for base in node.bases)
                found[node.name].append((path, bases))
    return found


def shared_names(classes: Classes) -> dict[str, list[str]]:
    """Return names of several classes with the paths of these, but for those with a base of ours in common."""
    foreign = {"Protocol", "NamedTuple", "Struct", "msgspec.Struct", "IntEnum", "StrEnum", "Generic", "Message"}
    return {
        name: [path for path, _ in where]
        for name, where in classes.items()
        if len(where) > 1 and not frozenset.intersection(*(bases for _, bases in where)) - foreign
    }


def test_class_names_are_unique() -> None:
    folders = ("asyncfabric", "services")
    paths = [path for folder in folders for path in source_files(".py", under=folder)]
    found = shared_names(classes_of((shown(path), path.read_text()) for path in paths))
    assert {name: where for name, where in found.items() if name not in SHARED} == {}


def test_the_check_finds_a_second_class_of_a_name() -> None:
    files = [("a.py", "class Peer: ...\nclass Side(Face[int]): ...\n"), ("b.py", "class Peer(Protocol): ...\n")]
    assert shared_names(classes_of([*files, ("c.py", "class Side(Face[str]): ...\n")])) == {"Peer": ["a.py", "b.py"]}

"""The files of asyncfabric.weights that each role reaches: few enough to read, and in no circle.

A file reaches what it imports, and what that imports, within asyncfabric.weights. Imports within functions, which wait
for a GPU or for torch, are counted apart; imports under TYPE_CHECKING are not followed. Doors (`__init__.py`) run on
the way to every file and are not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from house_tree import ROOT

PACKAGE = "asyncfabric.weights"
MOST = {"sender.publisher": 30, "receiver.replica": 32, "coordinator.coordinator": 20}
"""Other files that the first file of a role reaches at import."""

MOST_LATER = 8
"""Further files that it reaches by imports within functions: five of GPUs, those of torch's tensors."""

Graph = Mapping[str, tuple[set[str], set[str]]]
"""By file: the files that it imports at once, and those that it imports within functions."""


def imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the modules and names that a file imports at run time, and whether within a function."""

    def walk(body: list[ast.stmt], later: bool) -> Iterator[tuple[str, bool]]:
        for node in body:
            if isinstance(node, ast.Import):
                yield from ((alias.name, later) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((f"{node.module}.{alias.name}", later) for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse, later)
            else:
                inside = later or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for part in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, part, []), inside)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, inside)

    return walk(tree.body, False)


def graph_of(texts: Mapping[str, str]) -> Graph:
    """Return who imports whom among files, by their dotted names and texts."""
    graph: dict[str, tuple[set[str], set[str]]] = {}
    for name, text in texts.items():
        at_once, later = graph[name] = (set(), set())
        for target, inside in imported(ast.parse(text)):
            found = target if target in texts else target.rpartition(".")[0]
            if found in texts and found != name:
                (later if inside else at_once).add(found)
    return graph


def reached(graph: Graph, first: str, later: bool) -> set[str]:
    """Return the other files that one reaches."""
    seen, waiting = {first}, [first]
    while waiting:
        at_once, within = graph[waiting.pop()]
        found = (at_once | within if later else at_once) - seen
        seen |= found
        waiting += found
    return seen - {first}


def in_circles(graph: Graph) -> list[str]:
    """Return the files that reach themselves, with imports within functions too."""
    return [name for name, both in graph.items() if any(name in reached(graph, one, True) for one in set.union(*both))]


@pytest.fixture(scope="module")
def weights() -> Graph:
    folder = ROOT / PACKAGE.replace(".", "/")
    paths: list[Path] = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return graph_of({".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths})


@pytest.mark.parametrize("role", MOST)
def test_a_role_reaches_few_files(weights: Graph, role: str) -> None:
    first = f"{PACKAGE}.{role}"
    at_once, all_ = reached(weights, first, False), reached(weights, first, True)
    assert len(at_once) <= MOST[role], sorted(at_once)
    assert len(all_ - at_once) <= MOST_LATER, sorted(all_ - at_once)


def test_no_files_import_each_other_in_a_circle(weights: Graph) -> None:
    assert len(weights) > 40, "the walk over the sources found next to nothing"
    assert in_circles(weights) == []


def test_the_check_follows_imports() -> None:
    texts = {
        "w.a": "from w.b import x\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from w.d import t\n",
        "w.b": "def f():\n    from w import c\n",
        "w.c": "import w.d\n",
        "w.d": "try:\n    import w.e\nexcept ImportError:\n    from w.b import y\n",
        "w.e": "",
    }
    graph = graph_of(texts)
    assert reached(graph, "w.a", False) == {"w.b"}
    assert reached(graph, "w.a", True) == {"w.b", "w.c", "w.d", "w.e"}
    assert sorted(in_circles(graph)) == ["w.b", "w.c", "w.d"]

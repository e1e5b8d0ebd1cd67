"""Which files import which, read from their texts.

Imports within functions are kept apart from those that run at import; imports under TYPE_CHECKING are not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from house_tree import ROOT, source_files

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
    """Return what a file imports, and what that imports; the file itself if it is in a circle."""
    seen: set[str] = set()
    waiting = [first]
    while waiting:
        at_once, within = graph[waiting.pop()]
        found = (at_once | within if later else at_once) - seen
        seen |= found
        waiting += found
    return seen


def in_circles(graph: Graph) -> list[str]:
    """Return the files that reach themselves, with imports within functions too."""
    return [name for name in graph if name in reached(graph, name, True)]


def python_files(folder: str, package: str) -> dict[str, str]:
    """Return the texts of the files below a folder of the repository by their dotted names, without doors."""
    top = ROOT / folder
    paths = [path for path in source_files(".py", under=folder) if path.name != "__init__.py"]
    return {".".join((package, *path.relative_to(top).with_suffix("").parts)): path.read_text() for path in paths}

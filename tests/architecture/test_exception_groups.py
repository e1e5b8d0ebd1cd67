"""Nothing is raised within `except*`: before Python 3.11.4, as on Debian 12, it comes out in a group."""

from __future__ import annotations

import ast

from house_tree import shown, source_files


def raised_in_groups(source: str) -> list[int]:
    """Return the lines of `raise ...` within `except*`, outside of functions that are defined there."""
    found: list[int] = []

    def look(node: ast.AST, inside: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = False
        if inside and isinstance(node, ast.Raise) and node.exc is not None:
            found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            look(child, inside or (isinstance(node, ast.TryStar) and child in node.handlers))

    look(ast.parse(source), inside=False)
    return found


def test_nothing_is_raised_within_a_handler_of_groups() -> None:
    sources = {path: path.read_text() for path in source_files(".py")}
    handling = {path: source for path, source in sources.items() if "except*" in source}
    assert len(handling) > 5
    assert [f"{shown(path)}:{line}" for path, source in handling.items() for line in raised_in_groups(source)] == []


def test_the_check_finds_what_is_raised() -> None:
    handled = "try:\n    f()\nexcept* ValueError as group:\n    "
    assert raised_in_groups(f"{handled}if group:\n        raise KeyError from None") == [5]
    assert raised_in_groups(f"{handled}raise") == []
    assert raised_in_groups(f"{handled}failure = group\nraise failure") == []

"""What users hold: no `timeout=` anywhere, each async function states what cancelling does, all is documented.

Reads the sources, so it needs no build and cannot be fooled by what an import happens to load.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_tree import ROOT, shown, source_files

PUBLIC_FOLDERS = (
    *(f"asyncfabric/{room}" for room in ("_api", "actors", "blocking", "control")),
    *(f"asyncfabric/{room}" for room in ("bench", "integrations", "kv", "moe", "observe", "sim", "testing", "weights")),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield public functions and methods of public classes with their dotted names; `__aenter__` and kin count."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                yield prefix + node.name, node

    return walk(tree.body, "")


ENGINE_CALLS = {
    name.rpartition(".")[2]
    for name, _ in public_functions(ast.parse((ROOT / "asyncfabric/_bridge/engine.py").read_text()))
    if name.startswith("Engine.")
}
"""Methods of the Engine protocol: each implementation is described by the protocol."""


def faults_of(text: str, *, awaited: bool, foreign: bool = False) -> list[str]:
    """Return what breaks the rules of a public function in a source text; a foreign interface may want timeout=."""
    faults = []
    for name, node in public_functions(ast.parse(text)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if not foreign and any(argument.arg == "timeout" for argument in arguments):
            faults.append(f"{name} has timeout=; callers use cancel scopes")
        docstring = ast.get_docstring(node) or ""
        overloads = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not docstring and not overloads and name.rpartition(".")[2] not in ENGINE_CALLS:
            faults.append(f"{name} has no docstring")
        if awaited and isinstance(node, ast.AsyncFunctionDef) and "Cancellation:" not in docstring:
            faults.append(f"{name} does not state what cancelling it does")
    return faults


def files() -> list[tuple[Path, bool]]:
    """Return the public files, and whether their async functions must describe cancellation."""
    found = [
        (path, folder == "asyncfabric/_api") for folder in PUBLIC_FOLDERS for path in source_files(".py", under=folder)
    ]
    return [(path, awaited) for path, awaited in found if not path.name.startswith("_") or path.name == "__init__.py"]


def test_public_functions_keep_the_rules() -> None:
    faults = {
        shown(path): bad
        for path, awaited in files()
        if (bad := faults_of(path.read_text(), awaited=awaited, foreign="integrations" in path.parts))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('def wait(timeout=None):\n    """Wait."""\n', "timeout="),
        ("def wait():\n    pass\n", "no docstring"),
        ('class A:\n    async def wait(self):\n        """Wait."""\n', "A.wait does not state"),
        ('async def wait():\n    """Wait.\n\n    Cancellation: nothing happened.\n    """\n', ""),
        ("def _private(timeout): pass\n", ""),
    ],
)
def test_the_check_finds_broken_rules(text: str, fault: str) -> None:
    found = "; ".join(faults_of(text, awaited=True))
    assert fault in found if fault else found == ""

"""The modules of Python that the build compiles are those that run, and are as their sources are."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from house_tree import ROOT


def compiled_modules() -> list[str]:
    for statement in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "COMPILED_PYTHON":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise AssertionError("setup.py names no COMPILED_PYTHON")


def test_what_runs_is_compiled_and_not_older_than_its_source() -> None:
    names = compiled_modules()
    assert names
    for name in names:
        running = Path(str(import_module(name).__file__))
        assert running.suffix == ".so", f"{name} is not compiled: `make build`"
        for source in running.parent.glob(name.rpartition(".")[2] + ".p[yx]*"):  # and its types, in a .pxd
            assert running.stat().st_mtime >= source.stat().st_mtime, f"{source} was edited since: `make build`"

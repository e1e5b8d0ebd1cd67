"""The layers of native/: what each folder may include, who may name providers, and that nothing there knows Python.

base -> nothing; provider -> base; providers -> provider, base; engine -> provider, rows, base; rows -> base;
bench stands beside them and measures. Every layer may use include/asyncfabric. Needs no build; the symbol test reads
the library when it was built.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from house_tree import CXX, ROOT, shown, source_files

SOURCE = ROOT / "native" / "src"
LAYERS = {
    "base": {"base"},
    "provider": {"provider", "base"},
    "engine": {"engine", "provider", "rows", "secret", "base", "topology"},
    "topology": {"topology", "base"},
    "secret": {"secret", "base"},
    "rows": {"rows", "base"},
    "providers": {"provider", "base"},  # and the provider's own folder
    "bench": {"bench", "base", "providers/libfabric", "providers/verbs"},  # bare loops open libraries as rails do
}
BUILT_ON = {"providers/cuda": {"providers/local"}}  # the same rings, doorbells and watches; other copies
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
PROVIDER_FOLDERS = sorted(path.name for path in (SOURCE / "providers").iterdir() if path.is_dir())


def layer_of(inside: Path) -> set[str]:
    """Return the folders that a file of native/src may include from."""
    allowed = set(LAYERS[inside.parts[0]])
    if inside.parts[0] == "providers":
        allowed.add("/".join(inside.parts[:2]))
        allowed |= BUILT_ON.get("/".join(inside.parts[:2]), set())
    return allowed


def forbidden_includes(inside: Path, text: str) -> list[str]:
    """Return the includes of a file that go up or sideways. `inside` is relative to native/src."""
    allowed = layer_of(inside)
    bad = []
    for name in INCLUDE.findall(text):
        if name.startswith("asyncfabric/") or any(name.startswith(folder + "/") for folder in allowed):
            continue
        bad.append(name)
    return bad


def test_native_includes_go_down_only() -> None:
    faults = {
        shown(path): bad
        for path in source_files(*CXX, under="native/src")
        if (bad := forbidden_includes(path.relative_to(SOURCE), path.read_text()))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("inside", "include", "allowed"),
    [
        ("base/ring.h", "provider/provider.h", False),
        ("base/ring.h", "asyncfabric/types.h", True),
        ("provider/catalog.cc", "engine/core.h", False),
        ("engine/loop/step.cc", "providers/local/rail.h", False),
        ("engine/loop/step.cc", "provider/provider.h", True),
        ("providers/local/rail.cc", "providers/libfabric/rail.h", False),
        ("providers/local/rail.cc", "providers/local/transfers/ring.h", True),
        ("providers/fault/rail.cc", "engine/core.h", False),
        ("providers/cuda/rail.h", "providers/local/rail.h", True),
        ("providers/local/rail.h", "providers/cuda/rail.h", False),
    ],
)
def test_the_check_finds_climbing_includes(inside: str, include: str, allowed: bool) -> None:
    assert (forbidden_includes(Path(inside), f'#include "{include}"\n') == []) is allowed


def test_public_headers_see_no_source() -> None:
    for path in source_files(".h", under="native/include"):
        assert [name for name in INCLUDE.findall(path.read_text()) if not name.startswith("asyncfabric/")] == []


def test_only_the_catalog_names_providers() -> None:
    opens = re.compile(r"\bopen_(?:" + "|".join(PROVIDER_FOLDERS) + r")_rail\b")
    naming = {
        shown(path)
        for path in source_files(*CXX, under="native/src")
        if opens.search(path.read_text()) and "providers" not in path.parts
    }
    assert naming == {"native/src/provider/catalog.cc"}


def test_native_sources_do_not_know_python() -> None:
    python = re.compile(r"\bPython\.h\b|\bPyObject\b|\bPyGILState\w*|\bPy_[A-Z]\w*")
    assert [shown(path) for path in source_files(*CXX, under="native/src") if python.search(path.read_text())] == []


def test_static_library_has_no_python_symbol() -> None:
    library = ROOT / "build" / "native-release" / "libasyncfabric_native.a"
    if not library.exists() or shutil.which("nm") is None:
        pytest.skip("THE STATIC LIBRARY WAS NOT CHECKED: run `make build`, and binutils must be there")
    listed = subprocess.run(["nm", "-u", str(library)], capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in listed.splitlines() if " U " in line}
    assert symbols, "nm listed no undefined symbol at all"
    assert {name for name in symbols if re.match(r"_?Py[A-Z_]", name)} == set()
    linked = re.compile(r"^(fi_|ibv_|cu[A-Z])")
    assert {name for name in symbols if linked.match(name)} == set(), "network libraries are opened, never linked"

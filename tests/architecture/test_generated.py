"""Texts of kernels that are carried: in folders named `_generated`, each of the sources that it names and of no others.

The SHA-256 of a source stands in the text; where nvcc is, all texts are made anew and compared (slow).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from house_tree import ROOT, source_files

GENERATOR = ROOT / "native/cuda/embed.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sums_in(text: str) -> list[str]:
    """Return the lines of sums in the comment that opens a text."""
    opening = text[: text.index("\n.version" if "\n.version" in text else "#pragma")]
    return [line.removeprefix("//   ") for line in opening.splitlines() if line.startswith("//   ")]


def test_each_text_is_of_the_sources_that_are_here(generator: ModuleType) -> None:
    for text in generator.TEXTS:
        wanted = generator.sums_of(ROOT / text.source)
        assert sums_in((ROOT / text.target).read_text()) == wanted, f"{text.target} is out of date: run `make ptx`"


def test_a_text_names_all_that_goes_into_it(generator: ModuleType) -> None:
    named = {line.split()[1] for text in generator.TEXTS for line in sums_in((ROOT / text.target).read_text())}
    assert named == {str(path.relative_to(ROOT)) for path in source_files(".cu", ".cuh", under="native/cuda")}


def test_what_is_generated_lies_apart(generator: ModuleType) -> None:
    kept = [*(ROOT / "asyncfabric").rglob("*.ptx"), *(ROOT / "native").rglob("*.ptx")]
    found = {str(path.relative_to(ROOT)) for path in kept}
    targets = {text.target for text in generator.TEXTS}
    assert found == {target for target in targets if target.endswith(".ptx")}
    assert {Path(target).parent.name for target in targets} == {"_generated"}
    assert "**/_generated/** linguist-generated" in (ROOT / ".gitattributes").read_text().splitlines()


def test_a_changed_source_has_another_sum(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include <cstdint>\n')
    (tmp_path / "b.cuh").write_text('  # include "c.cuh"\n')
    (tmp_path / "c.cuh").write_text("int x;\n")
    first = generator.sums_of(tmp_path / "a.cu", tmp_path)
    assert [line.split()[1] for line in first] == ["a.cu", "b.cuh", "c.cuh"]
    (tmp_path / "c.cuh").write_text("int y;\n")
    second = generator.sums_of(tmp_path / "a.cu", tmp_path)
    assert first[:2] == second[:2] and first[2] != second[2]


@pytest.mark.slow
def test_each_text_is_what_the_compiler_makes_of_its_sources(generator: ModuleType, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("THE TEXT OF KERNELS WAS NOT COMPARED WITH THEIR SOURCE: no nvcc")
    if "release 13.0" not in subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("THE TEXT OF KERNELS WAS NOT COMPARED WITH THEIR SOURCE: another nvcc than that of CUDA 13.0")
    subprocess.run([sys.executable, GENERATOR, tmp_path], check=True, timeout=200)
    for text in generator.TEXTS:
        assert (tmp_path / text.target).read_text() == (ROOT / text.target).read_text(), "run `make ptx`"

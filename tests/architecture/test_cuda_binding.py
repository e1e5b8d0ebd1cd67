"""Python reaches CUDA's driver by `asyncfabric._gpu` alone: nothing else opens libcuda or calls a function of it.

`services/doctor` names the library to report on it, and its child opens any library by name to see which file that is.
"""

from __future__ import annotations

import re

import pytest
from house_tree import ROOT, shown, source_files

OWN = "asyncfabric/_gpu/"
REPORTED = {"services/doctor/libraries.py", "services/doctor/library_trial.py"}
OPENED = re.compile(r"""CDLL\(\s*["']libcuda\b|["']libcuda\.so[\w.]*["']""")
CALLED = re.compile(r"\.cu(?:[A-Z][a-z]\w*)\(")


def bindings_in(text: str) -> list[str]:
    """Return what of a source opens the driver or calls it by itself."""
    return OPENED.findall(text) + CALLED.findall(text)


def test_nothing_else_binds_the_driver() -> None:
    files = [*source_files(".py", under="asyncfabric"), *source_files(".py", under="services")]
    files += source_files(".py", under="tests/gpu")
    own = [path for path in files if shown(path).startswith(OWN)]
    assert any(bindings_in(path.read_text()) for path in own), f"{ROOT / OWN} binds nothing: is the rule blind?"
    others = [shown(path) for path in files if path not in own and bindings_in(path.read_text())]
    assert set(others) <= REPORTED, others


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('ctypes.CDLL("libcuda.so.1")', 1),
        ("library.cuInit(0)", 1),
        ('driver.call("cuInit", 0)', 0),
        ("torch.cuda.current_stream()", 0),
    ],
)
def test_the_rule_sees_bindings(text: str, found: int) -> None:
    assert len(bindings_in(text)) == found

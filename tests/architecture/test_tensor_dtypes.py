"""The library runs in programs that set torch's default dtype (vLLM and Megatron set bfloat16): it names each dtype."""

from __future__ import annotations

import ast

import pytest
from house_tree import shown, source_files

FACTORIES = frozenset({"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"})
"""Functions of torch whose dtype is the default one, of the values or of the program; `*_like` and `new_*` inherit."""


def without_dtype(text: str) -> list[int]:
    """Return the lines that make a tensor and do not name its dtype."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg == "dtype" for keyword in call.keywords)
    ]


def test_the_library_names_the_dtype_of_each_tensor_that_it_makes() -> None:
    found = {shown(path): without_dtype(path.read_text()) for path in source_files(".py", under="asyncfabric")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import torch\nx = torch.zeros(3)\n", [2]),
        ("x = torch.tensor([1.0], device='cuda:0')\n", [1]),
        ("x = torch.zeros(3, dtype=torch.int32)\ny = torch.zeros_like(x)\nz = x.new_zeros(3)\n", []),
    ],
)
def test_the_check_finds_tensors_without_dtype(text: str, lines: list[int]) -> None:
    assert without_dtype(text) == lines

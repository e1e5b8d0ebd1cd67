"""What SGLang calls of DeepEP, read from its source: each call fits the face's signatures."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncfabric.integrations.deep_ep import Buffer, Config

SOURCE = Path(__file__).parents[2] / "build/doors/sglang/sglang/srt/layers/moe/token_dispatcher/deepep.py"
OBJECTS = {"buffer": Buffer, "state.buffer": Buffer, "Buffer": Buffer, "config": Config}
NOT_THERE = {"use_nvfp4", "x_global_scale", "topk_weights"}
"""Of `low_latency_dispatch`: of other branches of DeepEP, and of NPUs. A call with one of them raises TypeError."""
CALLED = {
    "Buffer",
    "Buffer.capture",
    "Buffer.get_combine_config",
    "Buffer.get_dispatch_config",
    "Buffer.get_low_latency_rdma_size_hint",
    "buffer.combine",
    "buffer.dispatch",
    "buffer.get_dispatch_layout",
    "buffer.low_latency_combine",
    "buffer.low_latency_dispatch",
    "config.get_nvl_buffer_size_hint",
    "config.get_rdma_buffer_size_hint",
    "state.buffer.clean_low_latency_buffer",
}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of DeepEP with their names."""
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "Buffer" or name.rpartition(".")[0] in OBJECTS:
                yield name, node


def named(call: ast.Call) -> set[str]:
    """Return the keywords of a call, those of dict(...) after ** too."""
    found = {keyword.arg for keyword in call.keywords if keyword.arg}
    for keyword in call.keywords:
        if keyword.arg is None:
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
                    found |= {each.arg for each in node.keywords if each.arg}
    return found


def signature(name: str) -> inspect.Signature:
    """Return that of what is called, without self."""
    if name == "Buffer":
        return inspect.signature(Buffer)
    owner, _, method = name.rpartition(".")
    found: Callable[..., Any] = getattr(OBJECTS[owner], method)
    whole = inspect.signature(found)
    parameters = [each for each in whole.parameters.values() if each.name != "self"]
    return whole.replace(parameters=parameters)


def test_every_call_fits() -> None:
    seen = set()
    for name, call in calls():
        seen.add(name)
        keywords = named(call) - (NOT_THERE if name.endswith("low_latency_dispatch") else set())
        signature(name).bind_partial(*call.args, **dict.fromkeys(keywords))
    assert seen >= CALLED


@pytest.mark.parametrize("text", ["buffer.dispatch(x, topk=1)", "buffer.combine(a, b, **dict(nothing=1))"])
def test_the_check_sees_what_does_not_fit(text: str) -> None:
    (call,) = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and "buffer" in ast.unparse(node.func)
    ]
    with pytest.raises(TypeError, match="unexpected keyword"):
        signature(ast.unparse(call.func)).bind_partial(*call.args, **dict.fromkeys(named(call)))

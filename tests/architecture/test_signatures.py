"""A data call has one signature, which stands in eight places: each is parsed here and held equal to its neighbour.

    API -> Engine protocol = fake = Cython room -> declarations for Cython = C++ interface = C++ engine

The eighth, the stub, names the protocol and repeats nothing. Compilers and mypy do not see two numbers that are
swapped on the way, or a default that only one side has. Needs no build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from house_tree import ROOT

PROTOCOL, FAKE = "asyncfabric/_bridge/engine.py", "asyncfabric/testing/fake_engine.py"
STUB = "asyncfabric/_native/_engine.pyi"
ROOM, DECLARED, BATCHES = "cython_ext/submit.pxi", "cython_ext/engine_api.pxd", "cython_ext/batches_api.pxd"
INTERFACE, ENGINE = "native/include/asyncfabric/engine.h", "native/src/engine/native_engine.h"
TYPES = "native/include/asyncfabric/types.h"
API = ("asyncfabric/_api/boxes.py", "asyncfabric/_api/data_ops.py", "asyncfabric/_api/page_ops.py")
ALIASES = re.compile(r"\b(?:Region|Key|Peer|Op|Mark)Id\b")  # of uint64_t
IN_ROOM = {"batch": "boxes", "data": "payload"}  # what a parameter of the interface is called where Cython passes it
IN_API = {
    "region._id": "region",
    "opened.id": "key",
    "start": "offset",
    "to": "target_offset",
    "number": "imm",
    "pages.sources": "source_pages",
    "transfer._sums": "sums",
    "rows": "boxes|targets",
    "ids": "peers",
    "data": "payload",
    "mark": "after",
}
BATCHES_OF = ("ScatterTarget", "PageBatch", "BoxBatch")


class Parameter(NamedTuple):
    """One parameter; no type where the language has none, "" without a default."""

    name: str
    type: str
    default: str


Calls = dict[str, list[Parameter]]
Texts = dict[str, str]


def python_calls(text: str) -> Calls:
    """Return the methods of a module that submit a data call, without self: those that return the number of an op."""
    found: Calls = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("submit_"):
            continue
        if node.returns is None or ast.unparse(node.returns) != "int":
            continue
        names = node.args.args[1:]
        defaults = [""] * (len(names) - len(node.args.defaults)) + [ast.unparse(one) for one in node.args.defaults]
        found[node.name] = [
            Parameter(one.arg, ast.unparse(one.annotation) if one.annotation else "", default)
            for one, default in zip(names, defaults, strict=True)
        ]
    return found


def split_parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yield (declaration, default) of each parameter of C++ or Cython."""
    for one in re.split(r",(?![^\[]*\])", text):
        declaration, _, default = one.partition("=")
        yield " ".join(declaration.replace("not None", "").split()), default.strip()


def room_calls(text: str) -> Calls:
    """Return the methods of the Cython room."""
    return {
        name: [Parameter(one.split()[-1], "", default) for one, default in split_parameters(parameters)]
        for name, parameters in re.findall(r"def (submit_\w+)\(self, ([^)]*)\)", text)
    }


def passed_calls(text: str) -> dict[str, list[str]]:
    """Return what the Cython room passes to the engine."""
    calls = re.findall(r"engine\.(submit_\w+)\((.*)\)\n", text)
    return {name: [one.strip().lstrip("&") for one in arguments.split(",")] for name, arguments in calls}


def declared_calls(text: str) -> dict[str, list[str]]:
    """Return the types that Cython knows of the engine's calls."""
    calls = re.findall(r"Status (submit_\w+)\(([^)]*)\) except \+", text)
    return {name: [one for one, _ in split_parameters(parameters)] for name, parameters in calls}


def native_calls(text: str) -> Calls:
    """Return the calls of a C++ header, with numbers of things as the numbers that they are."""
    found: Calls = {}
    for name, parameters in re.findall(r"\bStatus (submit_\w+)\(([^)]*)\) (?:= 0|override);", text):
        found[name] = [
            Parameter(one.rpartition(" ")[2], ALIASES.sub("uint64_t", one.rpartition(" ")[0]), default)
            for one, default in split_parameters(parameters)
        ]
    return found


def fields(text: str, batch: str) -> list[str]:
    """Return the names of a batch's fields, of C++ or as Cython declares them."""
    (body,) = re.findall(rf"(?:struct|cppclass) {batch}\b[ :{{]*\n((?: +.*\n)+)", text)
    return re.findall(r"^ +(?:const )?\w+\*? (\w+)", body, re.MULTILINE)


def python_names(call: str, parameters: list[Parameter], types: str) -> list[str]:
    """Return the names that Python has for a native call: batches taken apart, without the op and lengths of arrays."""
    names: list[str] = []
    for before, one in zip([None, *parameters], parameters, strict=False):
        if one.name == "op" or (one.type == "size_t" and before is not None and before.type.endswith("*")):
            continue
        if one.name == "pages":
            names += [name for name in fields(types, "PageBatch") if name != "count"]
        else:
            names += [one.name, "sums"] if one.name == "boxes" else [one.name]
    return sorted(names)


def spread(node: ast.expr, tuples: dict[str, ast.Tuple]) -> list[str]:
    """Return the texts of an argument, of which a starred one is several; "" where the text has none."""
    if not isinstance(node, ast.Starred):
        return [ast.unparse(node)]
    if isinstance(node.value, ast.Name):
        return [text for one in tuples[node.value.id].elts for text in spread(one, tuples)]
    bounds = re.fullmatch(r"\w+\[(\d+):(\d+)\]", ast.unparse(node.value))
    assert bounds is not None, f"cannot count {ast.unparse(node)}"
    return [""] * (int(bounds[2]) - int(bounds[1]))


def api_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (call of the engine, arguments behind the cookie) of each submission of the API."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        bound = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        tuples = {name: value for name, value in bound.items() if isinstance(value, ast.Tuple)}
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            marked = name == "_submit_after"
            if name != "_submit" and not marked:
                continue
            submit, *arguments = node.args[2 if marked else 1 :]
            if isinstance(submit, ast.Name):
                submit = bound.get(submit.id, submit)
            if isinstance(submit, ast.Attribute):  # else it passes on what it was given
                texts = [text for one in arguments for text in spread(one, tuples)]
                yield submit.attr, [*texts, "mark"] if marked else texts


def api_faults(text: str, protocol: Calls) -> Iterator[str]:
    """Yield what the API submits otherwise than the protocol takes it."""
    for call, arguments in api_calls(text):
        parameters = protocol[call][1:]
        if not len([one for one in parameters if not one.default]) <= len(arguments) <= len(parameters):
            yield f"the API submits {call} with {len(arguments)} arguments"
        for argument, parameter in zip(arguments, parameters, strict=False):
            if argument in IN_API and parameter.name not in IN_API[argument].split("|"):
                yield f"the API submits {argument} as {parameter.name} of {call}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in ("write_pages", "read_pages"):
            names = {one.arg for one in node.args.args + node.args.kwonlyargs} - {
                "self",
                "source",
                "destination",
                "key",
            }
            if names != {one.name for one in protocol[f"submit_{node.name}"]} - {"cookie", "region", "key"}:
                yield f"the API's {node.name} has other names than the protocol"


def faults(texts: Texts) -> list[str]:
    """Return each difference between two places."""
    protocol, interface = python_calls(texts[PROTOCOL]), native_calls(texts[INTERFACE])
    interface = {name: parameters for name, parameters in interface.items() if name in protocol}
    found = []
    if set(interface) != set(protocol) or len(protocol) < 8:
        found.append(f"the interface has {sorted(interface)}, the protocol {sorted(protocol)}")
    if python_calls(texts[FAKE]) != protocol:
        found.append("the fake differs from the protocol")
    if "def submit_" in texts[STUB] or "def __call__" not in texts[STUB] or "-> EngineProtocol" not in texts[STUB]:
        found.append("the stub repeats the protocol, or does not name it")
    engine, room = native_calls(texts[ENGINE]), room_calls(texts[ROOM])
    passed, declared = passed_calls(texts[ROOM]), declared_calls(texts[DECLARED])
    for call, parameters in interface.items():
        names = [one.name for one in parameters]
        if engine.get(call) != [one._replace(default="") for one in parameters]:
            found.append(f"{call}: the engine differs from its interface")
        if declared.get(call) != [one.type for one in parameters]:
            found.append(f"{call}: Cython is given {declared.get(call)}")
        wanted = [(one.name, one.default) for one in protocol[call]]
        if [(one.name, one.default) for one in room.get(call, [])] != wanted:
            found.append(f"{call}: the Cython room differs from the protocol")
        if python_names(call, parameters, texts[TYPES]) != sorted(name for name, _ in wanted):
            found.append(f"{call}: the interface has other names than the protocol")
        native = [IN_ROOM.get(one, one) for one in passed.get(call, [])]
        native = [name if one.startswith("native.") else one for one, name in zip(native, names, strict=False)]
        if native != names:
            found.append(f"{call}: the Cython room passes {native}, the interface takes {names}")
    for batch in BATCHES_OF:
        if fields(texts[BATCHES], batch) != fields(texts[TYPES], batch):
            found.append(f"{batch}: Cython is given other fields")
    for path in API:
        found += api_faults(texts[path], protocol)
    return found


def read_texts() -> Texts:
    """Return all places."""
    places = (PROTOCOL, FAKE, STUB, ROOM, DECLARED, BATCHES, INTERFACE, ENGINE, TYPES, *API)
    return {path: (ROOT / path).read_text() for path in places}


def test_each_data_call_has_one_signature() -> None:
    assert faults(read_texts()) == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (API[0], "region._id, rows, opened.id", "opened.id, rows, region._id"),
        (
            API[1],
            "submit_write, region._id, start, length, opened.id, to, number",
            "submit_write, region._id, to, number",
        ),
        (API[1], "region._id, start, length, opened.id, to)", "region._id, length, start, to, opened.id)"),
        (
            API[2],
            "region._id, pages.sources, opened.id, *shape, number",
            "opened.id, pages.sources, region._id, *shape",
        ),
        (API[2], "        source_stride: SupportsIndex | None = None,", "        stride: SupportsIndex | None = None,"),
        (PROTOCOL, "def submit_send(self, cookie: int, peer: int,", "def submit_send(self, cookie: int, to: int,"),
        (PROTOCOL, "        after: int = 0,", "        after: int = 1,"),
        (FAKE, "target_offset: int, imm: int, after: int = 0", "target_offset: int, imm: int, after: int"),
        (STUB, "Engine: MakeEngine", "def submit_send(cookie: int) -> int: ...\nEngine: MakeEngine"),
        (ROOM, "uint64_t offset, uint64_t length, uint64_t key,", "uint64_t length, uint64_t offset, uint64_t key,"),
        (
            ROOM,
            "submit_write(cookie, region, offset, length, key,",
            "submit_write(cookie, key, offset, length, region,",
        ),
        (
            ROOM,
            "uint64_t target_offset, int64_t imm, uint64_t after=0",
            "uint64_t target_offset, int64_t imm, uint64_t after",
        ),
        (DECLARED, "Status submit_send(uint64_t, uint64_t,", "Status submit_send(uint64_t, uint32_t,"),
        (BATCHES, "uint64_t source_stride", "uint64_t stride"),
        (INTERFACE, "submit_send(uint64_t cookie, PeerId peer,", "submit_send(uint64_t cookie, PeerId to,"),
        (
            INTERFACE,
            "submit_signal(uint64_t cookie, const PeerId* peers,",
            "submit_signal(uint32_t cookie, const PeerId* peers,",
        ),
        (ENGINE, "submit_send(uint64_t cookie, PeerId peer,", "submit_send(uint64_t cookie,"),
        (TYPES, "uint64_t source_stride", "uint64_t stride"),
    ],
)
def test_the_check_finds_differences(path: str, old: str, new: str) -> None:
    texts = read_texts()
    assert old in texts[path], "this plant no longer finds its place"
    assert faults({**texts, path: texts[path].replace(old, new, 1)}) != []

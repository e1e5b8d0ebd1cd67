"""The Python twins of native tables and enums state what the headers state."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from asyncfabric import config, types
from asyncfabric._bridge.engine import CompletionKind, StatusKind
from asyncfabric._bridge.status import StatusCode, refusal

HEADERS = Path(__file__).resolve().parents[3] / "native/include/asyncfabric"


def snake(name: str) -> str:
    """Return kPeerLost as PEER_LOST."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def test_every_code_has_the_number_kind_and_text_of_the_native_table() -> None:
    rows = re.findall(r'X\((k\w+), (\d+), (k\w+), "([^"]+)"\)', (HEADERS / "status.h").read_text())
    native = {snake(code): (int(number), snake(kind), text) for code, number, kind, text in rows}
    assert len(native) >= 20
    assert native == {code.name: (int(code), code.kind.name, code.text) for code in StatusCode}


@pytest.mark.parametrize(
    ("enum", "header", "head"),
    [
        (StatusKind, "status.h", "enum class StatusKind : uint16_t {"),
        (CompletionKind, "types.h", "enum class CompletionKind : uint32_t {"),
    ],
)
def test_enums_have_the_native_numbers(enum: type[IntEnum], header: str, head: str) -> None:
    body = (HEADERS / header).read_text().partition(head)[2].partition("};")[0]
    assert {snake(name): int(number) for name, number in re.findall(r"(k\w+) = (\d+)", body)} == {
        one.name: int(one) for one in enum
    }


def test_constants_and_configuration_agree_with_the_header() -> None:
    text = (HEADERS / "types.h").read_text()
    assert f"kImmBits = {types.MAX_IMM.bit_length()};" in text
    polling = re.search(r"enum class PollingMode : uint32_t \{(.*?)\}", text)
    assert polling is not None
    assert {snake(name).lower(): int(number) for name, number in re.findall(r"(k\w+) = (\d+)", polling[1])} == (
        config.POLLING_NUMBERS
    )
    access = {name: int(number) for name, number in re.findall(r"kAccess(\w+) = (\d)", text)}
    assert access == {"Local": 0, "RemoteWrite": types.ACCESS_BITS["write"], "RemoteRead": types.ACCESS_BITS["read"]}
    assert types.ACCESS_BITS["read-write"] == 3


@pytest.mark.parametrize(("detail", "text"), [("", "ok"), ("3 of 4", "ok: 3 of 4")])
def test_a_refusal_carries_numbers_and_a_sentence(detail: str, text: str) -> None:
    error = refusal(StatusCode.OK, detail, raw=5)
    assert (error.code, error.status_kind, error.raw, error.args[3]) == (0, 0, 5, text)

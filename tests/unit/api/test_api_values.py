"""Addresses and keys as bytes and text: round trips, equality, and hostile bytes that are refused by name."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncfabric as af

pytestmark = pytest.mark.anyio


def a_key(access: int = 3, body: bytes = b"engine") -> af.RegionKey:
    return af.RegionKey(7, 3, 2, 4096, access, body)


def test_an_address_goes_round_as_bytes_and_as_text() -> None:
    address = af.FabricAddress(0xABC, b"\x00\xffwhere")
    assert af.FabricAddress.from_bytes(bytes(address)) == address
    assert af.FabricAddress.parse(str(address)) == address
    assert hash(af.FabricAddress.parse(str(address))) == hash(address)
    assert address.incarnation == 0xABC
    assert address != af.FabricAddress(0xABD, b"\x00\xffwhere")
    assert address != "text"


def test_a_key_goes_round_and_reports_what_it_is() -> None:
    key = a_key(access=1)
    again = af.RegionKey.from_bytes(memoryview(bytes(key)))
    assert again == key and hash(again) == hash(key)
    assert (again.length, again.access, again.incarnation, again.region_id, again.generation) == (
        4096,
        "write",
        7,
        3,
        2,
    )
    assert again != a_key(access=3)
    assert "write 4096 bytes" in repr(again)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("nonsense", "begins with"),
        ("af1-!!!!", "damaged"),
        ("af1-AAAA", "bytes, got"),
        ("af1-" + "A" * 80, "not a fabric"),
    ],
)
def test_damaged_address_text_is_refused(text: str, states: str) -> None:
    with pytest.raises(ValueError, match=states):
        af.FabricAddress.parse(text)


@pytest.mark.parametrize("position", range(8))
def test_each_damaged_byte_of_the_frames_is_refused(position: int) -> None:
    for parse, data in (
        (af.FabricAddress.from_bytes, bytes(af.FabricAddress(1, b"x" * 20))),
        (af.RegionKey.from_bytes, bytes(a_key())),
    ):
        damaged = bytearray(data)
        damaged[position] ^= 0x7F
        with pytest.raises(ValueError):
            parse(damaged)


def test_what_is_no_bytes_is_refused_by_its_kind() -> None:
    for parse in (af.RegionKey.from_bytes, af.FabricAddress.from_bytes):
        for value in ("text", 5, None):
            with pytest.raises(TypeError, match=f"parsed from bytes, got {type(value).__name__}"):
                parse(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reads text, got bytes"):
        af.FabricAddress.parse(b"af1-")  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_with_a_value_error(data: bytes) -> None:
    for parse in (af.FabricAddress.from_bytes, af.RegionKey.from_bytes):
        with pytest.raises(ValueError):
            parse(data)


@pytest.mark.parametrize("length", [0, 5000, 1 << 20])
def test_frames_are_bounded(length: int) -> None:
    for head in (struct.pack(">4sBBHQ", b"AFad", 1, 0, length & 0xFFFF, 1),):
        with pytest.raises(ValueError):
            af.FabricAddress.from_bytes(head + bytes(length))


def test_a_key_without_rights_or_length_is_refused() -> None:
    with pytest.raises(ValueError, match="access 0"):
        af.RegionKey.from_bytes(bytes(a_key(access=0)))
    with pytest.raises(ValueError, match="length 0"):
        af.RegionKey.from_bytes(bytes(af.RegionKey(7, 3, 2, 0, 3, b"x")))

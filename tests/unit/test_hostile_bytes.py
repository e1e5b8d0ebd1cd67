"""Bytes from strangers: addresses and keys are refused with a status, never with anything else, never by a crash."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parties import WRITE, Party

from asyncfabric._bridge.engine import EngineStatusError, StatusKind
from asyncfabric.testing.fake_keys import FakeAddress, FakeKey

U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
ADDRESSES = st.builds(FakeAddress, U64, U64)
KEYS = st.builds(FakeKey, U64, U64, U64, U64, U64, U64, U64, U32, U32)
MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Pair = tuple[Party, Party]


@given(ADDRESSES, KEYS)
def test_bytes_round_trip(address: FakeAddress, key: FakeKey) -> None:
    assert FakeAddress.unpack(address.pack()) == address
    assert FakeKey.unpack(key.pack()) == key


@given(KEYS, st.data())
def test_one_damaged_bit_is_noticed(key: FakeKey, data: st.DataObject) -> None:
    packed = bytearray(key.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EngineStatusError) as caught:
        FakeKey.unpack(bytes(packed))
    assert caught.value.status_kind == StatusKind.VALUE


@MANY
@given(junk=st.binary(max_size=5000))
def test_junk_is_refused(pair: Pair, junk: bytes) -> None:
    engine = pair[0].engine
    for call in (engine.open_key, engine.check_address, lambda data: engine.submit_connect(1, data)):
        with pytest.raises(EngineStatusError) as caught:
            call(junk)
        assert caught.value.status_kind == StatusKind.VALUE


@MANY
@given(data=st.data())
def test_a_cut_or_stretched_key_is_refused(pair: Pair, data: st.DataObject) -> None:
    writer, reader = pair
    region = reader.allocate(128)
    key = reader.engine.region_key(region, WRITE, 0, 64)
    cut = data.draw(st.integers(0, len(key) - 1))
    for bytes_ in (key[:cut], key + bytes(1 + cut % 5), key[1:], key + key, key[:cut] + key[cut + 1 :]):
        if bytes_ == key:
            continue
        with pytest.raises(EngineStatusError) as caught:
            writer.engine.open_key(bytes_)
        assert caught.value.status_kind == StatusKind.VALUE
    reader.release(region)


@MANY
@given(data=st.data())
def test_a_damaged_key_never_reaches_memory_that_it_did_not_name(pair: Pair, data: st.DataObject) -> None:
    writer, reader = pair
    region, source = reader.allocate(128), writer.allocate(64)
    writer.fill(source, b"x" * 64)
    key = bytearray(reader.engine.region_key(region, WRITE, 0, 64))
    for _ in range(data.draw(st.integers(1, 4))):
        key[data.draw(st.integers(0, len(key) - 1))] = data.draw(st.integers(0, 255))
    if bytes(key) == reader.engine.region_key(region, WRITE, 0, 64):
        return
    try:
        opened, info = writer.engine.open_key(bytes(key))
    except EngineStatusError as refusal:
        assert refusal.status_kind in (StatusKind.VALUE, StatusKind.STALE)
    else:
        _write_with(writer, source, opened, info.length)
        writer.engine.close_key(opened)
    assert not any(reader.bytes_of(region)[64:])
    writer.release(source)
    reader.release(region)


def _write_with(writer: Party, source: int, opened: int, length: int) -> None:
    try:
        cookie = writer.cookie()
        writer.engine.submit_write(cookie, source, 0, min(64, length), opened, 0, -1)
    except EngineStatusError as refusal:
        assert refusal.status_kind in (StatusKind.VALUE, StatusKind.STALE)
    else:
        writer.take(cookie)


@MANY
@given(data=st.data())
def test_a_damaged_address_connects_to_nobody_else(pair: Pair, data: st.DataObject) -> None:
    writer, reader = pair
    address = bytearray(reader.engine.address())
    address[data.draw(st.integers(0, len(address) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        writer.engine.check_address(bytes(address))
    except EngineStatusError as refusal:
        assert refusal.status_kind == StatusKind.VALUE

"""Messages of the protocol as bytes: what was sent comes back, and hostile bytes are one typed error, nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric import RemoteProtocolError
from asyncfabric.kv import (
    KvAccepted,
    KvCancel,
    KvLayout,
    KvMessage,
    KvOffer,
    KvRefused,
    KvStopped,
    decode_message,
    encode_message,
)

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=8, page_tokens=4, dtype="float16")
OFFER = KvOffer(
    target=2**63,
    lease=7,
    reply_to=b"address",
    layout=LAYOUT,
    digest=LAYOUT.digest(),
    tokens=9,
    rotation=1,
    pages=bytes([3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]),
    pool_pages=4,
    pages_key=b"key",
    context_key=b"",
    layer_imms=(5, 6),
    context_imm=5,
    remaining_ns=10**9,
    body=b"prompt",
)
MESSAGES: list[KvMessage] = [
    OFFER,
    KvAccepted(target=1, lease=2),
    KvRefused(target=1, lease=2, reason="full"),
    KvCancel(target=1, lease=2),
    KvStopped(target=1, lease=2, clean=True, reason="asked"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: KvMessage) -> None:
    assert decode_message(encode_message(message)) == message


def test_what_an_offer_states() -> None:
    assert OFFER.block_table().tolist() == [3, 1, 2]
    assert (OFFER.imm_of(0), OFFER.imm_of(1)) == (5, 6)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"tokens": -1},
        {"tokens": 13},
        {"rotation": -1},
        {"pages": b"\x09\0\0\0" * 3},
        {"pages": b"123"},
        {"layer_imms": [1, 2, 3]},
        {"pool_pages": 0},
        {"layout": {"layers": 0}},
        {"extra": 1},
        {"kv": "unreceived"},
        {"target": "me"},
    ],
)
def test_offers_that_would_do_harm_are_refused(change: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(encode_message(OFFER))
    with pytest.raises(RemoteProtocolError, match="no message of a KvCache stream"):
        decode_message(msgspec.msgpack.encode(fields | change))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    _never_anything_else(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages(message: KvMessage, data: st.DataObject) -> None:
    damaged = bytearray(encode_message(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _never_anything_else(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


def _never_anything_else(data: bytes) -> None:
    try:
        message = decode_message(data)
    except RemoteProtocolError:
        return
    assert isinstance(message, KvOffer | KvAccepted | KvRefused | KvCancel | KvStopped)

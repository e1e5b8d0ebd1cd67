"""Makes inputs of inputs: bits, bytes, heads of MessagePack, numbers at edges, cuts, copies, pieces of others. Pure.

The same seed makes the same inputs.
"""

from __future__ import annotations

from random import Random

MOST_BYTES = 20_000
HEADS = bytes.fromhex("00 7f 80 81 8f 90 91 9f a0 a1 bf c0 c1 c2 c3 c4 c6 c7 ca cb cc cf d3 d9 db dc dd de df e0 ff")
EDGES = (
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xc6\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff"),
    *(b"\xcb\x7f\xf8" + b"\0" * 6, b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff\xff"),
    *(b"-1", b"9" * 400, b"1e400", b"NaN", b"-0", b"null", b"\\ud800", b'"', b"[[", b"{}"),
    *(b"\xed\xa0\x80", b"\xc3\x28", b"\xe2\x80\xae", b"\0", b"\r\n"),
)
NESTINGS = (b"\x91", b"\x81\xa1a", b"[", b'{"a":')


def changed(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """Return bytes that differ in one to eight places; `others` is not empty."""
    out = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        _change(random, out, random.choice(others))
    return bytes(out[:MOST_BYTES])


def _change(random: Random, out: bytearray, other: bytes) -> None:
    at = random.randrange(len(out) + 1)
    match random.randrange(11):
        case 0 if at < len(out):
            out[at] ^= 1 << random.randrange(8)
        case 1 if at < len(out):
            out[at] = random.randrange(256)
        case 2 if at < len(out):
            out[at] = random.choice(HEADS)
        case 3 if at < len(out):
            out[at] = (out[at] + random.randrange(-17, 18)) % 256
        case 4:
            edge = random.choice(EDGES)
            out[at : at + random.choice((0, 1, len(edge)))] = edge
        case 5:
            del out[at:]
        case 6:
            del out[at : at + random.randrange(1, 17)]
        case 7:
            begin = random.randrange(len(out) + 1)
            out[at:at] = out[begin : begin + random.randrange(1, 65)]
        case 8:
            begin = random.randrange(len(other) + 1)
            out[at : at + random.randrange(32)] = other[begin : begin + random.randrange(64)]
        case 9 if random.randrange(16) == 0:  # deeper than Python's stack
            out[at:at] = random.choice(NESTINGS) * 2000
        case _:
            out[at:at] = random.randbytes(random.randrange(1, 9))

"""The basics between two real processes over every provider: bytes, counts, pages, keys, many processes at once."""

from __future__ import annotations

import hashlib
import random

import pytest
import xxhash
from availability import need
from processes import Process, party

MIB = 1 << 20
RAILS = [
    pytest.param(("local",), "allocated", id="local-allocated"),
    pytest.param(("local",), "foreign", id="local-foreign"),
    pytest.param(("local", "local"), "foreign", id="local-2"),
    pytest.param(("tcp",), "foreign", id="tcp"),
    pytest.param(("tcp", "tcp"), "allocated", id="tcp-2"),
    pytest.param(("verbs",), "foreign", id="verbs"),
    pytest.param(("verbs:rxe1", "verbs:rxe2"), "allocated", id="verbs-2"),
    pytest.param(("fault+local?reorder=32&delay_us=100&seed=3",), "foreign", id="late"),
]


def _sha(seed: int, total: int, length: int) -> str:
    return hashlib.sha256(random.Random(seed).randbytes(total)[:length]).hexdigest()


@pytest.mark.parametrize(("rails", "memory"), RAILS)
def test_bytes_and_counts(rails: tuple[str, ...], memory: str) -> None:
    need(*rails)
    with party(*rails) as writer, party(*rails) as target:
        assert len(writer.receive()["rails"]) == len(rails)
        target.receive()
        length = 4 * MIB
        key = target.ask("expose", length=length, memory=memory)["key"]
        writer.ask("expose", length=length, name="source", memory=memory, seed=11)
        imm = target.ask("counter")["imm"]
        count = 0
        for size in (0, 1, 4097, 16_385, 200_001, length):
            assert writer.ask("write", key=key, length=size, imm=imm)["bytes"] == size
            count += 1
            assert target.ask("wait", imm=imm, value=count)["value"] == count
            assert target.ask("digest", length=size)["sha"] == _sha(11, length, size)
        writer.ask("pages", key=key, count=512, page_bytes=8192, imm=imm)
        assert target.ask("wait", imm=imm, value=count + 512)["value"] == count + 512
        content = random.Random(11).randbytes(length)
        turned = b"".join(content[i : i + 8192] for i in range(length - 8192, -1, -8192))
        assert target.ask("digest")["sha"] == hashlib.sha256(turned).hexdigest()
        writer.close()
        target.close()


@pytest.mark.parametrize("source", ["allocated", "foreign"])
def test_columns_in_one_pass(source: str) -> None:
    """Boxes go from any memory to memory that its owner allocated; to other memory they are refused, nothing moves."""
    need("local")
    with party("local") as writer, party("local") as target:
        writer.receive(), target.receive()
        rows, row_bytes = 300, 11_264
        length = rows * row_bytes
        writer.ask("expose", length=length, name="source", memory=source, seed=9)
        key = target.ask("expose", length=length, memory="allocated")["key"]
        imm = target.ask("counter")["imm"]
        reported = writer.ask("columns", key=key, rows=rows, row_bytes=row_bytes, imm=imm)
        assert target.ask("wait", imm=imm, value=2)["value"] == 2
        content, half = random.Random(9).randbytes(length), row_bytes // 2
        sides = [
            b"".join(content[at + side * half : at + side * half + half] for at in range(0, length, row_bytes))
            for side in range(2)
        ]
        assert reported == reported | {"bytes": length, "sums": [xxhash.xxh3_64_intdigest(side) for side in sides]}
        assert target.ask("digest")["sha"] == hashlib.sha256(b"".join(sides)).hexdigest()
        foreign = target.ask("expose", length=length, name="foreign", memory="foreign")["key"]
        error = writer.fail("columns", key=foreign, rows=rows, row_bytes=row_bytes, imm=imm)
        assert error["error"] == "TransferError" and "can_gather" in error["text"], error
        assert target.ask("digest", name="foreign")["poison"] == length
        writer.close()
        target.close()


@pytest.mark.parametrize("rail", ["local", "tcp", "verbs"])
def test_revoked_and_restarted_keys(rail: str) -> None:
    """INV-3 between processes: a revoked key, then the key of a process that was restarted."""
    need(rail)
    with party(rail) as writer:
        writer.receive()
        writer.ask("expose", length=65_536, name="source", seed=5)
        with party(rail) as target:
            target.receive()
            old = target.ask("expose", length=65_536)["key"]
            new = target.ask("revoke")["key"]
            assert writer.fail("write", key=old, length=65_536)["error"] == "StaleKeyError"
            assert target.ask("digest")["poison"] == 65_536
            writer.ask("write", key=new, length=1)
            target.send_signal(9)
            target.child.wait()
        with party(rail) as target:
            target.receive()
            fresh = target.ask("expose", length=65_536)["key"]
            error = writer.fail("write", key=new, length=65_536)
            assert error["error"] in ("StaleKeyError", "PeerError"), error
            writer.ask("write", key=fresh, length=1)
            assert target.ask("digest", offset=1)["poison"] == 65_535
            writer.close()
            target.close()


def test_close_with_work_in_flight() -> None:
    """A process that leaves `open_fabric` right after submitting has delivered and counted everything."""
    need("local")
    with party("local") as writer, party("local") as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=32 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=4)
        writer.ask("submit", key=key, piece=MIB, count=32, imm=imm)
        writer.close()
        assert target.ask("wait", imm=imm, value=32)["value"] == 32
        assert target.ask("digest", offset=31 * MIB)["sha"] == _sha(4, MIB, MIB)
        target.close()


def test_everybody_writes_to_everybody() -> None:
    """Four processes, all pairs at once: interleaved connects, writes and counts."""
    need("local")
    everybody: list[Process] = []
    try:
        everybody = [party("local") for _ in range(4)]
        for one in everybody:
            one.receive()
        keys = [one.ask("expose", length=MIB)["key"] for one in everybody]
        for one in everybody:
            one.ask("counter", imm=9)
            one.ask("expose", length=MIB, name="source", seed=6)
        for one in everybody:
            for key in keys:
                one.send(do="write", key=key, length=MIB, imm=9)
        for one in everybody:
            for _ in keys:
                assert one.receive()["bytes"] == MIB
        for one in everybody:
            assert one.ask("wait", imm=9, value=4)["value"] == 4
            assert one.ask("digest")["sha"] == _sha(6, MIB, MIB)
            one.close()
    finally:
        for one in everybody:
            one.__exit__(None, None, None)

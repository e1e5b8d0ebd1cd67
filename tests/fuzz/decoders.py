"""What is fuzzed in Python: decoders of bytes from outside under a name, each with what it may raise and first inputs.

The first inputs are made by the encoders that belong to the decoders; `run.py --write-corpus` keeps them as files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import numpy as np

import asyncfabric_services.nodes.messages as node_messages
from asyncfabric import FabricAddress, RegionKey
from asyncfabric.actors import wire
from asyncfabric.config import RailSpec
from asyncfabric.control import directory_messages as directory
from asyncfabric.control import messages as control
from asyncfabric.control import zap
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.directory import Node, NodeChange
from asyncfabric.control.keys import parse_trusted
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.integrations.nixl import metadata, notes
from asyncfabric.integrations.nixl.errors import nixlMismatchError
from asyncfabric.integrations.nixl.kinds import nixl_mem_t
from asyncfabric.integrations.nixl.ranges import Place
from asyncfabric.kv import KvLayout
from asyncfabric.kv import messages as kv
from asyncfabric.moe.cards import Card, decode_card
from asyncfabric.moe.host import record
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.observe.spans import Span, parse_context
from asyncfabric.observe.trace import Recording
from asyncfabric.weights import Mesh, Move, Shard, alone, place, plan_weights
from asyncfabric.weights import messages as weights
from asyncfabric.weights.coding import codings
from asyncfabric.weights.plan import plan as plans
from asyncfabric_services.quantities import parse_duration, parse_size
from asyncfabric_services.router.ask import Limits, read_ask
from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.fault import ApiFault
from asyncfabric_services.router.incoming import read_deadline
from asyncfabric_services.runner.tokenizer import ByteTokenizer
from asyncfabric_services.settings.keys import SettingsError
from asyncfabric_services.settings.sources import load_settings


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder.

    Attributes:
        read: reads bytes; what it returns is not looked at.
        seeds: makes first inputs.
        refusals: what it may raise for bytes that it does not take.
    """

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = ()


IDENTITY = control.Identity("node", 7)
NODE = Node(IDENTITY, "prefill", "ipc:///tmp/x.sock", {"zone": "b"})
SHAPE = LaneShape(
    members=4, max_tokens=8, top_k=2, fan_out=2, row_bytes=64, back_row_bytes=64, scales=1, private=8, in_flight=2,
    area_bytes=1 << 20,
)  # fmt: skip
LAYOUT = KvLayout(
    layers=2, kv_heads=2, head_dim=16, page_tokens=16, dtype="bfloat16", order="HND", tp_rank=0, tp_size=1,
    context_bytes=64, model="m",
)  # fmt: skip
OLD = np.arange(4096, dtype=np.uint8)
CARDS = [ServedModel("tiny", ByteTokenizer(), 4096), ServedModel("open", ByteTokenizer(), 4096, passes_fields=True)]
_CARD = Card(tag="moe", epoch=1, rank=0, digest="d", imm=3, keys=(b"key",))
FOLDER = Path(mkdtemp(prefix="af-fuzz-"))


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def _frames() -> list[bytes]:
    messages = (
        control.Hello("ipc:///x", ("a",), 1 << 20, 1 << 20, "decode"),
        control.Heartbeat(),
        control.Credit("c", 3),
        control.Parcel("c", b"body"),
        control.Drain(),
        control.Goodbye("why"),
        control.SessionRefusal("tag", "text"),
    )
    return [control.encode(control.Envelope(IDENTITY, 5, n, None, one)) for n, one in enumerate(messages)]


def _directory() -> list[bytes]:
    changes = (NodeChange(4, "joined", NODE), NodeChange(5, "lost", NODE, "gone"))
    return [
        directory.encode(one)
        for one in (
            directory.Register("prefill", "ipc:///tmp/x.sock", {"zone": "b"}),
            directory.Renew(),
            directory.WatchFrom(3),
            directory.Registered(10**9),
            directory.Unregistered("unknown", True),
            directory.Snapshot(3, False, (NODE,)),
            directory.Changes(changes),
            directory.Settled(),
        )
    ]


def _both(data: bytes) -> None:
    for message in (directory.decode_request(data), directory.decode_news(data)):
        if message is not None:
            directory.encode(message)


def _zap(data: bytes) -> None:
    parts = data.split(b"|")
    assert zap.judge(parts, {"00" * 32}).answer[0] == b"1.0"
    zap.monitor_event(parts)


def _actors() -> list[bytes]:
    body = msgspec.Raw(wire.encoded({"a": 1}))
    frames = (
        wire.Call(number=1, actor="a", incarnation=2, kind="k", body=body, asked=True),
        wire.Lookup(number=2, actor="a"),
        wire.CancelCall(number=3),
        wire.Answer(number=4, body=body),
        wire.CallFailed(number=5, outcome="raised", reason="r", origin="o", kind="k"),
    )
    return [wire.encoded(frame) for frame in frames]


def _read_actors(data: bytes) -> None:
    frame = wire.decoded(data)
    if isinstance(frame, wire.Call | wire.Answer):
        with suppress(msgspec.DecodeError):
            wire.body_of(frame.body, node_messages.Generate)


def _kv() -> list[bytes]:
    offer = kv.KvOffer(
        target=1, lease=2, reply_to=b"a", layout=LAYOUT, digest=LAYOUT.digest(), tokens=40, rotation=0,
        pages=kv.pack_pages(np.arange(3)), pool_pages=8, pages_key=b"k", context_key=b"", layer_imms=(5,),
        context_imm=6, remaining_ns=10**9, body=node_messages.encode_prompt([1, 2, 3]),
    )  # fmt: skip
    others = (kv.KvRefused(target=1, lease=2, reason="r"), kv.KvStopped(target=1, lease=2, clean=True))
    return [kv.encode_message(one) for one in (offer, *others)]


def _read_kv(data: bytes) -> None:
    message = kv.decode_message(data)
    if isinstance(message, kv.KvOffer):
        message.block_table()


def _weights() -> list[bytes]:
    messages = (
        weights.Write(3, ["a", "b"]),
        weights.Failed(3, "why"),
        weights.CatchUp(3, "a"),
        weights.Fetched(3),
        weights.Commit(4),
    )
    return [weights.encode_message(one) for one in messages]


def _plan() -> list[bytes]:
    whole, halves = place((4, 4), Mesh.of({"tp": 1})), place((4, 4), Mesh.of({"tp": 2}), {"tp": Shard(0)})
    moves = [Move(name, "float32", whole, name, "bfloat16", alone(halves)) for name in ("a", "b")]
    return [plans.to_bytes(plan_weights(moves, trainers=1, receivers=2, replicas=("one", "two")))]


def _changed() -> codings.Bytes:
    new = OLD.copy()
    new[100:200] += 1
    return new


def _read_delta(data: bytes) -> None:
    memory = OLD.copy()
    try:
        codings.apply_delta(memory, data, 2)
    except ValueError:
        assert (memory == OLD).all(), "a refused delta changes nothing"
        raise


def _read_exponents(data: bytes) -> None:
    codings.decode_exponents(np.zeros(4096, np.uint8), data, 2)


def _front_of(member: int) -> record.Bytes:
    """Return the front that this member wrote for member 0."""
    fronts = [np.zeros(SHAPE.front_rows * SHAPE.row_bytes, np.uint8) for _ in range(SHAPE.members)]
    rows = record.Rows(
        np.zeros(3, np.int32), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32), np.ones((3, 1), np.float32)
    )
    owner = np.zeros(1, np.int64)
    record.write_records(fronts, member, 9, rows, owner, record.find_route(rows.experts, owner, SHAPE.members))
    return fronts[0]


def _records() -> list[bytes]:
    return [_front_of(1).tobytes()]


def _read_record(data: bytes) -> None:
    whole = SHAPE.front_rows * SHAPE.row_bytes
    front = np.frombuffer(data[:whole].rjust(whole, b"\0"), np.uint8).copy()
    record.read_records([_front_of(0), front, _front_of(2), _front_of(3)], SHAPE, 0, 9)


def _address() -> FabricAddress:
    return FabricAddress(7, b"engine")


def _key() -> RegionKey:
    return RegionKey(7, 1, 2, 4096, 3, b"engine")


def _metadata() -> list[bytes]:
    entry = metadata.entry(Place(nixl_mem_t.DRAM_SEG, 0, 4096, 4096), _key())
    return [metadata.pack("agent", _address(), 3, True, [entry, entry]), metadata.pack("agent", None, 4, False, [])]


def _read_metadata(data: bytes) -> None:
    metadata.unpack(data)


def _recording() -> list[bytes]:
    spans = [Span(name="a", begin_ns=1, end_ns=2, args={"n": 3})]
    one = Recording(name="a", host="h", wall_offset_ns=3, events=[], spans=spans)
    return [msgspec.json.encode(one), msgspec.json.encode({"recordings": [one]})]


def _read_recording(data: bytes) -> None:
    path = FOLDER / "recording.json"
    path.write_bytes(data)
    Recording.load_all(path)


def _bodies() -> list[bytes]:
    return [
        b'{"model":"tiny","prompt":"hello","max_tokens":4,"temperature":0.5,"stop":["x"],"stream":true}',
        b'{"model":"open","prompt":[1,2,3],"seed":7,"top_k":5,"guided":{"a":[1.5,null]},"logit_bias":{}}',
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"top_p":1}',
    ]


def _read_body(data: bytes) -> None:
    limits = Limits(16, 60.0)
    for chat in (False, True):
        with suppress(ApiFault):
            ask = read_ask(data, chat=chat, cards=CARDS, limits=limits, deadline_seconds=60.0)
            msgspec.json.encode(ask.request.fields)


def _read_prompt(data: bytes) -> None:
    node_messages.decode_prompt(data, 3, 256)


def _read_settings(data: bytes) -> None:
    path = FOLDER / "settings.toml"
    path.write_bytes(data)
    load_settings(file=path)


def _read_quantity(text: str) -> None:
    for read in (parse_size, parse_duration):
        with suppress(ValueError):
            read(text)


def _read_header(data: bytes) -> None:
    read_deadline({"type": "http", "headers": [(b"x-asyncfabric-deadline", data)]}, 60.0)


DECODERS: dict[str, Decoder] = {
    "control.frame": Decoder(control.decode, _frames),
    "control.directory": Decoder(_both, _directory),
    "control.zap": Decoder(_zap, lambda: [b"1.0|1|global|127.0.0.1||CURVE|" + b"\0" * 32]),
    "control.address": Decoder(
        _text(LinkAddress.parse), lambda: [b"ipc:///x", b"tcp://h:1#curve=" + b"0" * 64], (ValueError,)
    ),
    "control.trusted": Decoder(_text(parse_trusted), lambda: [b"0" * 64 + b" role=decode,prefill # x"], (ValueError,)),
    "actors.frame": Decoder(_read_actors, _actors, (wire.UnknownFrame,)),
    "kv.message": Decoder(_read_kv, _kv, (RemoteProtocolError,)),
    "weights.message": Decoder(weights.decode_message, _weights, (RemoteProtocolError,)),
    "weights.plan": Decoder(plans.from_bytes, _plan, (ValueError,)),
    "weights.delta": Decoder(_read_delta, lambda: [codings.encode_delta(OLD, _changed(), 2) or b""], (ValueError,)),
    "weights.exponents": Decoder(
        _read_exponents, lambda: [codings.encode_exponents(np.zeros(4096, np.uint8), 2) or b""], (ValueError,)
    ),
    "moe.record": Decoder(_read_record, _records, (RemoteProtocolError,)),
    "moe.card": Decoder(decode_card, lambda: [msgspec.msgpack.encode(_CARD)], (RemoteProtocolError,)),
    "nixl.metadata": Decoder(_read_metadata, _metadata, (nixlMismatchError,)),
    "nixl.text": Decoder(
        _text(metadata.unpack), lambda: [b"AFnx\x01\0\0\1\0\0" + b"\0" * 12 + b"a"], (nixlMismatchError,)
    ),
    "nixl.note": Decoder(notes.read_message, lambda: list(notes.messages_of(b"agent", 3, b"x" * 100))),
    "api.address": Decoder(FabricAddress.from_bytes, lambda: [_address().to_bytes()], (ValueError,)),
    "api.text": Decoder(_text(FabricAddress.parse), lambda: [str(_address()).encode()], (ValueError,)),
    "api.key": Decoder(RegionKey.from_bytes, lambda: [_key().to_bytes()], (ValueError,)),
    "api.rail": Decoder(_text(RailSpec.parse), lambda: [b"verbs:mlx5_0?gid=3&mtu=1024", b"tcp:lo"], (ValueError,)),
    "observe.context": Decoder(_text(parse_context), lambda: [b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"]),
    "observe.recording": Decoder(_read_recording, _recording, (ValueError,)),
    "services.body": Decoder(_read_body, _bodies),
    "services.prompt": Decoder(_read_prompt, lambda: [node_messages.encode_prompt([1, 2, 3])], (ValueError,)),
    "services.settings": Decoder(
        _read_settings, lambda: [b'[http]\nport = 8000\n\n[cluster]\nrails = "tcp:lo"\n'], (SettingsError,)
    ),
    "services.quantity": Decoder(_text(_read_quantity), lambda: [b"64KiB", b"1.5GiB", b"250ms", b"30s"]),
    "services.deadline": Decoder(_read_header, lambda: [b"30s", b"250ms"], (ApiFault,)),
}

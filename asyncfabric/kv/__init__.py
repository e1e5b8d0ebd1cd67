"""asyncfabric.kv: KvCache streaming between the nodes of disaggregated inference. The public door; no logic.

Leaseholder (decode):  open_pool, open_inbox; lease = await pool.lease(...); async with inbox.request(lease, ...).
Source (prefill):      open_pool, open_outbox(handler); async with job.open_stream(pages); stream.push(layer, tokens).
Both:                  KvLayout states how pages lie; open_kv_channel carries messages, deliver hands them to the ends.
"""

from asyncfabric.kv.channel import KV_CODEC, KvChannel, MessageHandler, deliver, member_name, open_kv_channel
from asyncfabric.kv.inbox import KvInbox, KvRequest, open_inbox
from asyncfabric.kv.layout import DTYPE_BYTES, KvLayout
from asyncfabric.kv.lease import KvLease
from asyncfabric.kv.ledger import LedgerReport, PageLedger
from asyncfabric.kv.messages import (
    KvAccepted,
    KvCancel,
    KvMessage,
    KvOffer,
    KvRefused,
    KvStopped,
    decode_message,
    encode_message,
)
from asyncfabric.kv.opening import open_pool
from asyncfabric.kv.outbox import KvJob, KvOutbox, open_outbox
from asyncfabric.kv.pool import KvPool, PageTicket
from asyncfabric.kv.posting import StreamProgress, StreamWrite
from asyncfabric.kv.protocol import SourceAction, SourceMachine, SourceVerdict, TargetMachine, TargetState
from asyncfabric.kv.relayout import Batch, KvPlan, PlacedPlan, context_rank, expected_arrivals, serves, writes_anything
from asyncfabric.kv.stream import KvStream, open_stream
from asyncfabric.kv.why import waiting

__all__ = [
    "DTYPE_BYTES",
    "KV_CODEC",
    "Batch",
    "KvAccepted",
    "KvCancel",
    "KvChannel",
    "KvInbox",
    "KvJob",
    "KvLayout",
    "KvLease",
    "KvMessage",
    "KvOffer",
    "KvOutbox",
    "KvPlan",
    "KvPool",
    "KvRefused",
    "KvRequest",
    "KvStopped",
    "KvStream",
    "LedgerReport",
    "MessageHandler",
    "PageLedger",
    "PageTicket",
    "PlacedPlan",
    "SourceAction",
    "SourceMachine",
    "SourceVerdict",
    "StreamProgress",
    "StreamWrite",
    "TargetMachine",
    "TargetState",
    "context_rank",
    "decode_message",
    "deliver",
    "encode_message",
    "expected_arrivals",
    "member_name",
    "open_inbox",
    "open_kv_channel",
    "open_outbox",
    "open_pool",
    "open_stream",
    "serves",
    "waiting",
    "writes_anything",
]

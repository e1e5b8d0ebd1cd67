"""asyncfabric.kv: KvCache streaming between the nodes of disaggregated inference. The public door; no logic.

Leaseholder (decode):  open_pool, open_inbox; lease = await pool.lease(...); async with inbox.request(lease, ...).
Source (prefill):      open_pool, open_outbox(handler); async with job.open_stream(pages); stream.push(layer, tokens).
Both:                  KvLayout says how pages lie; deliver(messenger, handlers) moves the protocol's messages.
"""

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
from asyncfabric.kv.messenger import FabricMessenger, MessageHandler, Messenger, deliver
from asyncfabric.kv.opening import open_pool
from asyncfabric.kv.outbox import KvJob, KvOutbox, open_outbox
from asyncfabric.kv.pool import KvPool, PageTicket
from asyncfabric.kv.posting import StreamProgress, StreamWrite
from asyncfabric.kv.protocol import SourceAction, SourceMachine, SourceVerdict, TargetMachine, TargetState
from asyncfabric.kv.relayout import Batch, KvPlan, PlacedPlan, context_rank, expected_arrivals, serves
from asyncfabric.kv.stream import KvStream, open_stream
from asyncfabric.kv.why import waiting

__all__ = [
    "DTYPE_BYTES",
    "Batch",
    "FabricMessenger",
    "KvAccepted",
    "KvCancel",
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
    "Messenger",
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
    "open_inbox",
    "open_outbox",
    "open_pool",
    "open_stream",
    "serves",
    "waiting",
]

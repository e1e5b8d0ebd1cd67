"""All or nothing: a version of the weights serves everywhere whole, or nowhere. State machines and a log.

The coordinator decides (`Coordinator`, `DecisionLog`), each receiver obeys (`Receiver`), `checksums` say whether the
bytes are right. Who carries their messages and moves the bytes drives them; see docs/explain/weights.md.
"""

from asyncfabric.weights.commit.checksums import CHUNK_BYTES, ChecksumKind, checksums, wrong_chunks
from asyncfabric.weights.commit.coordinator import Coordinator, Phase
from asyncfabric.weights.commit.decision_log import DecisionLog
from asyncfabric.weights.commit.receiver import Receiver, State

__all__ = [
    "CHUNK_BYTES",
    "ChecksumKind",
    "Coordinator",
    "DecisionLog",
    "Phase",
    "Receiver",
    "State",
    "checksums",
    "wrong_chunks",
]

"""Reports of an update to the callers of its participants. Values only; imports no participant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stages:
    """Seconds that each stage was busy, and what went through; stages overlap."""

    convert_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    staging_wait_s: float = 0.0
    maxima_wait_s: float = 0.0
    bytes: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True)
class CodingReport:
    """What one trainer sent to one receiver that reads codings.

    Attributes:
        sender, receiver: names.
        coding: "full", "delta" or "exponent"; rows that it would not make shorter go as they are.
        plain_bytes: of weights and scales.
        sent_bytes: that were written instead.
        why: it was chosen.
    """

    sender: str
    receiver: str
    coding: str
    plain_bytes: int
    sent_bytes: int
    why: str

    @property
    def saved_bytes(self) -> int:
        """Bytes that did not have to be sent."""
        return self.plain_bytes - self.sent_bytes


@dataclass(frozen=True, slots=True)
class PublishReport:
    """How one trainer's part of an update went.

    Attributes:
        version: that was decided.
        seconds: from the call to the decision.
        wait_s: until every receiver had opened its memory.
        write_s: from the first box to the last write that ended; the stages below overlap in it.
        decide_s: from then to the decision.
        stages: seconds of work of each stage, bytes and writes.
        staged_bytes: the most that was staged at once.
        receivers: that this trainer wrote to.
        codings: for each receiver that reads a coding which this trainer writes: what was used, and why.
        sent_bytes: that were written, coded ones as they were sent; `stages` counts those that went plain.
    """

    version: int
    seconds: float
    wait_s: float
    write_s: float
    decide_s: float
    stages: Stages
    staged_bytes: int
    receivers: tuple[str, ...]
    codings: tuple[CodingReport, ...] = ()
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How an update went.

    Attributes:
        version: that was decided.
        receivers: that verified it.
        seconds: from the first trainer's offer that was complete to the decision.
        prepare_s: until every receiver had opened its memory.
        write_s: until every trainer's writes had ended.
        verify_s: until every receiver had verified; receivers verify while others still write.
        decide_s: for the log.
        prepare_core_s: core time of the coordinator's process until every trainer had been told to write.
        codings: what trainers said of those receivers that read codings which they write.
        sent_bytes: that trainers wrote, coded ones as they were sent; what receivers forwarded is not in it.
    """

    version: int
    receivers: tuple[str, ...]
    seconds: float
    prepare_s: float
    write_s: float
    verify_s: float
    decide_s: float
    prepare_core_s: float
    codings: tuple[CodingReport, ...] = ()
    sent_bytes: int = 0

"""Everything that a prediction takes for granted: one named number each, with where it comes from. Values only."""

from __future__ import annotations

import msgspec


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per rank. The defaults are published or measured figures, not what hardware promises.

    Attributes:
        rail_gbits_per_s: nominal rate of a rank's network port, each way.
        rail_efficiency: part of it that pipelined writes reach. Published for ConnectX-7: 370 of 400 Gb/s for pages of
            64 KiB, 378 for writes of 32 MiB; for EFA 364 and 336.
        message_us: least time that one write keeps the rail busy. Published: 0.09 us (11.1 million writes a second
            of 1 KiB, ConnectX-7), 0.15 us to post one to a further peer; EFA 0.5 us.
        offloaded: whether the trainer's weights lie in host memory between steps.
        bring_gbytes_per_s: host to device, pinned. Measured on an H200: 54.7.
        convert_gbytes_per_s: of bf16 that is cast, fused or quantised. Worked out from what is published of the same
            update: 88 ms to quantise and 18 ms to fuse, if each of 256 ranks converted its part of 2.06 TB.
        node_gbytes_per_s: of one rank's port inside a node. Measured on H200s: 266 by NCCL, four pairs at once.
        node_ranks: ranks of a replica that share a node.
        watermark_bytes: scratch of a trainer: what was brought, or converted, and is not yet written.
        unit_bytes: bytes of shards that are brought and converted together before they are written.
        skew_s: trainers begin spread evenly over this time, because steps do not end at the same moment.
        verify_gbytes_per_s: a receiver reads what has arrived to check it, while the rest arrives; the last unit of
            each sender is checked after the last byte.
        commit_s: announcing, collecting the answer of every rank, deciding. Some 400 small messages at 20 us.
        step_s: resolution of the simulation; every result is rounded up to it.
    """

    rail_gbits_per_s: float = 400.0
    rail_efficiency: float = 0.925
    message_us: float = 0.15
    offloaded: bool = True
    bring_gbytes_per_s: float = 54.7
    convert_gbytes_per_s: float = 76.0
    node_gbytes_per_s: float = 266.0
    node_ranks: int = 8
    watermark_bytes: int = 1 << 30
    unit_bytes: int = 16 << 20
    skew_s: float = 0.010
    verify_gbytes_per_s: float = 300.0
    commit_s: float = 0.010
    step_s: float = 0.001

    def __post_init__(self) -> None:
        for name in (
            "rail_gbits_per_s",
            "rail_efficiency",
            "bring_gbytes_per_s",
            "convert_gbytes_per_s",
            "node_gbytes_per_s",
            "node_ranks",
            "watermark_bytes",
            "unit_bytes",
            "verify_gbytes_per_s",
            "step_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.rail_efficiency > 1 or min(self.message_us, self.skew_s, self.commit_s) < 0:
            raise ValueError("rail_efficiency must be at most 1; message_us, skew_s and commit_s must not be negative")
        if self.unit_bytes > self.watermark_bytes:
            raise ValueError(
                f"one unit of {self.unit_bytes} bytes does not fit under {self.watermark_bytes} of scratch"
            )

    @property
    def rail_bytes_per_s(self) -> float:
        """What a rail really carries, each way."""
        return self.rail_gbits_per_s / 8 * 1e9 * self.rail_efficiency

"""What a prediction of dispatch and combine between GPUs takes for granted: one named number each. Values only."""

from __future__ import annotations

import msgspec


class MoeAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per rank, one GPU with one port. By the nodes GPUs ran on one machine only: the uncited is guessed.

    Attributes:
        rail_gbits_per_s: nominal rate of a rank's network port, each way: 50 GB/s.
        rail_efficiency: part of it that writes reach. Published for ConnectX-7: 370 of 400 Gb/s for pages of 64 KiB,
            378 for writes of 32 MiB.
        message_us: least time that one write keeps the rail busy. Published: 0.15 us to post one to a further peer.
        node_gbytes_per_s: of one rank's port inside a node. Measured on H200s: 266 by NCCL, four pairs at once.
        memory_gbytes_per_s: bytes read and written by kernels that pack, place and add rows. Guess: 3,000 of 4,800.
        launch_us: from one kernel to the next inside a captured graph, and its ramp. Guess.
        proxy_us: from the word that a kernel stores to the first write on the rail. Guess.
        latency_us: from the last byte sent to its arrival being counted. Guess, of a write between two switches.
        notify_us: from the count to the word that a waiting kernel sees. Guess.
        node_latency_us: of a flag in another GPU of the node. Guess.
        pieces: equal parts of the tokens, dispatched as steps in flight: inside the node one part goes on while the
            rail carries the next. Each part waits for the records of all ranks, as the exchange does.
        node_ranks: ranks of a node, where the exchange itself knows of no nodes.
        step_us: resolution of the simulation; every result is rounded up to it.
    """

    rail_gbits_per_s: float = 400.0
    rail_efficiency: float = 0.925
    message_us: float = 0.15
    node_gbytes_per_s: float = 266.0
    memory_gbytes_per_s: float = 3000.0
    launch_us: float = 2.0
    proxy_us: float = 3.0
    latency_us: float = 3.0
    notify_us: float = 1.5
    node_latency_us: float = 1.5
    pieces: int = 4
    node_ranks: int = 8
    step_us: float = 0.25

    def __post_init__(self) -> None:
        for name in (
            "rail_gbits_per_s",
            "rail_efficiency",
            "node_gbytes_per_s",
            "memory_gbytes_per_s",
            "pieces",
            "node_ranks",
            "step_us",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.rail_efficiency > 1:
            raise ValueError(f"rail_efficiency must be at most 1, got {self.rail_efficiency}")
        for name in ("message_us", "launch_us", "proxy_us", "latency_us", "notify_us", "node_latency_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def rail_bytes_per_us(self) -> float:
        """What a rail really carries, each way."""
        return self.rail_gbits_per_s / 8 * 1e3 * self.rail_efficiency

    @property
    def node_bytes_per_us(self) -> float:
        """What a port inside a node carries, each way."""
        return self.node_gbytes_per_s * 1e3

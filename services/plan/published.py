"""Updates that others published, to stand beside a prediction of the same shape, like beside like. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncfabric.weights.plan.cards import ModelCard
from asyncfabric_services.plan.layout import PlannedCluster


class Published(NamedTuple):
    """One measured update.

    Attributes:
        model, train, infer: its shape, float8 on the replicas.
        seconds: from the first step to the last.
        waiting_seconds: of them ranks waited for other ranks, which is what `--skew` assumes.
        source: where it was published.
    """

    model: str
    train: int
    infer: int
    seconds: float
    waiting_seconds: float
    source: str

    def summary(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "seconds": self.seconds,
            "waiting_seconds": self.waiting_seconds,
            "seconds_without_waiting": round(self.seconds - self.waiting_seconds, 3),
            "source": self.source,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what stands beside a prediction: the whole with its waiting, and the rest without."""
        waiting_ms = round(1e3 * self.waiting_seconds)
        yield (
            "published",
            f"{self.seconds:.3f} s ({self.source}), {waiting_ms} ms of it waiting: like --skew {waiting_ms}ms",
        )
        yield "without its waiting", f"{self.seconds - self.waiting_seconds:.3f} s: like --skew 10ms"


NICS: dict[str, dict[str, float]] = {"connectx-7": {}, "efa": {"rail_efficiency": 0.84, "message_us": 0.5}}
"""What others published of 400 Gb/s ports, as changes of the default assumptions: fabric-lib, arXiv 2510.27656."""
PUBLISHED = (Published("kimi-k2", 256, 128, 1.233, 0.357, "fabric-lib, arXiv 2510.27656"),)


def published_of(card: ModelCard, cluster: PlannedCluster) -> Published | None:
    """Return what was published of this shape, or None."""
    shape = (card.name, cluster.trainer.ranks, cluster.replica.ranks * cluster.replicas, cluster.replica.fp8)
    return next((one for one in PUBLISHED if (one.model, one.train, one.infer, True) == shape), None)

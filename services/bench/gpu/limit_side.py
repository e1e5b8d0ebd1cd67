"""The bare copies of GPUs as contenders; see limit_worker.py. Beside LimitSide, with what both are asked for."""

from __future__ import annotations

import math
from typing import Any

from asyncfabric_services.bench.options import MIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender

LARGE_BYTES = 1024 * MIB


class GpuLimitSide:
    """The bare copies of one run; only the initiator of the pair has work."""

    def __init__(self, pair: BenchPair, options: Options) -> None:
        """Make the memory."""
        self._call = pair.initiator.call
        self._large = max(min(LARGE_BYTES, options.region_bytes), *options.sizes)
        self._gpus = self._call("memory", length_bytes=self._large)

    def core_distance(self) -> dict[str, Any]:
        """State what the machine is, as keys of a row."""
        return {"gpus": self._gpus}

    def write_limits(self, op_bytes: int, _window: int) -> list[Contender]:
        """Return the copy between two GPUs in one process, all in flight."""
        return [self.copy("peer_copy", op_bytes)]

    def page_limits(self, page_bytes: int, pages: int) -> list[Contender]:
        """Return plain copies of 1 GiB, or of the region; one op takes as long as the bytes of one list do there."""
        list_bytes = page_bytes * pages

        def repeat(rounds: int) -> float:
            count = math.ceil(rounds * list_bytes / self._large)
            seconds = float(self._call("copy", limit="peer_copy", op_bytes=self._large, count=count, awaited=False))
            return seconds * rounds * list_bytes / (count * self._large)

        return [Contender("peer_copy_large", repeat)]

    def copy(self, limit: str, op_bytes: int, *, awaited: bool = False) -> Contender:
        """Return a copy: peer_copy, pinned_up or pinned_down."""

        def repeat(count: int) -> float:
            return float(self._call("copy", limit=limit, op_bytes=op_bytes, count=count, awaited=awaited))

        return Contender(f"{limit}_awaited" if awaited else limit, repeat)

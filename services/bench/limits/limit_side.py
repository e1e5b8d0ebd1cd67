"""The limits as contenders: bare loops in two processes of their own, so that no fabric thread runs in them.

One `LimitSide` belongs to one command; it holds memory of the same size as the fabric's, walked in the same order.
"""

from __future__ import annotations

from typing import Any

from asyncfabric.bench.write import slot_count
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender
from asyncfabric_services.exits import EnvironmentUnfit

LIBFABRIC_PROFILES = ("tcp",)

SMALLEST_COPY = 4096
"""Below this a write over shared memory costs its notice, not its copy: it has a rate of ops and no ratio."""


class LimitSide:
    """The bare loops of one run."""

    def __init__(self, pair: BenchPair, options: Options) -> None:
        """Make the memory of both processes."""
        self._pair = pair
        self._options = options
        pair.initiator.call("memory", length_bytes=options.region_bytes, seed=options.seed)
        self._memory = pair.target.call("memory", length_bytes=options.region_bytes, seed=None)
        self._mirror = False
        self._stream = False
        self.libfabric_facts: dict[str, Any] = {}

    def core_distance(self) -> dict[str, Any]:
        """State in which of its modes the machine is now, as keys of a row."""
        cores, round_trip = self._pair.initiator.call("core_distance")
        return {"cores": cores, "core_round_trip_us": round_trip}

    def non_temporal_kind(self) -> str:
        """Return which streaming stores memcpy_nt uses."""
        return str(self._pair.initiator.call("non_temporal_kind"))

    def walk_bytes(self, op_bytes: int) -> int:
        """Return the part of the region that a workload of this op size walks round."""
        return slot_count(self._options.region_bytes, op_bytes) * op_bytes

    def write_limits(self, op_bytes: int, window: int) -> list[Contender]:
        """Return the limits of plain writes of the run's provider and memory; none where no copy loop compares."""
        carrier = self._options.carrier
        if carrier == "local" and op_bytes < SMALLEST_COPY:
            return []
        if carrier == "local" and self._options.memory == "foreign":
            return [self.cma(op_bytes)]
        if carrier == "local":
            return [self.copy("memcpy", op_bytes), self.copy("memcpy_nt", op_bytes)]
        found = self.libfabric(carrier, op_bytes, window)
        if found is not None:
            return [found]
        return [self.stream(op_bytes) if carrier == "tcp" else self.cma(op_bytes)]

    def page_limits(self, page_bytes: int, pages: int) -> list[Contender]:
        """Return the limits of page lists of the run's provider and memory."""
        carrier = self._options.carrier
        if carrier == "local" and self._options.memory == "foreign":
            return [self.cma_pages(page_bytes, pages)]
        if carrier == "local":
            return [self.copy_pages(name, page_bytes, pages) for name in ("memcpy", "memcpy_nt")]
        found = self.libfabric_pages(carrier, page_bytes, pages)
        return [found or self.cma_pages(page_bytes, pages)]

    def copy(self, limit: str, op_bytes: int) -> Contender:
        """Return a one-thread copy."""
        self._need_mirror()
        walk = self.walk_bytes(op_bytes)
        call = self._pair.initiator.call
        return Contender(
            limit, lambda count: float(call("copy", limit=limit, walk_bytes=walk, op_bytes=op_bytes, count=count))
        )

    def copy_pages(self, limit: str, page_bytes: int, pages: int) -> Contender:
        """Return a one-thread copy page by page; one op is the whole list."""
        self._need_mirror()

        def repeat(rounds: int) -> float:
            return sum(
                self._seconds(
                    "copy_pages", limit=limit, page_bytes=page_bytes, count=pages, list_seed=self._options.seed + turn
                )
                for turn in range(rounds)
            )

        return Contender(f"{limit}_pages", repeat)

    def cma(self, op_bytes: int) -> Contender:
        """Return process_vm_writev into the other process."""
        walk = self.walk_bytes(op_bytes)
        where = {"pid": self._pair.target.pid, "address": self._memory["address"]}
        call = self._pair.initiator.call
        return Contender(
            "cma", lambda count: float(call("cma", **where, walk_bytes=walk, op_bytes=op_bytes, count=count))
        )

    def cma_pages(self, page_bytes: int, pages: int) -> Contender:
        """Return process_vm_writev of a page list; one op is the whole list."""
        where = {"pid": self._pair.target.pid, "address": self._memory["address"]}

        def repeat(rounds: int) -> float:
            return sum(
                self._seconds(
                    "cma_pages", **where, page_bytes=page_bytes, count=pages, list_seed=self._options.seed + turn
                )
                for turn in range(rounds)
            )

        return Contender("cma_pages", repeat)

    def stream(self, op_bytes: int) -> Contender:
        """Return one TCP stream on loopback."""
        if not self._stream:
            port = self._pair.target.call("listen")
            self._pair.target.start("accept")
            self._pair.initiator.call("connect", port=port)
            self._pair.target.finish()
            self._stream = True
        walk = self.walk_bytes(op_bytes)

        def repeat(count: int) -> float:
            self._pair.target.start("stream_receive", walk_bytes=walk, total_bytes=count * op_bytes)
            seconds = float(self._pair.initiator.call("stream_send", walk_bytes=walk, op_bytes=op_bytes, count=count))
            self._pair.target.finish()
            return seconds

        return Contender("tcp_stream", repeat)

    def libfabric(self, profile: str, op_bytes: int, window: int) -> Contender | None:
        """Return the bare libfabric loop over writes with immediates, None where the library is missing."""
        return self._libfabric(profile, "writes", op_bytes, window, 1)

    def libfabric_pages(self, profile: str, page_bytes: int, pages: int) -> Contender | None:
        """Return the bare libfabric loop over page lists; one op is the whole list."""
        return self._libfabric(profile, "pages", page_bytes, pages, pages)

    def _libfabric(self, profile: str, workload: str, op_bytes: int, window: int, pages: int) -> Contender | None:
        def repeat(count: int) -> float:
            facts = self._run_libfabric(profile, workload, op_bytes, count, window, pages)
            if not facts["verified"]:
                raise EnvironmentUnfit(f"the bare loop over {profile} delivered wrong bytes")
            self.libfabric_facts = facts
            return float(facts["seconds"])

        try:
            repeat(4)
        except EnvironmentUnfit:
            return None
        return Contender("libibverbs" if profile == "verbs" else f"libfabric_{profile}", repeat)

    def libfabric_round_trip(self, profile: str, count: int) -> dict[str, Any] | None:
        """Return the facts of a bare libfabric ping-pong, None where the library is missing."""
        try:
            return self._run_libfabric(profile, "ping-pong", 0, count, 1, 1)
        except EnvironmentUnfit:
            return None

    def _run_libfabric(
        self, profile: str, workload: str, op_bytes: int, count: int, window: int, pages: int
    ) -> dict[str, Any]:
        arguments = {
            "profile": profile,
            "workload": workload,
            "op_bytes": op_bytes,
            "operations": count,
            "window": window,
            "pages": pages,
            "region_bytes": self._options.region_bytes,
        }
        self._pair.target.start("libfabric", **arguments, initiator=False)
        self._pair.initiator.start("libfabric", **arguments, initiator=True)
        # Both answers are read before either is judged: an error of one end must not leave the other's in the pipe.
        outcomes: list[Any] = []
        for process in (self._pair.initiator, self._pair.target):
            try:
                outcomes.append(process.finish())
            except EnvironmentUnfit as error:
                outcomes.append(error)
        for outcome in outcomes:
            if isinstance(outcome, EnvironmentUnfit):
                raise outcome
        facts: dict[str, Any] = outcomes[0]
        return facts

    def _seconds(self, command: str, **arguments: Any) -> float:
        return float(self._pair.initiator.call(command, **arguments))

    def _need_mirror(self) -> None:
        if not self._mirror:
            self._pair.initiator.call("mirror")
            self._mirror = True

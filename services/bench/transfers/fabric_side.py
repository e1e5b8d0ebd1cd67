"""Two processes with fabrics (or bare engines) that know each other, as the coordinator drives them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncfabric.bench.write import slot_count
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender


class FabricSide:
    """An open, connected pair with one region at each end; counts what the target's counter must have reached.

    Attributes:
        arrivals: what the target's counter must show once everything sent so far has arrived.
        returns: the same for the initiator's counter.
        address_there: that of the target, as hexadecimal digits.
        rail: what the first rail reports it is, for rows.
        receiver: the end that bytes go to, whose memory is poisoned and checked.
    """

    def __init__(
        self,
        pair: BenchPair,
        options: Options,
        memory: str,
        region_bytes: int,
        memory_there: str | None = None,
        reads: bool = False,
    ) -> None:
        """Open both ends and connect them.

        Args:
            pair: the processes.
            options: of the run.
            memory: the kind of memory at both ends.
            region_bytes: how much of it.
            memory_there: the kind of the target's memory, where it is another.
            reads: the initiator reads what the target has, instead of writing.
        """
        self.pair = pair
        self.options = options
        self.receiver = pair.initiator if reads else pair.target
        self._reads = reads
        self.arrivals = 0
        self.returns = 0
        self.samples_ns: list[float] = []
        self._region_bytes = region_bytes
        self._most_ops = 0
        pair.initiator.start("open", config=options.engine)
        pair.target.start("open", config=options.engine_there)
        here, there = pair.initiator.finish(), pair.target.finish()
        self.address_there: str = there["address"]
        seeds = (None, options.seed) if reads else (options.seed, None)
        our_key = pair.initiator.call("memory", kind=memory, length_bytes=region_bytes, seed=seeds[0])
        their_key = pair.target.call("memory", kind=memory_there or memory, length_bytes=region_bytes, seed=seeds[1])
        pair.initiator.start("connect", address=there["address"], key=their_key)
        pair.target.start("connect", address=here["address"], key=our_key)
        pair.initiator.finish()
        pair.target.finish()
        self.imm: int = there["imm"]
        self.own_imm: int = here["imm"]
        self.rail = {"library": here["library"], "version": here["version"]}

    def walk_bytes(self, op_bytes: int) -> int:
        """Return the part of the region that a workload of this op size walks round."""
        return slot_count(self._region_bytes, op_bytes) * op_bytes

    def writes(self, op_bytes: int, window: int) -> Contender:
        """Return writes through the Python API, `window` in flight; keeps the durations of the repeats that count."""

        def repeat(count: int) -> float:
            call = self.pair.initiator.call
            run = call("write_window", op_bytes=op_bytes, window=window, count=count, imm=self.imm)
            self.note_sent(count, run["samples_ns"])
            return float(run["seconds"])

        return Contender("asyncfabric", repeat)

    def engine_writes(self, op_bytes: int, window: int) -> Contender:
        """Return writes by the native loop; a repeat ends when both ends are done: sender drained, receiver counted."""
        walk = self.walk_bytes(op_bytes)

        def repeat(count: int) -> float:
            self.pair.target.start("spin", target=self.arrivals + count)
            run = self.pair.initiator.call(
                "write_window", walk_bytes=walk, op_bytes=op_bytes, window=window, count=count, imm=self.imm
            )
            counted = self.pair.target.finish()
            self.note_sent(count, run["samples_ns"])
            return float(max(run["finished_ns"], counted) - run["started_ns"]) / 1e9

        return Contender("asyncfabric", repeat)

    def forget_samples(self, _: Contender) -> None:
        """Drop what the warm-up left."""
        self.samples_ns = []

    def poison(self) -> None:
        """Poison the receiver, before a new op size."""
        self._most_ops = 0
        self.receiver.call("poison")

    def check_writes(self, op_bytes: int) -> str:
        """Wait for all counts, then compare the target with what was sent; "" is good."""
        self.wait_arrivals()
        written = min(self.walk_bytes(op_bytes), self._most_ops * op_bytes)
        return str(self.pair.target.call("check_prefix", seed=self.options.seed, written=written))

    def wait_arrivals(self) -> None:
        """Wait until the target has counted everything that was sent."""
        self.pair.target.call("wait", target=self.arrivals)

    def check_counts(self) -> str:
        """Check that both counters show exactly what was sent, no more; "" is good."""
        ours, theirs = self.pair.initiator.call("value"), self.pair.target.call("value")
        if (ours, theirs) == (self.returns, self.arrivals):
            return ""
        return f"counters show {ours} and {theirs}, sent were {self.returns} and {self.arrivals}"

    def note_sent(self, count: int, samples_ns: Sequence[float] = ()) -> None:
        """Note that the target will have counted `count` more, reads apart, and the durations of these ops."""
        self.arrivals += 0 if self._reads else count
        self._most_ops = max(self._most_ops, count)
        self.samples_ns += samples_ns

"""A whole Engine in pure Python: the rules of the native one, in one process, for tests of programs that use fabrics.

Any thread may submit; work is delivered inline under the lock of the network, and completions ring a real eventfd.
Here are the data calls of `asyncfabric._bridge.engine.Engine`, where each is documented, and what they check before
anything is posted. The other calls are in fake_control, the state in fake_core, each part in a fake_*.py of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncfabric._bridge.engine import ClosingInfo, Completion
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing import fake_plan
from asyncfabric.testing.fake_control import ControlCalls
from asyncfabric.testing.fake_ops import Leg

MAX_MESSAGE_BYTES = 8192


class FakeEngine(ControlCalls):
    """One engine on a FakeNetwork.

    Args:
        config: as for a native engine; each of its rails is a fake one and shows it in its provider name.
        network: who can be reached; None joins the network of the process.
        place: `fake_address.place` of a dead engine, to restart at its address with a new incarnation.
    """

    # Data ops.

    def submit_write(
        self, cookie: int, region: int, offset: int, length: int, key: int, target_offset: int, imm: int, after: int = 0
    ) -> int:
        """Write a range; counts 1 at the target."""
        del after  # a fake makes no marks, and one that is not there has passed
        with self.network.lock:
            source, target = self._open().regions.find(region), self._key(key)
            self.regions.check(source, offset, length)
            fake_plan.check_key(target, target_offset, length, "write")
            fake_plan.check_imm(imm)
            legs, tail = fake_plan.plan_write(self, source, offset, length, target, target_offset, imm)
            return self.ops.submit(cookie, legs, tail, (source,))

    def submit_read(self, cookie: int, region: int, offset: int, length: int, key: int, target_offset: int) -> int:
        """Read a range of a peer's region."""
        with self.network.lock:
            source, target = self._open().regions.find(region), self._key(key)
            self.regions.check(source, offset, length)
            fake_plan.check_key(target, target_offset, length, "read")
            legs = fake_plan.plan_read(self, source, offset, length, target, target_offset)
            return self.ops.submit(cookie, legs, (), (source,), is_read=True)

    def submit_write_pages(
        self,
        cookie: int,
        region: int,
        source_pages: Any,
        key: int,
        target_pages: Any,
        page_bytes: int,
        source_stride: int,
        target_stride: int,
        source_offset: int,
        target_offset: int,
        imm: int,
        after: int = 0,
    ) -> int:
        """Write pages by two lists of numbers, copied before this returns; counts one per page."""
        del after  # a fake makes no marks, and one that is not there has passed
        shape = (page_bytes, source_stride, target_stride, source_offset, target_offset)
        pages = fake_plan.read_pages(source_pages, target_pages, *shape)
        with self.network.lock:
            source, target = self._open().regions.find(region), self._key(key)
            fake_plan.check_key(target, 0, 0, "write")
            fake_plan.check_pages(pages, source.length, target.length)
            fake_plan.check_imm(imm)
            legs = fake_plan.plan_pages(self, source, target, pages, imm, "write")
            return self.ops.submit(cookie, legs, (), (source,))

    def submit_read_pages(
        self,
        cookie: int,
        region: int,
        source_pages: Any,
        key: int,
        target_pages: Any,
        page_bytes: int,
        source_stride: int,
        target_stride: int,
        source_offset: int,
        target_offset: int,
    ) -> int:
        """Read pages behind a key into pages of a region, by two lists of numbers, copied before this returns."""
        shape = (page_bytes, source_stride, target_stride, source_offset, target_offset)
        pages = fake_plan.read_pages(source_pages, target_pages, *shape)
        with self.network.lock:
            target, source = self._open().regions.find(region), self._key(key)
            fake_plan.check_key(source, 0, 0, "read")
            fake_plan.check_pages(pages, source.length, target.length)
            legs = fake_plan.plan_pages(self, target, source, pages, -1, "read")
            return self.ops.submit(cookie, legs, (), (target,), is_read=True)

    def submit_write_boxes(self, cookie: int, region: int, boxes: Any, key: int, sums: Any, imm: int) -> int:
        """Refuse: a fake gathers nothing."""
        raise refusal(StatusCode.UNSUPPORTED, f"{len(boxes)} boxes")

    def submit_scatter(self, cookie: int, region: int, targets: Sequence[tuple[int, int, int, int]], imm: int) -> int:
        """Write one range to each target; counts 1 at each."""
        with self.network.lock:
            source = self._open().regions.find(region)
            planned = []
            for key, source_offset, target_offset, length in targets:
                target = self._key(key)
                self.regions.check(source, source_offset, length)
                fake_plan.check_key(target, target_offset, length, "write")
                planned.append((target, source_offset, target_offset, length))
            fake_plan.check_imm(imm)
            return self.ops.submit(cookie, fake_plan.plan_scatter(self, source, planned, imm), (), (source,))

    def submit_signal(self, cookie: int, peers: Sequence[int], imm: int) -> int:
        """Count 1 at each peer."""
        with self.network.lock:
            found = [self._open().peer_table.find(peer) for peer in peers]
            fake_plan.check_imm(imm, required=True)
            return self.ops.submit(cookie, [Leg(self, peer.address, imm=imm) for peer in found])

    def submit_send(self, cookie: int, peer: int, payload: bytes) -> int:
        """Send a small message; it waits while the peer has no room for it."""
        with self.network.lock:
            found, payload = self._open().peer_table.find(peer), bytes(payload)
            if len(payload) > MAX_MESSAGE_BYTES:
                raise refusal(StatusCode.INVALID_ARGUMENT, f"{len(payload)} bytes, a message has {MAX_MESSAGE_BYTES}")
            return self.ops.submit(cookie, [Leg(self, found.address, len(payload), payload=payload)])

    def cancel(self, op: int) -> None:
        """Stop posting an op; it ends when nothing of it is in flight."""
        with self.network.lock:
            self.ops.cancel(op)
            if self.ops.draining:
                self._ticker.start()

    def arm_writable(self, cookie: int) -> None:
        """Notify once when an op would be accepted."""
        with self.network.lock:
            self._open().ops.arm_writable(cookie)

    # Counters and watch words.

    def open_counter(self, imm: int) -> tuple[int, int]:
        """Open the counter of an imm, or of a free one for -1."""
        with self.network.lock:
            return self._open().counters.open(fake_plan.check_imm(imm))

    def close_counter(self, counter: int) -> None:
        """Close; what still arrives is stale, and until it has the imm is not opened again."""
        with self.network.lock:
            imm = self.counters.close(counter)
            if imm is not None:
                for sender, op in self.network.counting(self.fake_address, imm):
                    self.counters.hold(imm, sender)
                    op.ended.append(partial(self.counters.release, imm, sender))
            self.network.changed.notify_all()

    def arm_closed(self, cookie: int, imm: int) -> None:
        """Notify once when an imm may be opened again."""
        with self.network.lock:
            self._open().counters.arm_closed(cookie, fake_plan.check_imm(imm, required=True))

    def closings(self, imm: int) -> list[ClosingInfo]:
        """Return the closes that wait for ops."""
        with self.network.lock:
            return [
                ClosingInfo(one, age_ns, tuple(peer.id for sender in senders if (peer := self.peer_table.of(sender))))
                for one, age_ns, senders in self.counters.closings(imm)
            ]

    def counter_value(self, counter: int) -> int:
        """Return what was counted, 0 of a closed counter."""
        with self.network.lock:
            return self.counters.value(counter)

    def arm_counter(self, counter: int, cookie: int, target: int) -> None:
        """Notify once when a counter has a value of at least `target`."""
        with self.network.lock:
            self._open().counters.arm(counter, cookie, target)

    def spin_counter(self, counter: int, target: int, deadline_ns: int) -> int:
        """Wait in this thread until a monotonic deadline; others may deliver meanwhile."""
        with self.network.lock:
            self._open().counters.check_open(counter)
            while (value := self.counters.value(counter)) < target:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise refusal(StatusCode.TIMEOUT, f"counter at {value} of {target}")
                self.network.changed.wait(left_ns * 1e-9)
                self._open().counters.check_open(counter)
            return value

    def counter_flag(self, counter: int) -> int:
        """Refuse: a fake has no GPU."""
        raise refusal(StatusCode.UNSUPPORTED, f"the flag of counter {counter}")

    def stream_wait(self, counter: int, stream: int, device: int, target: int) -> None:
        """Refuse: a fake has no GPU."""
        raise refusal(
            StatusCode.UNSUPPORTED, f"stream {stream:#x} of cuda:{device} waiting for {target} of counter {counter}"
        )

    def mark_stream(self, stream: int, device: int) -> int:
        """Refuse: a fake has no GPU."""
        raise refusal(StatusCode.UNSUPPORTED, f"a mark of stream {stream:#x} of cuda:{device}")

    def mark_word(self, watch: int, value: int) -> int:
        """Refuse: a fake posts at once."""
        raise refusal(StatusCode.UNSUPPORTED, f"a mark of watch word {watch:#x} at {value}")

    def drop_mark(self, mark: int) -> None:
        """Do nothing: there are no marks."""

    def open_watch(self) -> tuple[int, int]:
        """Open a 64-bit word; returns its handle and address."""
        with self.network.lock:
            return self._open().watches.open()

    def watch_load(self, watch: int) -> int:
        """Return the word."""
        with self.network.lock:
            return int(self.watches.word(watch).value)

    def watch_store(self, watch: int, value: int) -> None:
        """Store the word and look at all of them."""
        with self.network.lock:
            self._open().watches.word(watch).value = value
            self.watches.look()

    def arm_watch(self, watch: int, cookie: int, seen: int) -> None:
        """Notify once when the word is not `seen`."""
        with self.network.lock:
            self._open().watches.arm(watch, cookie, seen)
            if self.watches.armed:
                self._ticker.start()

    def close_watch(self, watch: int) -> None:
        """Close a word; idempotent."""
        with self.network.lock:
            self.watches.close(watch)

    # Completions.

    def completion_fd(self) -> int:
        """Return the eventfd that is readable when an armed engine has news."""
        return self._ring().fd

    def arm(self) -> bool:
        """Announce that the loop goes to sleep; False when it must not."""
        with self.network.lock:
            return self._ring().arm()

    def disarm(self) -> None:
        """Clear the fd after a wake-up."""
        with self.network.lock:
            self._ring().disarm()

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions."""
        with self.network.lock:
            taken = self._ring().poll(limit)
            self.ops.notify_writable()
            return taken

    def take_messages(self, limit: int, assist: bool = False) -> list[tuple[int, bytes]]:
        """Take up to `limit` messages, the oldest first; there is nothing to assist with."""
        with self.network.lock:
            taken = [self._messages.popleft() for _ in range(min(limit, len(self._messages)))]
            self.network.pump()  # a sender may have waited for the room
            return taken

    def spin_messages(self, limit: int, deadline_ns: int) -> list[tuple[int, bytes]]:
        """Wait in this thread until there is a message or a monotonic deadline; others may deliver meanwhile."""
        with self.network.lock:
            while not self._messages:
                self._open()
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise refusal(StatusCode.TIMEOUT, "no message came")
                self.network.changed.wait(left_ns * 1e-9)
            return self.take_messages(limit)

    def set_trace(self, on: bool) -> None:
        """Keep events, or stop."""
        with self.network.lock:
            self.trace.on = on

    def take_trace(self) -> list[tuple[int, int, int, int]]:
        """Return the newest events."""
        with self.network.lock:
            return list(self.trace.events)

    def assist(self) -> None:
        """Do nothing: a fake moves bytes in the calls that submit, or in step()."""

    def look(self) -> bool:
        """Return whether there are completions."""
        with self.network.lock:
            return len(self.ring) > 0

    def step(self) -> int:
        """Do one pass: post, look at words, deliver. Needed when polling is manual."""
        with self.network.lock:
            self.counts["steps"] += 1
            happened = self.ops.post_ready() + self.watches.look()
            self.network.pump()
            return happened

    def close(self) -> None:
        """End at once and for good; idempotent."""
        with self.network.lock:
            self._leave()
            self.ring.close()
        self._ticker.close()

"""Every order of the messages of one lease, tried one by one: what random interleavings find only by luck.

One leaseholder, one source, one lease. Each message may come at any time, two of them twice; the source
may lose sight of its target and forget old leases. KV-3: no order lets a source write after the pages were reusable.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest

from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.messages import KvCancel, KvMessage, KvOffer
from asyncfabric.kv.protocol import SourceAction, SourceMachine, TargetMachine, TargetState

DEPTH = 9
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="uint8")
OFFER = KvOffer(
    target=7,
    lease=5,
    reply_to=b"",
    layout=LAYOUT,
    digest="",
    tokens=1,
    rotation=0,
    pages=bytes(4),
    pool_pages=1,
    pages_key=b"",
    context_key=b"",
    layer_imms=(1,),
    context_imm=1,
    remaining_ns=1,
)


@dataclass
class World:
    """All there is to know; `history` is for the report."""

    target: TargetMachine = field(default_factory=lambda: TargetMachine(7, 5, (1,)))
    source: SourceMachine = field(default_factory=lambda: SourceMachine(remembered=1))
    to_source: list[KvMessage] = field(default_factory=lambda: [OFFER])
    to_target: list[KvMessage] = field(default_factory=list)
    streaming: bool = False
    written: int = 0
    doubled: int = 0
    lost: bool = False
    aged: bool = False
    history: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        return repr(
            (
                self.target,
                vars(self.source),
                self.to_source,
                self.to_target,
                self.streaming,
                self.written,
                self.doubled,
                self.lost,
                self.aged,
            )
        )

    def events(self) -> list[tuple[str, int]]:
        found = [("source receives", index) for index in range(len(self.to_source))]
        found += [("target receives", index) for index in range(len(self.to_target))]
        if self.doubled < 2:
            found += [("doubled", index) for index in range(len(self.to_source))]
        if self.target.state is TargetState.STREAMING:
            found.append(("cancel", 0))
        if self.streaming:
            found += [("write", 0), ("end", 0)]
        if not self.lost:
            found.append(("source loses target", 0))
        if not self.aged:
            found.append(("source ages", 0))
        return found

    def step(self, event: str, index: int) -> None:
        self.history += (f"{event} {index}",)
        if event == "source receives":
            self._source_receives(self.to_source.pop(index))
        elif event == "doubled":
            self.doubled += 1
            self._source_receives(self.to_source[index])
        elif event == "target receives":
            assert self.target.receive(1, self.to_target.pop(index))
        elif event == "cancel":
            self.to_source += [message for _, message in self.target.cancel()]
        elif event == "write":
            assert not self.target.reusable, f"written to pages that could be reused: {self.history}"
            self.written = 1
        elif event == "end":
            self.streaming = False
            stopped = self.source.ended(7, 5, clean=True, complete=bool(self.written), reason="done")
            if stopped is not None:
                self.to_target.append(stopped)
            if self.written:
                self.target.complete()
        elif event == "source loses target":
            self.lost = True
            self.source.lose(7)
        else:
            self.aged = True
            for newer in (8, 9):
                self._source_receives(KvCancel(target=7, lease=newer), answers=False)

    def _source_receives(self, message: KvMessage, *, answers: bool = True) -> None:
        action, answer = self.source.receive(message)
        if action is SourceAction.START:
            assert not self.target.reusable or not self.written, f"started again: {self.history}"
            self.streaming = True
        if answer is not None and answers:
            self.to_target.append(answer)


@pytest.mark.slow
def test_no_order_lets_a_source_write_after_the_end() -> None:
    seen: set[str] = set()
    reached: set[TargetState] = set()
    waiting = [World()]
    for _ in range(DEPTH):
        following = []
        for world in waiting:
            for event, index in world.events():
                after = copy.deepcopy(world)
                after.step(event, index)
                reached.add(after.target.state)
                mark = after.fingerprint()
                if mark not in seen:
                    seen.add(mark)
                    following.append(after)
        waiting = following
    assert reached == set(TargetState) and len(seen) > 500, (reached, len(seen))

"""A writer and a reader of one fake network, set up so that a test can hold, reorder or break what is in flight."""

from __future__ import annotations

from parties import Party

from asyncfabric._bridge.engine import CompletionKind
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine, FakeNetwork


class Stage:
    """A writer, a reader, a region in each, a key, and a counter, all on one network."""

    def __init__(self, network: FakeNetwork, config: FabricConfig | None = None, length: int = 4096) -> None:
        hold, network.hold = network.hold, False
        hold_control, network.hold_control = network.hold_control, False
        self.network, self.config, self.length = network, config or FabricConfig(), length
        self.engines = [FakeEngine(self.config, network), FakeEngine(self.config, network)]
        self.writer, self.reader = (Party(engine) for engine in self.engines)
        self.source, self.target = self.writer.allocate(length), self.reader.allocate(length)
        self.writer.fill(self.source, b"x" * length)
        self.key = self.writer.key_of(self.reader, self.target)
        self.peer = self.writer.connect(self.reader)
        self.counter, self.imm = self.reader.engine.open_counter(-1)
        network.hold, network.hold_control = hold, hold_control

    def write(self, cookie: int, length: int | None = None, *, counted: bool = True) -> int:
        """Submit a write of the first bytes."""
        length = self.length if length is None else length
        imm = self.imm if counted else -1
        return self.writer.engine.submit_write(cookie, self.source, 0, length, self.key, 0, imm)

    @property
    def value(self) -> int:
        """What was counted."""
        return self.reader.engine.counter_value(self.counter)

    @property
    def arrived(self) -> int:
        """How many bytes of the target are the writer's."""
        return self.reader.bytes_of(self.target).count(b"x")

    def codes(self) -> dict[int, int]:
        """What the writer's completions report, by cookie."""
        self.writer.gather()
        return {one.cookie: one.code for one in self.writer.seen if one.kind == CompletionKind.OP}


def set_up(stages: list[Stage], network: FakeNetwork, config: FabricConfig | None = None, length: int = 4096) -> Stage:
    """Return a stage that is closed after the test."""
    stages.append(Stage(network, config, length))
    return stages[-1]

"""Exchange of maxima of quantisation blocks that shards cut, among trainers (WT-2: maxima travel, weights do not).

Runs on the event loop's thread; measuring runs on worker threads, ahead of converting. It waits for nobody, so ranks
that wait for each other's maxima cannot wait for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from asyncfabric._notice import Notice
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights.channel import trainer_name
from asyncfabric.weights.memory.device import Measured
from asyncfabric.weights.messages import Maxima
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK
from asyncfabric.weights.plan.placement import shares
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.sender.shards import Shards
from asyncfabric.weights.threads import in_thread

Floats = NDArray[np.float32]

Key = tuple[int, int]
"""(parameter, kind)"""


class MaximaPart:
    """A part of a shard that another rank shares blocks with: which blocks of the shard those are."""

    __slots__ = ("count", "where")

    def __init__(self, start: Ints, size: Ints, origin: Ints) -> None:
        first = start[-2:] // BLOCK - origin[-2:] // BLOCK
        blocks = -(-(start + size)[-2:] // BLOCK) - start[-2:] // BLOCK
        lead = [slice(int(a), int(a + b)) for a, b in zip(start[:-2] - origin[:-2], size[:-2], strict=True)]
        tail = [slice(int(a), int(a + b)) for a, b in zip(first, blocks, strict=True)]
        self.where: tuple[slice, ...] = (*lead, *tail)
        self.count: int = int(np.prod(size[:-2]) * np.prod(blocks))


class Exchange:
    """What one trainer measures, sends and receives, for all versions."""

    def __init__(self, plan: Plan, rank: int, shards: Shards, sent: Iterable[Key]) -> None:
        """Work out which maxima go between which ranks.

        Args:
            plan: its geometry.
            rank: this trainer.
            shards: what it holds.
            sent: parameters and kinds that it converts, in its order.
        """
        self._plan = plan
        self._shards = shards
        self._gives: dict[Key, dict[int, list[MaximaPart]]] = {}
        self._takes: dict[Key, dict[int, list[MaximaPart]]] = {}
        self._origins: dict[Key, Ints] = {}
        self._version = 0
        self._early: list[tuple[int, Maxima]] = []
        self._found: dict[Key, Floats] = {}
        self._missing: dict[Key, set[int]] = {}
        self._waiting: dict[Key, list[tuple[int, Maxima]]] = defaultdict(list)
        self._changed = Notice()
        reported = {number: shares(plan.sources[kind.source]) for number, kind in enumerate(plan.kinds) if kind.block}
        mine = [
            key
            for key in dict.fromkeys(zip(plan.move_parameter.tolist(), plan.move_kind.tolist(), strict=True))
            if key[1] in reported and rank in plan.sources[plan.kinds[key[1]].source].ranks
        ]
        wanted = set(sent)
        for key in mine:
            placement, state = plan.sources[plan.kinds[key[1]].source], reported[key[1]]
            pad = shards.dims - len(placement.shape)
            origin = np.concatenate([np.zeros(pad, np.int64), placement.starts[placement.row_of(rank)]])
            self._origins[key] = origin
            gives: dict[int, list[MaximaPart]] = defaultdict(list)
            takes: dict[int, list[MaximaPart]] = defaultdict(list)
            for row in np.flatnonzero((state.to == rank) | (state.source == rank)).tolist():
                start = np.concatenate([np.zeros(pad, np.int64), state.starts[row]])
                size = np.concatenate([np.ones(pad, np.int64), state.sizes[row]])
                part = MaximaPart(start, size, origin)
                (gives if state.source[row] == rank else takes)[
                    int(state.to[row] if state.source[row] == rank else state.source[row])
                ].append(part)
            self._gives[key], self._takes[key] = gives, takes
        order = list(dict.fromkeys(key for key in sent if key in self._gives))
        self._order = order + [key for key in mine if key not in wanted and self._gives[key]]
        self._batches = list(self._batched())

    @property
    def needed(self) -> bool:
        """Whether this trainer has anything to measure."""
        return bool(self._order)

    def begin(self, version: int) -> None:
        """Forget the version before; what came early about this one is taken."""
        self._version = version
        self._found = {}
        self._missing = {key: set(self._takes[key]) for key in self._order}
        self._waiting.clear()
        early, self._early = self._early, []
        for source, message in early:
            self.take(source, message)

    async def run(self, send: Callable[[int, Maxima], Awaitable[None]]) -> None:
        """Measure every shard and send others what they need, by rank.

        Cancellation: between two shards.
        """
        for keys in self._batches:
            for key, found in zip(keys, await in_thread(self._measured, keys), strict=True):
                self._found[key] = found
                for to, parts in self._gives[key].items():
                    values = np.concatenate([found[part.where].reshape(-1) for part in parts])
                    await send(to, Maxima(self._version, key[0], key[1], values.astype("<f4").tobytes()))
                for source, message in self._waiting.pop(key, ()):
                    self._learn(source, key, message)
                self._changed.notify()

    def take(self, source: int, message: Maxima) -> None:
        """Take what another trainer sends.

        Raises RemoteProtocolError for maxima that nobody asked for.
        """
        if message.version > self._version:
            self._early.append((source, message))
            return
        key = (message.parameter, message.kind)
        if source not in self._takes.get(key, ()):
            raise RemoteProtocolError(f"trainer {source} reports maxima of {key} that it does not share with this one")
        if message.version < self._version or source not in self._missing.get(key, ()):
            return  # of a version that is over, twice, or of a shard that this rank holds and does not send
        if key in self._found:
            self._learn(source, key, message)
            self._changed.notify()
        else:
            self._waiting[key].append((source, message))

    async def ready(self, key: Key) -> tuple[Floats, Ints]:
        """Return the maxima of a shard's blocks once all holders' parts are in it, and where the shard begins.

        Cancellation: only this wait ends.
        """
        while key not in self._found or self._missing[key]:
            await self._changed.wait()
        return self._found[key], self._origins[key]

    def awaited(self, version: int) -> set[str]:
        """Return the trainers that still have to send maxima of a version, which may be one that is not begun yet."""
        reported = self._missing if version == self._version else self._takes
        return {trainer_name(rank) for ranks in reported.values() for rank in ranks}

    def _batched(self) -> Iterator[list[Key]]:
        """Yield what is measured in one go: ever more, so that the first is soon there; what is brought, one by one."""
        batch: list[Key] = []
        most = 1
        for key in self._order:
            brought = self._shards.place(self._plan.parameters[key[0]]) is None
            if batch and (brought or len(batch) == most):
                yield batch
                batch, most = [], min(2 * most, self._shards.device.measures)
            if brought:
                yield [key]
            else:
                batch.append(key)
        if batch:
            yield batch

    def _measured(self, keys: list[Key]) -> list[Floats]:
        found = []
        for key in keys:
            name = self._plan.parameters[key[0]]
            shape = self._shards.shapes[name]
            shard = self._shards.box(name, (0,) * len(shape), shape)
            found.append(Measured(shard, self._origins[key], self._plan.kinds[key[1]]))
        return self._shards.device.measure(found)

    def _learn(self, source: int, key: Key, message: Maxima) -> None:
        parts = self._takes[key][source]
        values = np.frombuffer(message.values, "<f4")
        if len(values) != sum(part.count for part in parts):
            raise RemoteProtocolError(
                f"trainer {source} reports {len(values)} maxima, {sum(part.count for part in parts)} are shared"
            )
        found, at = self._found[key], 0
        for part in parts:
            view = found[part.where]
            np.maximum(view, values[at : at + part.count].reshape(view.shape), out=view)
            at += part.count
        self._missing[key].discard(source)

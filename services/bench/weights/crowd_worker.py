"""A measured process of several trainers of an update, who share its event loop and its fabric.

An update of hundreds of trainers does not fit on a machine with a process for each; receivers and the coordinator,
whose core time is looked at, have processes of their own all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio

import asyncfabric as af
from asyncfabric.control import FabricChannels
from asyncfabric.weights.update import WEIGHT_CODEC, WeightPublisher
from asyncfabric_services.bench.weights.worker import WeightsWorker
from asyncfabric_services.bench.weights.workload import plan_of


@dataclass(frozen=True, slots=True)
class _Trainer:
    publisher: WeightPublisher
    rows: tuple[int, int]
    shards: Mapping[str, Any]


class CrowdWorker(WeightsWorker):
    """Several trainers; opened by `do_open` and `do_join_all`."""

    async def do_join_all(
        self, names: Sequence[str], addresses: dict[str, str], model: dict[str, Any], scratch_bytes: int
    ) -> None:
        """Take the parts of these trainers."""
        self._model, self._codings = model, ()
        self._plan = plan_of(**model)
        known = {other: af.FabricAddress.from_bytes(bytes.fromhex(each)) for other, each in addresses.items()}
        channels = FabricChannels(self._fabric, WEIGHT_CODEC, known)
        members = {name: channels.open(name) for name in names}
        self._trainers: list[_Trainer] = []
        for name, channel in members.items():
            await self._nursery.start(self._live, name, channel, scratch_bytes)
            self._trainers.append(_Trainer(self._publisher, self._rows, self._shards))

    async def do_train(self, seed: int) -> None:
        """Take other weights, all of them."""
        for one in self._trainers:
            self._rows, self._shards = one.rows, dict(one.shards)
            await super().do_train(seed)

    async def do_publish_all(self, version: int) -> list[dict[str, Any]]:
        """Take all trainers' parts of an update at once."""
        reports: list[dict[str, Any]] = []

        async def publish(one: _Trainer) -> None:
            reports.append(asdict(await one.publisher.publish(version)))

        async with trio.open_nursery() as nursery:
            for one in self._trainers:
                nursery.start_soon(publish, one)
        return reports

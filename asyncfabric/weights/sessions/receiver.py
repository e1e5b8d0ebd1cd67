"""Receiver: one rank of an engine, whose own tensors take each version at a moment that the engine chooses.

Event loop's thread. A version arrives in memory beside the engine's tensors; `apply` copies it into them, so addresses
stay as they are, and CUDA graphs that were captured over them stay right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import torch

from asyncfabric import FabricConfig, open_fabric
from asyncfabric.weights.channel import receiver_name
from asyncfabric.weights.memory.device import HOST
from asyncfabric.weights.plan.holdings import LocalTensor
from asyncfabric.weights.plan.rules import SAME_NAMES, Rule
from asyncfabric.weights.receiver.replica import WeightReplica, open_replica
from asyncfabric.weights.sessions.blueprint import Wish, get_answer, get_confirmation, put_wish
from asyncfabric.weights.sessions.directory import Meeting, attend
from asyncfabric.weights.sessions.scoped import open_scoped
from asyncfabric.weights.sessions.sender import NamedTensors, tensors_of
from asyncfabric.weights.tensors import dtype_of, tensor_over


class WeightReceiver:
    """One rank of an engine; made by `async with open_receiver(...)`."""

    def __init__(
        self, replica: WeightReplica, tensors: Mapping[str, torch.Tensor], filled: Mapping[str, LocalTensor]
    ) -> None:
        """Not for users: `async with open_receiver(...)`."""
        self._replica = replica
        # What a version fills begins at the tensor's origin; an engine may have more rows, as of a vocabulary.
        self._targets = {name: tensors[name][tuple(slice(side) for side in one.shape)] for name, one in filled.items()}
        self._filled = filled
        self._applied = 0

    @property
    def version(self) -> int:
        """The version that is in the engine's tensors, 0 for none."""
        return self._applied

    @property
    def refusal(self) -> str:
        """Why this engine takes part in nothing, empty while it does."""
        return self._replica.refusal

    def poll(self) -> int:
        """Return the version that `apply` would bring, 0 while there is no newer one. Costs next to nothing."""
        held = self._replica.held_version
        return held if held > self._applied else 0

    async def wait(self) -> int:
        """Return the version that `apply` would bring, once there is one.

        Raises:
            ClosedError: no more versions come, as when the store is gone; the engine keeps what it has.

        Cancellation: only this wait ends.
        """
        return await self._replica.wait_version(self._applied + 1)

    def begin_apply(self) -> int:
        """Let the newest complete version stay as it is until the next call, for `copy`; return it, 0 for none.

        `apply` is this and `copy`. A program whose engine runs in another thread than the event loop calls the two
        apart: this one in the thread of the loop.
        """
        return self._replica.step_boundary()

    def copy(self, version: int) -> int:
        """Copy what `begin_apply` returned into the engine's tensors; return it.

        In any thread, on the CUDA stream that is current for torch in it, and behind what that was given before.
        """
        if version == self._applied or not version:
            return self._applied
        bytes_of = self._replica.tensors()
        with torch.no_grad():
            for name, target in self._targets.items():
                target.copy_(tensor_over(bytes_of[name], self._filled[name]), non_blocking=True)
            if any(target.is_cuda for target in self._targets.values()):
                torch.cuda.current_stream().synchronize()  # the memory it came from takes a later version
        self._applied = version
        return version

    def apply(self) -> int:
        """Copy the newest complete version into the engine's tensors, between two steps; return which one they have.

        Nothing is copied when there is no newer one.

        Raises:
            ClosedError: the receiver was left.
        """
        return self.copy(self.begin_apply())

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the newest complete version, for an engine that copies them by itself; empty for none.

        They lie where the version arrived, and stay as they are until the next `take` or `apply`. `version` is theirs
        from now on. The engine's own tensors may be without memory (`device="meta"`): their shapes and types count.
        """
        self._applied = self.begin_apply()
        bytes_of = self._replica.tensors()
        return {name: tensor_over(bytes_of[name], one) for name, one in self._filled.items() if self._applied}


@asynccontextmanager
async def open_receiver(
    named: NamedTensors,
    join: Meeting,
    *,
    name: str = "engine",
    rank: int = 0,
    ranks: int = 1,
    rules: Sequence[Rule] = SAME_NAMES,
    config: FabricConfig | None = None,
    device: str = HOST,
) -> AsyncIterator[WeightReceiver]:
    """Open one rank of an engine that takes a training's weights into its own tensors.

    It returns when all ranks of the engine have joined and the training counts on it: the next version comes to it. The
    engine gets the version that serves from another one that is laid out alike; the first one of its layout waits.

    Args:
        named: the engine's tensors of this rank; of tensors that share their storage give one.
        join: where the engine meets the training, as for `open_sender`.
        name: of the engine; engines of one training have distinct ones. One that starts again may take its name again.
        rank: of this process in the engine.
        ranks: of the engine.
        rules: from the trainer's names to these; see `moves_by_rules`. Those of rank 0 count.
        config: how the fabric is opened, as for `open_sender`.
        device: where versions arrive: "cpu", or "cuda:N" where all fabrics have a `cuda` rail. Two copies of the
            weights fit there besides the engine's own.

    Raises:
        ValueError: the trainer's parameters do not go into these tensors, or the engine joined before and was laid out
            otherwise; the text names the tensor.
        DeviceError: no memory left.
        PeerError, BrokenError: as for `open_sender`.

    Cancellation: what is under way drains (INV-2), the memory is released, then it goes on.
    """
    tensors = tensors_of(named)
    shapes = {each: (dtype_of(tensor), tuple(tensor.shape)) for each, tensor in tensors.items()}
    wish = Wish(name, rank, ranks, shapes, tuple(rules))
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    async with attend(join, serves=False) as met:
        number = await put_wish(met, wish)
        layout, plan, blueprint = await get_answer(met, number)
        filled = {each: LocalTensor(*shape) for each, shape in blueprint.filled[rank].items()}
        async with (
            open_fabric(config) as fabric,
            open_scoped(met, layout, receiver_name(name, rank)) as channel,
            open_replica(fabric, channel, plan, name, rank, device=device) as replica,
        ):
            await get_confirmation(met, number)
            yield WeightReceiver(replica, tensors, filled)

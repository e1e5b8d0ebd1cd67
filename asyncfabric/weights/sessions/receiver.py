"""Receiver: one rank of an engine, whose own tensors take each version at a moment that the engine chooses.

Event loop's thread. A version arrives in memory beside the engine's tensors, and `apply` copies it into them; or, in
place, it arrives in the tensors while the engine is paused. Addresses stay, so CUDA graphs over them stay right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import torch

from asyncfabric import FabricConfig, open_fabric
from asyncfabric.weights.channel import receiver_name
from asyncfabric.weights.plan.holdings import LocalTensor
from asyncfabric.weights.plan.rules import SAME_NAMES, Rule
from asyncfabric.weights.receiver.replica import WeightReplica, open_replica
from asyncfabric.weights.sessions.blueprint import Wish, get_answer, get_confirmation, put_wish
from asyncfabric.weights.sessions.conversions import CONVERSIONS, Conversion
from asyncfabric.weights.sessions.directory import Meeting, attend
from asyncfabric.weights.sessions.in_place import memory_within
from asyncfabric.weights.sessions.own_tensors import OwnTensors, device_of_shadow, gpu_of, tied
from asyncfabric.weights.sessions.page_locks import locked_for
from asyncfabric.weights.sessions.scoped import open_scoped
from asyncfabric.weights.sessions.sender import NamedTensors, tensors_of
from asyncfabric.weights.tensors import dtype_of, tensor_over
from asyncfabric.weights.threads import in_thread


class WeightReceiver:
    """One rank of an engine; made by `async with open_receiver(...)`.

    Attributes:
        in_place: whether versions arrive in the engine's tensors (`shadow="none"`): `apply_in_place` is for these.
    """

    def __init__(
        self, replica: WeightReplica, own: OwnTensors, filled: Mapping[str, LocalTensor], in_place: bool
    ) -> None:
        """Not for users: `async with open_receiver(...)`."""
        self.in_place: bool = in_place
        self._replica = replica
        self._own = own
        self._filled = filled
        self._applied = 0

    @property
    def version(self) -> int:
        """The version that is whole in the engine's tensors, 0 for none; in place 0 too while the next one comes."""
        return self._applied

    @property
    def refusal(self) -> str:
        """Why this engine takes part in nothing, empty while it does."""
        return self._replica.refusal

    def poll(self) -> int:
        """Return the version that `apply` would bring, 0 while there is no newer one. Costs next to nothing.

        In place it is one that waits to arrive, until `apply_in_place`.
        """
        if self.in_place:
            return self._replica.coming
        held = self._replica.held_version
        return held if held > self._applied else 0

    async def wait(self) -> int:
        """Return the version that `apply` would bring, once there is one.

        Raises:
            ClosedError: no more versions come, as when the store is gone; the engine keeps what it has.

        Cancellation: only this wait ends.
        """
        if self.in_place:
            return await self._replica.wait_coming()
        return await self._replica.wait_version(self._applied + 1)

    def begin_apply(self) -> int:
        """Let the newest complete version stay as it is until the next call, for `copy`; return it, 0 for none.

        `apply` is this and `copy`. A program whose engine runs in another thread than the event loop calls the two
        apart: this one in the thread of the loop.

        Raises:
            ClosedError: the receiver was left.
            ValueError: versions arrive in place.
        """
        if self.in_place:
            raise ValueError("versions arrive in the engine's own tensors: use apply_in_place()")
        self.settle()
        return self._replica.step_boundary()

    def copy(self, version: int, stream: torch.cuda.Stream | None = None) -> int:
        """Copy what `begin_apply` returned into the engine's tensors; return it. In any thread; `stream` as `apply`."""
        if version and version != self._applied:
            self._own.copy(self._replica.serving_copy, self._shadow(), stream)  # in place: of what arrived beside
            self._applied = version
        return self._applied

    def settle(self) -> None:
        """Return when copies that were queued on a stream are done. In any thread."""
        self._own.settle()

    def apply(self, stream: torch.cuda.Stream | None = None) -> int:
        """Copy the newest complete version into the engine's tensors, between two steps; return which one they have.

        Nothing is copied when there is no newer one. Addresses stay, so CUDA graphs over the tensors stay right.

        Args:
            stream: of the tensors' GPU: the copy is queued there, and what the stream gets afterwards reads the new
                version; the next `apply` or `take` waits for it. None takes torch's current stream, behind what that
                was given before, and returns when the copy is done.

        Raises:
            ClosedError: the receiver was left.
            ValueError: the engine's tensors have no memory, `take` is for those; or versions arrive in place.
        """
        return self.copy(self.begin_apply(), stream)

    async def apply_in_place(self, stream: torch.cuda.Stream | None = None) -> int:
        """Let the version that waits come into the engine's tensors, with the engine paused; return which they have.

        Nothing may read or write the tensors from this call on until it has returned: no step, no replay of a graph.
        What their GPU was given before is waited for. At all other times nothing is written into them.

        It returns when the version is whole and decided at every engine that has no shadow and is laid out alike, which
        takes as long as the slowest of them to call this, and the bytes; where the next version follows one that was
        cut off at once, it brings that. Ranks of an engine that step together call this together: one of them polls,
        and all `wait`. A version that is not let in is waited for as with a shadow (`boundary_s`). Where none waits
        this returns at once.

        Args:
            stream: of the tensors' GPU, for what arrives beside the tensors, as in `apply`.

        Raises:
            BrokenError: the version was cut off, as by the end of the training or of another rank, and the tensors hold
                parts of several: `version` is 0, and nothing may compute with them. The next version repairs all of
                them: wait for it and call this again. If there is none any more, load them some other way.
            ClosedError: the receiver was left.
            ValueError: versions arrive in a shadow; `apply` is for those.

        Cancellation: only this wait ends, so a deadline is a cancel scope around it. The version goes on coming into
        the tensors: the engine stays paused until a later call has returned or raised BrokenError.
        """
        return self.copy(await self.begin_in_place(), stream)

    async def begin_in_place(self) -> int:
        """Do what `apply_in_place` does, but for `copy` of what arrived beside; return the version, 0 for none.

        A program whose engine runs in another thread than the event loop calls the two apart. Errors and cancellation
        are those of `apply_in_place`.
        """
        if not self.in_place:
            raise ValueError("versions arrive in a shadow: use apply()")
        if not self.poll():
            return self._applied
        await in_thread(self._own.finish)
        self._applied = 0
        return await self._replica.let_in()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the newest complete version, for an engine that copies them by itself; empty for none.

        They lie where the version arrived, and stay as they are until the next `take` or `apply`. `version` is theirs
        from now on. The engine's own tensors may be without memory (`device="meta"`): their shapes and types count.
        """
        self._applied = self.begin_apply()
        return self._shadow() if self._applied else {}

    def _shadow(self) -> dict[str, torch.Tensor]:
        bytes_of = self._replica.tensors()
        return {name: tensor_over(bytes_of[name], self._filled[name]) for name in self._own.arriving}


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
    shadow: str = "host",
    gpu: torch.device | str | None = None,
    conversions: Mapping[str, Conversion] = MappingProxyType({}),
) -> AsyncIterator[WeightReceiver]:
    """Open one rank of an engine that takes a training's weights into its own tensors.

    It returns when all ranks of the engine have joined and the training counts on it: the next version comes to it. The
    engine gets the version that serves from another one that is laid out alike; the first one of its layout waits.

    Args:
        named: the engine's tensors of this rank. Views of one storage are tensors like others; of names that stand for
            the same one, as tied embeddings, the trainer needs to have one.
        join: where the engine meets the training, as for `open_sender`.
        name: of the engine; engines of one training have distinct ones. One that starts again may take its name again.
        rank: of this process in the engine.
        ranks: of the engine.
        rules: from the trainer's names to these; see `moves_by_rules`. Those of rank 0 count.
        config: how the fabric is opened, as for `open_sender`.
        shadow: where versions arrive, until `apply` copies them: in "host" memory; on the "device" that the tensors
            are on, where a copy is a matter of milliseconds; or on one that is named, as "cuda:0", for tensors without
            memory. Two copies of the weights fit there besides the engine's own. Or "none": they arrive in the tensors
            themselves, while the engine is paused in `apply_in_place`, and there is no other copy, but of tensors that
            are converted, lie in pieces, share bytes or are on another device. A GPU needs a `cuda` rail at both ends,
            which `config=None` opens in a process that has used its GPU before.
        gpu: as "cuda:0", which copies from a shadow in host memory: that is page-locked for it. None is the one that
            the tensors are on; an engine that copies by itself what it takes, from tensors without memory, names it.
        conversions: by the name that rules have in `convert`, besides those of
            `asyncfabric.weights.sessions.CONVERSIONS`: functions of yours that make the engine's tensors of what
            arrives. They run in `apply`; `take` returns what arrived.

    Raises:
        ValueError: the trainer's parameters do not go into these tensors, or the engine joined before and was laid out
            otherwise, or a conversion returns what they cannot take; the text names the tensor. Or `shadow` is no place
            for them, or `gpu` none.
        DeviceError: no memory left.
        PeerError, BrokenError: as for `open_sender`.

    Cancellation: what is under way drains (INV-2), the memory is released, then it goes on.
    """
    tensors = tensors_of(named)
    shapes = {each: (dtype_of(tensor), tuple(tensor.shape)) for each, tensor in tensors.items()}
    device = device_of_shadow(shadow, tensors)
    in_place = shadow == "none"
    reader = None if in_place else gpu_of(gpu, tensors)
    known = {**CONVERSIONS, **conversions}
    suffixes = {each: conversion.suffixes for each, conversion in known.items()}
    wish = Wish(name, rank, ranks, shapes, tuple(rules), tied(tensors), suffixes, in_place)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    async with attend(join, serves=False) as met:
        number = await put_wish(met, wish)
        layout, plan, blueprint = await get_answer(met, number)
        filled = {each: LocalTensor(*shape) for each, shape in blueprint.filled[rank].items()}
        converted = {each: known[one] for each, one in blueprint.converted.items() if each in filled}
        within = memory_within(tensors, filled, converted, device) if in_place else {}
        beside = {each: one.shape for each, one in filled.items() if each not in within}
        own = OwnTensors(tensors, beside, converted)
        own.check(filled)
        async with (
            open_fabric(config) as fabric,
            open_scoped(met, fabric, layout, receiver_name(name, rank)) as channel,
            open_replica(fabric, channel, plan, name, rank, own=within if in_place else None, device=device) as replica,
            locked_for(reader, replica.memories),
        ):
            await get_confirmation(met, number)
            receiver = WeightReceiver(replica, own, filled, in_place)
            try:
                yield receiver
            finally:
                receiver.settle()

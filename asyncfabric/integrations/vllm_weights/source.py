"""Source: what a rank of a training holds, out of a weight source of vLLM. The thread that trains.

A `ModuleSource` is read through: the shards of its module are sent as they lie, and nothing is gathered. Other sources
make tensors as they go, which need not last; a copy of each rank's part does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from asyncfabric.integrations.vllm_weights.versions import ModuleSource, YieldedShare, shares_of
from asyncfabric.weights import Mesh, Replicate, Shard, place

Parts = dict[str, tuple[Sequence[int], Sequence[int]]]
"""By name: shape of the whole parameter, and where a rank's part begins."""


class HeldWeights:
    """The tensors that one rank sends.

    Attributes:
        tensors: by name; they stay the same, `renew` changes what they hold.
        parts: of those that are a part of a plain tensor.
    """

    def __init__(self, source: Any, rank: int, ranks: int) -> None:
        """Read a source once; all ranks at the same time, since it may gather.

        Args:
            source: of vLLM.
            rank: of this process in the training.
            ranks: of the training.

        Raises:
            TypeError: no source.
            ValueError: a part is not as large as the source states.
        """
        if source is None:
            raise TypeError("a training that sends its weights needs a source, as vLLM's ModuleSource(model)")
        self.parts: Parts = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._source = source
        self._rank = rank
        self._ranks = ranks
        self._module = source._module if isinstance(source, ModuleSource) else None
        if self._module is not None:
            self.tensors = {name: each.detach() for name, each in self._module.named_parameters()}
            return
        for number, share in enumerate(shares_of(source, ranks)):
            if self._sends(number, share):
                self.tensors[share.name] = share.tensor.detach().clone(memory_format=torch.contiguous_format)

    def renew(self, pairs: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Take in what the source has now, or pairs instead of it; all ranks at the same time.

        Raises:
            ValueError: another tensor than at first.
        """
        if pairs is None and self._module is not None:
            return
        yielded = ((one.name, one.tensor) for one in shares_of(self._source, self._ranks)) if pairs is None else pairs
        missing = set(self.tensors)
        for name, tensor in yielded:
            held = self.tensors.get(name)
            if held is None:
                continue  # another rank sends it
            missing.discard(name)
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise ValueError(
                    f"{name}: the source has {tuple(tensor.shape)} of {tensor.dtype}, it began with "
                    f"{tuple(held.shape)} of {held.dtype}"
                )
            if held.data_ptr() != tensor.data_ptr():
                held.copy_(tensor.detach())
        if missing:
            raise ValueError(f"the source did not yield {sorted(missing)[0]} any more")

    def _sends(self, number: int, share: YieldedShare) -> bool:
        """Return whether this rank sends a share: of a whole parameter one owner does, in turn; note where it lies."""
        if share.mesh is None:
            return share.owners[number % len(share.owners)] == self._rank
        sides, cuts = share.mesh
        axes = tuple(str(axis) for axis in range(len(sides)))
        grid = Mesh(axes, np.array(share.owners, np.int64).reshape(sides))
        how = {axis: Replicate() if dim is None else Shard(dim) for axis, dim in zip(axes, cuts, strict=True)}
        placement = place(share.whole, grid, how)
        if self._rank not in placement.ranks:
            return False  # the parameter has fewer rows than ranks
        row = placement.row_of(self._rank)
        if tuple(placement.sizes[row].tolist()) != tuple(share.tensor.shape):
            raise ValueError(
                f"{share.name}: rank {self._rank} yields {tuple(share.tensor.shape)}, its placement states "
                f"{tuple(placement.sizes[row].tolist())}"
            )
        self.parts[share.name] = (share.whole, tuple(placement.starts[row].tolist()))
        return True

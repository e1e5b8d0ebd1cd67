"""The descriptor lists of NIXL's bindings, by its names: for transfers, for registering, of several remote agents.

Values; a list that one thread changes is read by no other. What is moved is looked up elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from asyncfabric.integrations.nixl.blocks import Blocks, from_rows, from_strided, from_tensors, is_tensor
from asyncfabric.integrations.nixl.errors import nixlNotFoundError
from asyncfabric.integrations.nixl.kinds import memory_type, nixl_mem_t

Descriptor = tuple[Any, ...]

MANY = 64
"""Tuples from which on a list is read as one array."""


class _DescriptorList:
    """Rows of tuples of one memory type; becomes Blocks once, when they are asked for."""

    width: ClassVar[int]
    kind: ClassVar[str]

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._type = nixl_mem_t(type)
        self._rows: list[Descriptor] | None = []
        self._blocks: Blocks | None = None
        if isinstance(descs, Blocks):
            self._rows, self._blocks = None, descs
        elif isinstance(descs, np.ndarray):
            self._rows, self._blocks = None, from_rows(self._type, descs)
        elif not isinstance(descs, int):
            self._blocks = self._many(descs)
            if self._blocks is not None:
                self._rows = None
            else:
                for row in descs:
                    self.append(row)

    @property
    def blocks(self) -> Blocks:
        """The addresses, lengths and devices as columns."""
        if self._blocks is None:
            assert self._rows is not None, "one of both is there"
            self._blocks = from_rows(self._type, [row[:3] for row in self._rows])
        return self._blocks

    def getType(self) -> nixl_mem_t:
        """Return the memory type."""
        return self._type

    def descCount(self) -> int:
        """Return the number of descriptors."""
        return len(self)

    def isEmpty(self) -> bool:
        """Return whether there is none."""
        return len(self) == 0

    def append(self, descriptor: Any) -> None:
        """Add a descriptor at the end.

        Raises:
            TypeError: not a tuple of the width of this list, or not of integers.
            ValueError: a negative number, or one beyond 63 bits.
        """
        if not isinstance(descriptor, tuple) or len(descriptor) != self.width:
            raise TypeError(f"{self.kind} takes tuples of {self.width}, got {descriptor!r}")
        if not all(isinstance(number, (int, np.integer)) for number in descriptor[:3]):
            raise TypeError(f"a descriptor begins with (address, length, device) as integers, got {descriptor!r}")
        if not all(0 <= number < 1 << 63 for number in descriptor[:3]):
            raise ValueError(f"the numbers of a descriptor are in 0..2^63-1, got {descriptor!r}")
        self._all().append(self._clean(descriptor))

    def addDesc(self, descriptor: Descriptor) -> None:
        """Add a descriptor at the end; the same as `append`."""
        self.append(descriptor)

    def remDesc(self, index: int) -> None:
        """Remove a descriptor by its position."""
        del self._all()[index]

    def clear(self) -> None:
        """Remove all."""
        self._all().clear()

    def index(self, descriptor: Descriptor) -> int:
        """Return the position of a descriptor; raises nixlNotFoundError."""
        for position, row in enumerate(self):
            if row[:3] == tuple(descriptor[:3]):
                return position
        raise nixlNotFoundError(f"{descriptor!r} is not among the {len(self)} descriptors of the list")

    def trim(self) -> None:
        """Do nothing: a list has no spare room."""

    def print(self) -> None:
        """Print the list."""
        print(repr(self), *self, sep="\n  ")

    def __len__(self) -> int:
        return len(self.blocks) if self._rows is None else len(self._rows)

    def __bool__(self) -> bool:
        return True  # as NIXL's lists are, also empty ones

    def __getitem__(self, index: int) -> Descriptor:
        if self._rows is not None:
            return self._rows[index]
        return self._row(self.blocks, range(len(self))[index])

    def __setitem__(self, index: int, descriptor: Descriptor) -> None:
        rows = self._all()
        rows[index] = self._clean(tuple(descriptor))

    def __iter__(self) -> Iterator[Descriptor]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._type == other._type and list(self) == list(other)

    __hash__: ClassVar[None]  # type: ignore[assignment]  # a list that changes

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._rows is None:
            return type(self), (self._type, self.blocks.rows)
        return type(self), (self._type, self._rows)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} in {self._type.name}>"

    def _all(self) -> list[Descriptor]:
        """Return the rows as a list that may be changed."""
        if self._rows is None:
            self._rows = list(self)
        self._blocks = None
        return self._rows

    def _many(self, descs: Any) -> Blocks | None:
        """Read a long list of good tuples at once; None for what is to be read, and refused, row by row."""
        if self.width != 3 or len(descs) < MANY or set(map(type, descs)) != {tuple} or set(map(len, descs)) != {3}:
            return None
        rows = np.array(descs)
        return from_rows(self._type, rows) if rows.dtype.kind in "iu" else None

    def _clean(self, descriptor: Descriptor) -> Descriptor:
        return tuple(int(number) for number in descriptor[:3])

    def _row(self, blocks: Blocks, index: int) -> Descriptor:
        return int(blocks.addresses[index]), int(blocks.lengths[index]), int(blocks.devices[index])


class nixlXferDList(_DescriptorList):
    """Descriptors of a transfer: (address, length, device)."""

    width = 3
    kind = "a transfer list"


class nixlRegDList(_DescriptorList):
    """Descriptors to register: (address, length, device, metadata of the caller)."""

    width = 4
    kind = "a registration list"

    def trim(self) -> nixlXferDList:  # type: ignore[override]  # NIXL's returns the list without its metadata
        """Return the same memory as a transfer list."""
        return nixlXferDList(self._type, self.blocks)

    def _clean(self, descriptor: Descriptor) -> Descriptor:
        extra = descriptor[3]
        return *super()._clean(descriptor), extra.encode() if isinstance(extra, str) else bytes(extra)

    def _row(self, blocks: Blocks, index: int) -> Descriptor:
        return *super()._row(blocks, index), b""


class nixlRemoteDList(_DescriptorList):
    """Descriptors of several remote agents: (address, length, device, agent)."""

    width = 4
    kind = "a remote list"

    def _clean(self, descriptor: Descriptor) -> Descriptor:
        return *super()._clean(descriptor), str(descriptor[3])


def transfer_list(descs: Any, mem_type: str | None) -> nixlXferDList:
    """Return descriptors to transfer from tuples, tensors, an Nx3 array or a list that is one.

    Raises:
        TypeError: none of these, or no memory type where one is needed.
    """
    if isinstance(descs, nixlXferDList):
        return descs
    if isinstance(descs, nixlRegDList):
        raise TypeError("a registration list was given for a transfer: get_xfer_descs() makes transfer lists")
    made: nixlXferDList = _list_of(nixlXferDList, descs, mem_type)
    return made


def registration_list(descs: Any, mem_type: str | None) -> nixlRegDList:
    """Return descriptors to register from tuples, tensors, an Nx3 array or a list that is one.

    Raises:
        TypeError: none of these, or no memory type where one is needed.
    """
    if isinstance(descs, nixlRegDList):
        return descs
    if isinstance(descs, nixlXferDList):
        raise TypeError("a transfer list was given for registering: get_reg_descs() makes registration lists")
    made: nixlRegDList = _list_of(nixlRegDList, descs, mem_type)
    return made


def transfer_blocks(descs: Any, mem_type: str | None) -> Blocks:
    """Return blocks to prepare: whatever `transfer_list` takes, and Nx5 arrays of strided blocks.

    Raises:
        ValueError: an Nx5 array without a memory type.
        TypeError: as from `transfer_list`.
    """
    if isinstance(descs, np.ndarray) and descs.ndim == 2 and descs.shape[1] == 5:
        if mem_type is None:
            raise ValueError("strided descriptors (Nx5) carry no memory type: give mem_type")
        return from_strided(memory_type(mem_type), descs)
    return transfer_list(descs, mem_type).blocks


def _list_of(kind: Any, descs: Any, mem_type: str | None) -> Any:
    if is_tensor(descs):
        blocks = from_tensors([descs])
        return kind(blocks.memory, blocks)
    if isinstance(descs, np.ndarray):
        if descs.ndim == 2 and descs.shape[1] == 5:
            raise TypeError("an Nx5 array is for prep_xfer_dlist(); descriptor lists are made of Nx3 arrays")
        if not len(descs):
            raise IndexError(f"{kind.kind} of nothing: give at least one descriptor")
    elif not isinstance(descs, (list, tuple)):
        raise TypeError(f"expected tuples, tensors, an Nx3 array or a descriptor list, got {type(descs).__name__}")
    elif not descs:
        raise IndexError(f"{kind.kind} of nothing: give at least one descriptor")
    elif is_tensor(descs[0]):
        blocks = from_tensors(descs)
        return kind(blocks.memory, blocks)
    if mem_type is None:
        raise TypeError(f"{kind.kind} of numbers needs mem_type: 'DRAM' or 'VRAM'")
    return kind(memory_type(mem_type), descs)

"""Memory of a GPU as the checks look at memory: assigned, sliced and compared as bytes.

Every look waits for the device first and afterwards: the copies of a fabric run beside the streams of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncfabric import Region


class GpuView:
    """Bytes [start, stop) of a region on a GPU; slices are views too."""

    def __init__(self, region: Region, start: int = 0, stop: int | None = None) -> None:
        self._region = region
        self._start = start
        self._stop = len(region) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, slice):
            begin, end, _ = part.indices(len(self))
            return GpuView(self._region, self._start + begin, self._start + max(begin, end))
        return bytes(self)[part]

    def __setitem__(self, part: slice, content: bytes) -> None:
        import torch

        view = self[part]
        if len(content) != len(view):
            raise ValueError(f"{len(content)} bytes do not fit into {len(view)}")
        if content:
            view._tensor().copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            torch.cuda.synchronize(self._region.device)

    def __bytes__(self) -> bytes:
        if not len(self):
            return b""
        content: bytes = self._tensor().cpu().numpy().tobytes()
        return content

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (bytes, GpuView)) and bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash((self._region, self._start, self._stop))

    def _tensor(self) -> Any:
        import torch

        torch.cuda.synchronize(self._region.device)
        return self._region[self._start : self._stop].tensor(torch.uint8)

"""CUDA streams as users name them: a torch stream, any object with `cuda_stream` or `__cuda_stream__`, or a raw handle.

Pure functions, any thread. torch is never imported here.
"""

from __future__ import annotations

from typing import Any

from asyncfabric._api.checks import checked_index


def stream_handle(stream: Any) -> int:
    """Return the handle of a stream; 0 is the default stream of the device.

    Raises:
        TypeError: not a stream.
    """
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"a CUDA stream is a torch.cuda.Stream or its handle, got {type(stream).__name__} {stream!r}")
    return checked_index("stream", stream)


def stream_device(stream: Any, otherwise: int) -> int:
    """Return the number of the stream's GPU; raw handles do not state it, and take `otherwise`."""
    index = getattr(getattr(stream, "device", None), "index", None)
    return otherwise if index is None else int(index)


def first_gpu(rails: list[dict[str, Any]]) -> int:
    """Return the number of the first GPU that a rail drives, -1 for none."""
    for rail in rails:
        kind, _, ordinal = str(rail["device"]).partition(":")
        if kind == "cuda" and ordinal.isdecimal():
            return int(ordinal)
    return -1

"""Exponent coding: the exponents of floating numbers, which are few and known, packed; everything else as it is. Pure.

    [elements] | plane of exponents | the other planes, lowest first

The sign is turned round to the low end, so that the highest byte of a bfloat16 or float32 is its whole exponent. The
weights of a layer use a handful of exponents: about 2.6 of those 8 bits are news, the rest of the number is noise.
The scheme is that of ZipNN and UCCL-Zip; the entropy coder is Zstandard's.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.coding.streams import Bytes, from_planes, last_planes, packed, planes, words

_HEADER = struct.Struct("<Q")


def encode_exponents(new: Bytes, item_bytes: int) -> bytes | None:
    """Return the message for these weights, or None when it would not be shorter.

    Args:
        new: stored floating numbers, uint8, one dimension.
        item_bytes: of an element: 2 or 4; for 1 there is nothing to split, and all is tried as one plane.
    """
    elements = words(new, item_bytes)
    parts = planes(_turned(elements, 1))
    message = b"".join([_HEADER.pack(elements.size), *(packed(plane) for plane in parts[::-1])])
    return message if len(message) < new.size else None


def decode_exponents(memory: Bytes, message: bytes | memoryview, item_bytes: int) -> None:
    """Put the weights into `memory`, uint8, one dimension, writable.

    Raises ValueError when the message is damaged or not for memory of this length; `memory` is unchanged then.
    """
    held = words(memory, item_bytes)
    view = memoryview(message)
    if len(view) < _HEADER.size:
        raise ValueError(f"coded exponents begin with {_HEADER.size} bytes, got {len(view)}")
    elements = _HEADER.unpack_from(view)[0]
    if elements != held.size:
        raise ValueError(f"coded exponents of {elements} elements, for memory of {held.size}")
    parts = last_planes(view, _HEADER.size, elements, item_bytes)
    held[:] = _turned(from_planes(parts[::-1]).view(held.dtype), held.dtype.itemsize * 8 - 1)


def _turned(elements: NDArray[Any], bits: int) -> NDArray[Any]:
    """Return integers rotated to the left."""
    return np.asarray((elements << bits) | (elements >> (elements.dtype.itemsize * 8 - bits)))

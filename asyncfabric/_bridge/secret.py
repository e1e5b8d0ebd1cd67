"""The bytes of a fabric's secret, read when its engine is opened.

Any thread. What is read here goes to the engine and nowhere else: no text, no log and no error holds it.
"""

from __future__ import annotations

import os

from asyncfabric.config import LEAST_SECRET_BYTES, MOST_SECRET_BYTES


def secret_bytes(secret: bytes | str | os.PathLike[str] | None) -> bytes:
    """Return the secret of a `FabricConfig`, b"" for none; a path is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has not 16 to 4096 bytes.
    """
    if secret is None or isinstance(secret, bytes):
        return secret or b""
    with open(secret, "rb") as file:
        found = file.read(MOST_SECRET_BYTES + 1)
    if not LEAST_SECRET_BYTES <= len(found) <= MOST_SECRET_BYTES:
        size = f"{len(found)}" if len(found) <= MOST_SECRET_BYTES else f"more than {MOST_SECRET_BYTES}"
        raise ValueError(
            f"the file of FabricConfig.secret, {os.fspath(secret)!r}, must have "
            f"{LEAST_SECRET_BYTES}..{MOST_SECRET_BYTES} bytes, it has {size}"
        )
    return found

"""Waiting for transfers to end, one failure apart from the others; nothing is left behind on cancellation (INV-2)."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from asyncfabric import FabricError, Transfer


async def settle(transfers: Sequence[Transfer]) -> list[FabricError | None]:
    """Return when all have ended, with the error of each that failed.

    Cancellation: stops posting all of them and goes on when what was posted has drained.
    """
    errors: list[FabricError | None] = [None] * len(transfers)
    try:
        for number, transfer in enumerate(transfers):
            try:
                await transfer
            except FabricError as error:
                errors[number] = error
    except BaseException:
        for transfer in transfers:
            transfer.cancel()
        with anyio.CancelScope(shield=True):
            for transfer in transfers:
                try:
                    await transfer
                except FabricError:
                    pass  # it was cancelled
        raise
    return errors

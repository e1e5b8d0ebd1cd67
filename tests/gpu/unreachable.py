"""A writer whose driver lets no GPU reach another: run by test_peer_access.py with no_peer_access.c preloaded.

One line of JSON for each kind of memory: the class of the error and its text, "" when the write went through.
"""

from __future__ import annotations

import json
import sys

import anyio
from party import Party
from preloaded import start_server

import asyncfabric as af

MIB = 1 << 20


async def _attempt(what: str, fabric: af.Fabric, region: af.Region, key: af.RegionKey) -> None:
    try:
        with anyio.fail_after(30):
            await fabric.write(region[:MIB], key, 0)
        kind, text = "", ""
    except (af.FabricError, ValueError, TimeoutError) as error:
        kind, text = type(error).__name__, str(error)
    print(json.dumps({"what": what, "kind": kind, "text": text}), flush=True)


async def _main(far: str) -> None:
    with (
        Party(far, far, MIB) as handle,
        Party(far, far, MIB, foreign=True) as legacy,
        Party(far, "cpu", MIB) as host,
    ):
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            region = await fabric.allocate(MIB, device="cuda:0")
            async with af.open_fabric(af.FabricConfig(rails=(far,))) as neighbour:
                own = await neighbour.allocate(MIB, device=far)
                await _attempt("neighbour", fabric, region, own.key())
            await _attempt("handle", fabric, region, handle.key)
            await _attempt("handle", fabric, region, handle.key)
            await _attempt("legacy", fabric, region, legacy.key)
            await _attempt("host", fabric, region, host.key)


if __name__ == "__main__":
    start_server()
    anyio.run(_main, sys.argv[1], backend="trio")

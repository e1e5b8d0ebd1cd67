"""An LMCache server's transfer channel, as far as a peer sees it: L1 memory of random bytes. Arguments: port, seed."""

from __future__ import annotations

import json
import os
import sys

import numpy as np

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # LMCache prints too

from lmcache.v1.distributed.internal_api import L1MemoryDesc  # noqa: E402
from lmcache.v1.distributed.transfer_channel import (  # noqa: E402
    delete_transfer_channel_context,
    initialize_transfer_channel_context,
)

from asyncfabric.integrations import lmcache as fabric_channel  # noqa: E402
from asyncfabric.integrations.process_fabric import close_process_fabric  # noqa: E402


def main() -> None:
    port, seed = map(int, sys.argv[1:])
    memory = np.random.default_rng(seed).integers(0, 256, 64 * 4096, dtype=np.uint8)
    fabric_channel.register()
    place = f"127.0.0.1:{port}"
    described = L1MemoryDesc(memory.ctypes.data, memory.nbytes, 4096)
    context = initialize_transfer_channel_context("asyncfabric", described, place, place)
    print(json.dumps({"port": context.get_transfer_channel_server().port}), file=answers, flush=True)
    sys.stdin.read()
    delete_transfer_channel_context()
    close_process_fabric()


if __name__ == "__main__":
    main()

"""An agent that writes noted page lists to another one until it is killed, and releases some of them under way.

Arguments: its name, a seed; then a line of JSON with the target's metadata, name and address. Each area of the target
has one transfer at a time, whose note is "moved AREA TURN"; the target answers with the area. A transfer that is
released is followed by "released AREA TURN".
"""

from __future__ import annotations

import json
import random
import sys

import numpy as np

from asyncfabric.integrations.nixl import nixl_agent, nixl_agent_config

AREAS, AREA_BYTES, PAGE_BYTES = 8, 1 << 20, 4096


def main() -> None:
    """Write for as long as the process lives."""
    agent = nixl_agent(sys.argv[1], nixl_agent_config(enable_prog_thread=False))
    order = random.Random(int(sys.argv[2]))
    memory = np.zeros((AREAS, AREA_BYTES), np.uint8)
    agent.register_memory([(int(memory.ctypes.data), memory.nbytes, 0, "")], "DRAM")
    print(json.dumps({"metadata": agent.get_agent_metadata().hex()}), flush=True)
    target = json.loads(sys.stdin.readline())
    agent.add_remote_agent(bytes.fromhex(target["metadata"]))
    pages = np.arange(AREA_BYTES // PAGE_BYTES)
    sides = []
    for name, base in (("", memory.ctypes.data), (target["name"], target["address"])):
        rows = np.empty((AREAS * len(pages), 3), np.uint64)
        rows[:, 0] = np.arange(len(rows), dtype=np.uint64) * np.uint64(PAGE_BYTES) + np.uint64(base)
        rows[:, 1:] = PAGE_BYTES, 0
        sides.append(agent.prep_xfer_dlist(name, rows, "DRAM"))
    free, turn, flying = list(range(AREAS)), 0, []
    while True:
        if free:
            area, turn = free.pop(), turn + 1
            memory[area] = turn % 251
            first, second = (area * len(pages) + np.random.default_rng(turn + n).permutation(pages) for n in (0, 1))
            handle = agent.make_prepped_xfer("WRITE", sides[0], first, sides[1], second, b"moved %d %d" % (area, turn))
            if agent.transfer(handle) == "PROC" and order.random() < 0.3:
                agent.release_xfer_handle(handle)
                agent.send_notif(target["name"], b"released %d %d" % (area, turn))
            flying.append(handle)
        flying = [handle for handle in flying if not handle._released and agent.check_xfer_state(handle) != "DONE"]
        for answer in agent.get_new_notifs().get(target["name"], []):
            free.append(int(answer))


main()

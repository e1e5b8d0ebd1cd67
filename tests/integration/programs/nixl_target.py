"""An agent of the NIXL face with memory that others write and read; it registers again when asked, and gets killed.

Answers in JSON lines. Its argument: the name of the agent.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from asyncfabric.integrations.nixl import nixl_agent

LENGTH = 1 << 20


def main() -> None:
    """Register, report, and register again for each line that comes."""
    agent = nixl_agent(sys.argv[1])
    memory = np.zeros(LENGTH, np.uint8)
    rows = [(int(memory.ctypes.data), LENGTH, 0, "")]
    registered = agent.register_memory(rows, "DRAM")
    report = {"address": rows[0][0], "metadata": agent.get_agent_metadata().hex()}
    print(json.dumps(report), flush=True)
    for _ in sys.stdin:
        agent.deregister_memory(registered)
        registered = agent.register_memory(rows, "DRAM")
        answer = {**report, "metadata": agent.get_agent_metadata().hex(), "notes": len(agent._core.notes.waiting)}
        print(json.dumps(answer), flush=True)
    agent._close()


main()

"""Another user of this host: connects to an abstract socket as often as it can, sends nothing, and holds on.

Run as root: `python stranger.py SOCKET COUNT`. It answers how many connections it holds, and ends with standard input.
"""

from __future__ import annotations

import os
import resource
import socket
import sys

from json_lines import answer

NOBODY = 65534


def main(name: str, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    held = []
    for _ in range(count):
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[-1].connect(f"\0{name}")
    answer({"held": len(held)})
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

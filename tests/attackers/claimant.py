"""One who has the secret becomes a peer; then what it proved is sent again over a second connection.

`python claimant.py ADDRESS SECRET`. It shows that the attacker speaks the fabric's bytes well enough to be let in where
it should be. Each connection sends a user message; the one of the second must not arrive. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from dataclasses import replace

from attacker import CLIENTS
from engine_wire import Kind, Target

FIRST, SECOND = b"over the first", b"over the second"
PATIENCE_S = 20.0
SETTLE_S = 0.5


def main(address: str, secret: str) -> None:
    """Claim, replay, and end when standard input does."""
    target = Target.parse(bytes.fromhex(address))
    make = CLIENTS[target.protocol.decode()]
    first = make(target)
    claimant = first.claim(bytes.fromhex(secret), PATIENCE_S)
    os.write(1, json.dumps({"welcome": claimant is not None}).encode() + b"\n")  # at once: the reader may leave then
    if claimant is None:
        return
    second = make(target)
    second.ours = replace(first.ours)
    for text, connection, again in ((SECOND, second, claimant.sent), (FIRST, first, [])):
        for message in again:
            connection.send_message(message)
        connection.send_message(bytes(claimant.message(Kind.USER, 0, struct.pack("<H", len(text)) + text)))
        time.sleep(SETTLE_S)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

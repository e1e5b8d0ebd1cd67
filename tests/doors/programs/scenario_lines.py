"""Runs scenarios that a test asks for: {"do": NAME, ...} is answered by {"ok": true, ...} or {"error": TEXT}."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import AbstractContextManager


def serve(cluster: AbstractContextManager[object], folder: str) -> None:
    """Open the cluster and run the methods of what it yields, until the input ends; other prints are diverted."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints too
    with cluster as scenarios:
        print(json.dumps({"ok": True, "folder": folder}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                asked = json.loads(line)
                answer = {"ok": True, **getattr(scenarios, asked.pop("do"))(**asked)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)

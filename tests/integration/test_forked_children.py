"""os.fork() with an open fabric: what the child may do with its copy, and that the parent does not notice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from availability import need
from processes import PROGRAMS


def _run(*words: str) -> Any:
    command = [sys.executable, str(PROGRAMS / words[0]), *words[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr}"
    return json.loads(ended.stdout)


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_a_forked_child_has_no_fabric_and_the_parent_keeps_its_own(rail: str) -> None:
    """The child has none of the engine's threads: its calls hung, or moved what the parent and its peers share."""
    need(rail)
    reported = _run("tight.py", "fork", rail)
    assert reported["status"] == 0, reported
    assert reported["child"] and all(
        text.startswith("ClosedError") and "forked" in text for text in reported["child"].values()
    ), reported["child"]
    assert reported["arrived"] == 1, reported


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_a_forked_child_may_open_fabrics_of_its_own(rail: str) -> None:
    need(rail)
    assert _run("forked_anew.py", rail) == {"child": 0, "arrived": 1}

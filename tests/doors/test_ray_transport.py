"""Ray's own actors on two raylets move tensors over asyncfabric, while they are stopped, aborted and killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from children import Child

Ask = Callable[[str], dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run one cluster for all tests; it leaves no process, no folder and no shared memory."""
    shared = set(os.listdir("/dev/shm"))
    with Child("ray_cluster.py") as cluster:
        yield cluster.ask
        cluster.end()
        folder = cluster.hello["folder"]
    assert not os.path.exists(folder)
    assert {name for name in os.listdir("/dev/shm") if "plasma" in name or "asyncfabric" in name} <= shared
    assert [line for line in _command_lines() if folder in line] == []


def _command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue  # it ended meanwhile


def test_tensors_of_all_shapes_move_both_ways_between_two_raylets_and_to_the_driver(ask: Ask) -> None:
    seen = ask("both_ways")
    assert seen["there"] == seen["back"] == seen["driver"] == seen["put"] == seen["expected"]
    assert len(set(seen["pids"])) == 2


def test_objects_over_one_storage_are_one_registration_until_the_last_is_collected(ask: Ask) -> None:
    seen = ask("one_registration")
    assert seen["sums"] == [sum(range(100)), sum(range(100, 300)), sum(range(100, 300))]
    assert (seen["both"], seen["receiver"]) == (1, 0)


def test_tensors_are_read_into_the_buffers_of_the_caller(ask: Ask) -> None:
    seen = ask("target_buffers")
    assert seen["same"] and seen["digests"] == ask("both_ways")["expected"]
    assert (seen["pinned"], seen["left"]) == (1, 0)


def test_the_nixl_transport_of_ray_runs_unchanged_over_the_face(ask: Ask) -> None:
    seen = ask("nixl")
    assert seen["there"] == seen["back"] == seen["driver"] == seen["expected"]
    assert all(file.startswith(seen["face"]) for file in seen["files"])


def test_fetches_of_one_get_overlap(ask: Ask) -> None:
    seen = ask("overlap")
    assert seen["sums"] == seen["expected"]


def test_an_aborted_fetch_ends_when_its_memory_is_free_and_kills_nobody(ask: Ask) -> None:
    seen = ask("abort")
    assert "RayDirectTransportError" in seen["text"] and "was aborted" in seen["text"]
    assert seen["digests"] == seen["expected"] and seen["left"] == 0


def test_a_fetch_that_nobody_waits_for_any_more_is_cancelled_and_its_buffers_released(ask: Ask) -> None:
    seen = ask("timeout")
    assert "GetTimeoutError" in seen["text"]
    assert seen["regions"] == 0


def test_the_receiver_lives_when_its_source_is_killed_and_its_error_names_it(ask: Ask) -> None:
    seen = ask("killed")
    assert "RayDirectTransportError" in seen["text"]
    assert seen["name"] in seen["text"] and f"process {seen['pid']} on " in seen["text"]
    assert seen["alive"] == seen["expected"]

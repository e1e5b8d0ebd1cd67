"""verl's checkpoint engine "asyncfabric" under verl's own manager and workers: bits, failures, deaths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from children import Child

Ask = Callable[[str], dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run one cluster for all tests; it leaves no folder."""
    with Child("verl_cluster.py") as cluster:
        yield cluster.ask
        cluster.end()
        folder = cluster.hello["folder"]
    assert not os.path.exists(folder)


def equal(seen: dict[str, Any]) -> bool:
    """Return whether every rollout rank received, bit for bit, what every trainer rank had."""
    first = seen["sent"][0]
    assert len(first) == 8
    return all(one == first for one in (*seen["sent"], *seen["received"]))


def test_the_engine_is_one_of_verl_s_with_its_signatures(ask: Ask) -> None:
    seen = ask("contract")
    assert seen["registered"] and seen["subclass"]
    assert seen["ours"] == seen["theirs"]
    assert "bucket_size must be at least 64 bytes, got 8" in seen["small"]
    assert "comes after prepare" in seen["early"]


def test_every_rank_of_every_replica_gets_the_trainers_bits_and_every_trainer_sends(ask: Ask) -> None:
    for _ in range(2):
        seen = ask("update")
        assert equal(seen)
    assert seen["calls"][:4] == [
        "abort_all_requests",
        "release_kv_cache",
        "resume_kv_cache",
        "resume_generation",
    ]
    sent = [seen["metrics"][f"asyncfabric/sent_bytes/rank_{rank}"] for rank in range(2)]
    assert min(sent) > 1 << 20, sent


def test_a_trainer_whose_weights_fail_fails_the_update_and_the_next_one_goes(ask: Ask) -> None:
    seen = ask("trainer_fails")
    assert "the generator failed" in seen["error_text"]
    assert equal(seen)


def test_a_rollout_that_fails_fails_the_update_and_the_next_one_goes(ask: Ask) -> None:
    seen = ask("adapter_fails")
    assert "the adapter failed" in seen["error_text"] or "gave the update up" in seen["error_text"]
    assert equal(seen)


def test_a_rollout_that_dies_is_named_and_the_others_go_on_without_it(ask: Ask) -> None:
    seen = ask("rollout_dies")
    trainers, rollouts = seen["texts"][:2], seen["texts"][2:]
    assert all("rollout-1" in text for text in trainers), trainers
    assert "ActorDiedError" in rollouts[1], rollouts
    assert all(not text or "gave the update up" in text for text in rollouts[:1]), rollouts
    assert seen["seconds"] < 20, seen["seconds"]
    assert equal(seen)

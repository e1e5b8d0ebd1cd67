"""kill -9 at every stage of an update in place: replica `a` has a shadow, `b` overwrites the version that it serves.

Engines of both replicas read their weights all the time. Whoever is killed, and whenever: what an engine was allowed to
read was always one whole version that was decided, `a` was never without one, and `b` reported it while it had none.
All deaths happen in one training: each begins with everything whole again, and the last is that of the only version.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_world import Served, WeightWorld, open_world

REPLICAS = ("a", "b")
RECEIVERS = {"a": ["a/0", "a/1"], "b": ["b/0", "b/1"]}
EVERYBODY = [*RECEIVERS["a"], *RECEIVERS["b"]]

pytestmark = pytest.mark.slow


def whole_again(made: WeightWorld, victim: str) -> dict[str, Served]:
    """Start the victim again; everybody comes to what was decided last. Returns what the survivors had served then."""
    made.start(victim)
    version = made["coordinator"].ask("held", receivers=EVERYBODY)["version"]
    assert version == made.decided()[-1]
    for name in REPLICAS:
        made[name].ask("until", version=version)
    all_served = made.all_served()
    assert all(versions[-1] == version for versions in all_served.values()), all_served
    for name in RECEIVERS["a"]:
        assert 0 not in all_served[name][1:], "a shadow is there so that something always serves"
    return all_served


def a_trainer_dies(world: WeightWorld) -> None:
    """The version is aborted; what it had overwritten is fetched again from who kept the old one.

    Once it has written everything the replicas may have verified it before the loss is known: then it is decided.
    """
    for victim, way, word, other in (
        ("trainer-1", "receive", "Roster", ""),
        ("trainer-0", "receive", "Opened", "b/1"),
        ("trainer-1", "send", "Written", "b/0"),
        ("trainer-0", "send", "Wrote", ""),
    ):
        before = world.decided()[-1]
        version, ends = world.die(victim, way, word, other)
        now = version if word == "Wrote" and "error" not in ends["coordinator"] else before
        if now == before:
            assert {end["error"] for end in ends.values()} == {"BrokenError"}
            assert victim in ends["coordinator"]["text"]
        all_served = whole_again(world, victim)
        assert world.decided()[-1] == now
        for name in RECEIVERS["b"]:
            assert word in ("Roster", "Opened") or all_served[name][-3:] == [before, 0, now], all_served[name]


def a_rollout_dies_that_is_updated_in_place(world: WeightWorld) -> None:
    """The update goes on without it; it comes back with nothing, and fetches what was decided."""
    for way, word, other in (
        ("receive", "Prepare", ""),
        ("send", "Stopped", ""),
        ("send", "Ready", ""),
        ("receive", "Written", ""),
        ("send", "Verified", ""),
        ("receive", "Commit", ""),
    ):
        version, ends = world.die("b", way, word, other)
        assert ends["coordinator"]["receivers"] == EVERYBODY, "who began, also those that were lost"
        assert world.decided()[-1] == version
        assert whole_again(world, "b")["b/0"] == [0, version]


def the_coordinator_dies(world: WeightWorld) -> None:
    """What is on the disk is reported by the next one, everything else is an abort and is fetched back."""
    for way, word, other in (
        ("send", "Prepare", "b/0"),
        ("receive", "Stopped", "b/1"),
        ("send", "Write", "trainer-1"),
        ("receive", "Verified", "b/0"),
        ("send", "Commit", "a/0"),
        ("send", "Commit", "b/1"),
    ):
        before = world.decided()[-1]
        version, ends = world.die("coordinator", way, word, other)
        assert all("whether it had decided is not known" in end["text"] for end in ends.values()), ends
        all_served = whole_again(world, "coordinator")
        assert world.decided()[-1] == (version if word == "Commit" else before)
        for name in RECEIVERS["b"]:
            stopped = word in ("Write", "Verified", "Commit") or (word, other) == ("Stopped", name)
            assert not stopped or all_served[name][-3:] == [before, 0, world.decided()[-1]], (word, all_served[name])


def who_kept_the_old_version_dies(world: WeightWorld) -> None:
    """While it is written: the update goes on. Before: nobody would hold a version, so none is begun in its place."""
    version, ends = world.die("a", "receive", "Written", "")
    assert "error" not in ends["coordinator"]
    assert whole_again(world, "a")["b/0"][-3:] == [version - 1, 0, version]
    version, ends = world.die("a", "receive", "Prepare", "")
    assert ends["coordinator"]["error"] == "BrokenError"
    assert "nobody would hold version" in ends["coordinator"]["text"]
    world.start("a")
    assert {tuple(versions[-1:]) for versions in world.all_served().values()} == {(0,)}, (
        "nobody has one, and all report it"
    )


def test_whoever_dies_at_any_stage_of_an_update_in_place(tmp_path: Path) -> None:
    with open_world(tmp_path, {"a": {"shadow": True}, "b": {"shadow": False}}) as world:
        a_trainer_dies(world)
        a_rollout_dies_that_is_updated_in_place(world)
        the_coordinator_dies(world)
        who_kept_the_old_version_dies(world)

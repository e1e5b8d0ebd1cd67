"""kill -9 of a relay in the middle of a chain of replicas, while it takes and passes on coded rows.

Trainers feed the first replica, which feeds the second, which feeds the third; who came first is first. Engines of all
replicas read their weights all the time: what they read was always one whole version that was decided. All deaths
happen in one training: each begins with everything whole again.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from weight_world import WeightWorld, open_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAMES = ("a", "b", "c")
FIRST, MIDDLE, LAST = range(3)


def chain(made: WeightWorld) -> list[str]:
    """Return the replicas in the order in which they feed each other, after checking what each link brought."""
    feeds = {to[0]: sender[0] for sender, to, _, _ in made.links if sender[0] in NAMES}
    assert len(feeds) == 2, made.links
    (last,) = set(feeds) - set(feeds.values())
    order = [feeds[feeds[last]], feeds[last], last]
    between = {(sender, to) for sender, to, _, _ in made.links if sender[0] in NAMES}
    wanted = {(f"{one}/{rank}", f"{other}/{rank}") for one, other in pairwise(order) for rank in range(2)}
    assert between == wanted and all(0 < sent < plain for _, _, plain, sent in made.links)
    return order


DEATHS: tuple[tuple[int, str, str, int | None], ...] = (
    (MIDDLE, "receive", "Coded", FIRST),
    (MIDDLE, "send", "Coded", LAST),
    (MIDDLE, "receive", "Taken", LAST),
    (MIDDLE, "send", "Wrote", None),
    (FIRST, "send", "Coded", MIDDLE),
    (LAST, "receive", "Coded", MIDDLE),
)
"""Place of the victim in the chain; whether it sends or receives the message at which it dies; its other end."""


def test_relays_die_with_coded_rows_under_way(tmp_path: Path) -> None:
    """Who waits for its rows makes it an abort; when nobody does the others may have it all: then it is decided."""
    with open_world(tmp_path, {name: {} for name in NAMES}, relay=(0, 1), codings=("exponent",)) as made:
        for victim, way, word, other in DEATHS:
            case = (victim, way, word)
            order, before = chain(made), made.decided()[-1]
            version, ends = made.die(order[victim], way, word, "" if other is None else f"{order[other]}/1")
            if "error" in ends["coordinator"]:
                assert f"sender {order[victim]}/" in ends["coordinator"]["text"], case
            now = before if "error" in ends["coordinator"] else version
            needed = victim != LAST and word == "Coded"  # what somebody else was still to get
            assert made.decided()[-1] == now and (now == before or not needed), case
            made.start(order[victim])
            made["coordinator"].ask("held", receivers=made.everybody)
            for name in NAMES:
                made[name].ask("until", version=now)
            all_served = made.all_served()
            assert all(versions[-1] == now for versions in all_served.values()), (case, all_served)
            made.bring()
            chain(made)

"""Proposals of trainers: agreed when all offer one version; proposals of others are not taken."""

from __future__ import annotations

from asyncfabric.weights.coordinator.participants import Proposals


def test_a_version_is_agreed_when_each_trainer_offers_it() -> None:
    proposals = Proposals(["t0", "t1"])
    proposals.make("t0", 4)
    assert proposals.agreed is None and "t0" in proposals
    proposals.make("t1", 3)
    assert proposals.agreed is None
    proposals.make("t1", 4)
    assert proposals.agreed == 4
    assert sorted(proposals.take_down(4)) == ["t0", "t1"] and proposals.agreed is None


def test_a_proposal_of_somebody_who_is_no_trainer_is_not_taken() -> None:
    proposals = Proposals(["t0", "t1"])
    for sender in ("r0", "r1"):
        proposals.make(sender, 4)
        assert sender not in proposals
    proposals.make("t0", 4)
    assert proposals.agreed is None
    assert proposals.take_down(4) == ["t0"]  # who gets the outcome of that version

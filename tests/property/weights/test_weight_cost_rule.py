"""Whether a coding is used: decided from measured rates alone, so that it is never the slower way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_fixture import open_fixture, random_shard, run, small_plan

from asyncfabric.weights.coding.choice import (
    LOOK_EVERY,
    MEASURE_EVERY,
    PLAIN_FIRST,
    PLAIN_KEPT,
    Coding,
    CodingOffer,
    CostRule,
    Costs,
    known_codings,
)

BOTH = frozenset({Coding.DELTA, Coding.EXPONENT})
DELTA = Costs(coding=Coding.DELTA, ratio=0.0159, encode_bytes_per_s=0.58e9, decode_bytes_per_s=1.2e9)
EXPONENT = Costs(coding=Coding.EXPONENT, ratio=0.682, encode_bytes_per_s=0.18e9, decode_bytes_per_s=0.4e9)
"""Of `bench coding` on one core, see docs/explain/weights_coding.md."""

LOCAL = 2.2e9
"""Plain bytes between two processes of the same machine, from the same page."""


def cost_rule(rate: float, costs: Any = (DELTA, EXPONENT)) -> CostRule:
    one = CostRule()
    for _ in range(PLAIN_FIRST):
        one.sent([("a/0", Coding.FULL, rate)])
    one.measured({cost.coding: cost for cost in costs})
    return one


@pytest.mark.parametrize(
    ("rate", "has_base", "expected"),
    [
        (LOCAL, True, Coding.FULL),
        (0.6e9, True, Coding.FULL),
        (0.5e9, True, Coding.DELTA),
        (0.5e9, False, Coding.FULL),  # without a base exponents are left, and would be slower
        (0.1e9, True, Coding.DELTA),
        (0.1e9, False, Coding.EXPONENT),
    ],
)
def test_the_measured_rate_decides(rate: float, has_base: bool, expected: Coding) -> None:
    coding, why = cost_rule(rate).settle("a/0", CodingOffer(BOTH, has_base, 1.0, 1))
    assert coding is expected and why


def test_what_was_not_measured_is_not_used() -> None:
    offer = CodingOffer(BOTH, True, 1.0, 1)
    assert CostRule().settle("a/0", offer) == (Coding.FULL, "not measured yet")
    assert cost_rule(0.01e9).settle("b/0", offer) == (Coding.FULL, "not measured yet")
    unknown = CostRule()
    for _ in range(PLAIN_FIRST):
        unknown.sent([("a/0", Coding.FULL, 0.01e9)])
    assert unknown.settle("a/0", offer) == (Coding.FULL, "not measured yet")
    early = CostRule()
    early.measured({Coding.DELTA: DELTA})
    for _ in range(PLAIN_FIRST - 1):
        early.sent([("a/0", Coding.FULL, 0.01e9)])
        assert early.settle("a/0", offer) == (Coding.FULL, "not measured yet")
    early.sent([("a/0", Coding.FULL, 0.01e9)])
    assert early.settle("a/0", offer)[0] is Coding.DELTA


def test_a_busy_moment_makes_no_slow_wire() -> None:
    """Of the last plain versions the best one counts; a wire that is slow throughout is one in the end."""
    offer = CodingOffer(BOTH, True, 1.0, 1)
    one = cost_rule(LOCAL)
    for _ in range(PLAIN_KEPT - 1):
        one.sent([("a/0", Coding.FULL, 0.01e9)])
        assert one.settle("a/0", offer)[0] is Coding.FULL
    one.sent([("a/0", Coding.FULL, 0.01e9)])
    assert one.settle("a/0", offer)[0] is Coding.DELTA


@pytest.mark.parametrize(("gain", "looks"), [(2.0, True), (10.0, False)])
def test_plain_bytes_are_measured_again_unless_they_are_far_behind(gain: float, looks: bool) -> None:
    offer = CodingOffer(BOTH, True, 1.0, 1)
    one = cost_rule(0.02e9)
    for _ in range(LOOK_EVERY):
        assert one.settle("a/0", offer)[0] is Coding.DELTA
        one.sent([("a/0", Coding.DELTA, gain * 0.02e9)])
    assert (one.settle("a/0", offer) == (Coding.FULL, "plain bytes are measured again")) is looks
    one.sent([("a/0", Coding.FULL, LOCAL)])  # what was taken for a slow wire was a busy machine
    assert one.settle("a/0", offer)[0] is Coding.FULL


@given(
    rate=st.floats(1e6, 1e11),
    ratio=st.floats(1e-3, 2.0),
    encode=st.floats(1e6, 1e11),
    decode=st.floats(1e6, 1e11),
    share=st.floats(0.01, 1.0),
    senders=st.integers(1, 64),
    has_base=st.booleans(),
)
def test_a_coding_is_never_chosen_that_is_slower_by_what_was_measured(
    rate: float, ratio: float, encode: float, decode: float, share: float, senders: int, has_base: bool
) -> None:
    costs = [
        Costs(coding=each, ratio=ratio, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
        for each in (Coding.DELTA, Coding.EXPONENT)
    ]
    coding, _ = cost_rule(rate, costs).settle("a/0", CodingOffer(BOTH, has_base, share, senders))
    if coding is not Coding.FULL:
        assert has_base or coding is Coding.EXPONENT
        assert min(encode * share, rate / ratio, decode / senders) > rate


def test_a_coding_that_turned_out_slower_is_left_until_it_is_measured_again() -> None:
    offer = CodingOffer(BOTH, True, 1.0, 1)
    one = cost_rule(0.1e9)
    for reached in (0.3e9, 0.09e9, 0.3e9, 0.09e9):  # never twice in a row
        one.sent([("a/0", Coding.DELTA, reached)])
        assert one.settle("a/0", offer)[0] is Coding.DELTA
    one.sent([("a/0", Coding.DELTA, 0.09e9)])
    assert one.settle("a/0", offer)[0] is Coding.EXPONENT
    for _ in range(2):
        one.sent([("a/0", Coding.EXPONENT, 0.09e9)])
    assert one.settle("a/0", offer)[0] is Coding.FULL
    for _ in range(MEASURE_EVERY):
        one.sent([("a/0", Coding.FULL, 0.1e9)])
    assert one.wants_sample()
    one.measured({Coding.DELTA: DELTA, Coding.EXPONENT: None})
    assert not one.wants_sample() and one.wants_sample(ahead=MEASURE_EVERY)
    assert one.settle("a/0", offer)[0] is Coding.DELTA


def test_names_that_are_no_codings_are_refused() -> None:
    assert known_codings(["delta", "full"]) == {Coding.DELTA}
    with pytest.raises(ValueError, match="'gzip' is not a coding of weights, known are delta, exponent"):
        known_codings(["gzip"])


def pretend(cost_rule: CostRule, rate: float) -> None:
    """Let it take this rate, and these costs, for measured."""
    sent, measured = cost_rule.sent, cost_rule.measured
    cost_rule.sent = lambda rates: sent([(name, one, rate) for name, one, _ in rates])  # type: ignore[method-assign]
    cost_rule.measured = lambda costs: measured({Coding.DELTA: DELTA})  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("wire", [LOCAL, 0.05e9])
def test_an_update_measures_and_then_uses_what_pays(tmp_path: Path, wire: float) -> None:
    """Three versions are measured, the fourth is the base, the fifth is a delta; on a fast wire nothing is kept."""
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

    async def body() -> None:
        async with open_fixture(
            small_plan(names=("a",)), random_shard, tmp_path / "log", codings=("delta",)
        ) as fixture:
            for publisher in fixture.publishers:
                codings = publisher._codings
                assert codings is not None
                pretend(codings._cost_rule, wire)
            found, kept = [], []
            for version in (1, 2, 3, 4, 5, 6):
                report = await fixture.update(version)
                found.append({one.coding for one in report.codings})
                kept.append(codings._bases.version)
                await fixture.flip(version)
                fixture.check(version)
                fixture.nudge(version)
            if wire == LOCAL:
                assert found == [{"full"}] * 6 and kept == [0] * 6 and not codings._bases._held
                assert "plain bytes are faster on a wire on which they reach 2.2 GB/s" in report.codings[0].why
                assert codings._region is None
            else:
                assert found == [{"full"}] * 4 + [{"delta"}] * 2 and kept == [0, 0, 0, 4, 5, 6]

    run(body)

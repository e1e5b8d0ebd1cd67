"""Each check of `asyncfabric doctor` on planted facts: what it states, that it can complain, and then with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_cases import CASES, Case

from asyncfabric_services.doctor.command import plain, status_of
from asyncfabric_services.doctor.finding import PROVIDERS, Finding, Verdict
from asyncfabric_services.doctor.groups import GROUPS, CheckGroup, examine
from asyncfabric_services.doctor.kernel import KernelFacts, check_kernel
from asyncfabric_services.doctor.trials import Trial, TrialFacts, check_trials, try_rail

CHECKS = {group.name: group.check for group in GROUPS} | {"trials": check_trials}


def finding_of(case: Case) -> Finding:
    """Return the one finding that a case is about."""
    (finding,) = (one for one in CHECKS[case.group](case.facts, case.asked) if one.check == case.check)
    return finding


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}-{case.verdict}-{case.states}")
def test_a_check_states_what_its_facts_mean(case: Case) -> None:
    finding = finding_of(case)
    assert finding.verdict == case.verdict, finding
    assert case.states in finding.detail
    assert finding.verdict == "ok" or finding.fix


def test_no_check_that_cannot_complain() -> None:
    seen = {one.check for case in CASES for one in CHECKS[case.group](case.facts, case.asked)}
    complained = {case.check for case in CASES if case.verdict in ("warn", "fail")}
    assert seen - complained == set()


def test_each_group_has_cases() -> None:
    assert {case.group for case in CASES} == set(CHECKS)
    assert {provider for group in GROUPS for provider in group.matters_for} == set(PROVIDERS)


def test_a_complaint_without_a_fix_is_refused() -> None:
    with pytest.raises(ValueError, match="without a fix"):
        Finding("clock", Verdict.WARN, "hpet")


@pytest.mark.parametrize(("verdicts", "status"), [("ok warn n.a.", 0), ("ok fail", 3), ("warn", 0), ("n.a.", 0)])
def test_only_failures_change_the_status(verdicts: str, status: int) -> None:
    findings = [Finding("a", Verdict(verdict), "b", "c") for verdict in verdicts.split()]
    assert status_of(findings) == status
    assert any(plain(finding)["verdict"] == "fail" for finding in findings) is (status == 3)


@pytest.mark.parametrize(
    ("verdict", "stated", "detail"),
    [("ok", "ok", "b"), ("warn", "warn", "b"), ("fail", "fail", "b"), ("n.a.", "ok", "not here: b")],
)
def test_scripts_read_three_verdicts(verdict: str, stated: str, detail: str) -> None:
    row = plain(Finding("a", Verdict(verdict), "b", "c"))
    assert (row["check"], row["verdict"], row["detail"]) == ("a", stated, detail)
    assert (row["fix"] == "c") == (verdict != "n.a.")


def test_a_room_that_cannot_look_fails_and_does_not_stop_the_others() -> None:
    def broken(_: Path) -> KernelFacts:
        raise PermissionError(13, "Permission denied", "/proc/self/status")

    groups = (CheckGroup("limits", broken, check_kernel, frozenset(PROVIDERS)), GROUPS[0])
    first, second, *_ = examine(Path("/"), frozenset({"cuda"}), groups)
    assert (first.check, first.verdict) == ("limits", "fail")
    assert "Permission denied" in first.detail
    assert second.check == "kernel"


def test_rails_that_are_not_built_are_not_tried() -> None:
    unbuilt = Trial("verbs", built=False, device=True, chosen="mlx5_0")
    assert try_rail(unbuilt, "open") == unbuilt
    assert [finding.check for finding in check_trials(TrialFacts(()), frozenset())] == ["usable"]

"""What `rails="auto"`, the default of a fabric, chooses on this machine, and why; what it leaves out, and why.

A pure function of the choices that `asyncfabric.observe.choice` reads; whether those rails open is shown by the trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncfabric.observe.choice import NOT_BUILT, AutomaticChoice, read_choices
from asyncfabric.types import RailLeftOut
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict


@dataclass(frozen=True)
class AutomaticFacts:
    """The choice of a process without a GPU first, then of one for each GPU."""

    choices: tuple[AutomaticChoice, ...]


def read_automatic(root: Path) -> AutomaticFacts:
    """Read what would be chosen."""
    return AutomaticFacts(read_choices(root))


def check_automatic(facts: AutomaticFacts, _asked: Asked) -> list[Finding]:
    """State what a fabric opens by default, in one line for each kind of process, and why the rest is left out."""
    findings = []
    for each in facts.choices:
        name = "auto" if each.gpu < 0 else f"auto with GPU {each.gpu}"
        rails = "; ".join(f"{rail.text}, {rail.reason}" for rail in each.choice.rails)
        findings.append(Finding(name, Verdict.OK, rails) if rails else _nothing(name))
    left_out = facts.choices[0].choice.left_out
    return [*findings, _left_out(left_out)] if left_out else findings


def _left_out(left_out: tuple[RailLeftOut, ...]) -> Finding:
    rails: dict[str, list[str]] = {}
    for left in left_out:
        rails.setdefault(left.reason, []).append(left.rail)
    name, found = "auto leaves out", "; ".join(f"{', '.join(rails[why])}: {why}" for why in rails)
    if any(":" in rail for rail in rails.get(NOT_BUILT, ())):  # a device is here
        return Finding(name, Verdict.WARN, found, "apt-get install libibverbs-dev libfabric-dev and build again")
    return Finding(name, Verdict.OK, found)


def _nothing(name: str) -> Finding:
    return Finding(name, Verdict.FAIL, "no rail would be chosen", "`make build` compiles the local rail")

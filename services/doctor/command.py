"""`asyncfabric doctor`: options in, one line per check out. Status 0 when usable, 3 when a check failed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from asyncfabric_services.doctor.finding import PROVIDERS, Finding, Verdict
from asyncfabric_services.exits import FINE, UNFIT

COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red", Verdict.ABSENT: "bright_black"}
HERE = Path("/")


@click.command()
@click.option("--provider", "providers", multiple=True, type=click.Choice(PROVIDERS), help="Only what this one needs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
def doctor(providers: tuple[str, ...], as_json: bool) -> int:
    """State whether this machine can move bytes, and what to change; rails that it could use are opened and tried."""
    from asyncfabric_services.doctor.groups import examine

    findings = []
    for finding in examine(HERE, frozenset(providers)):
        findings.append(finding)
        if as_json:
            click.echo(json.dumps(plain(finding)))
        else:
            print_finding(finding)
    return status_of(findings)


def status_of(findings: list[Finding]) -> int:
    """Return the exit status."""
    return UNFIT if any(finding.verdict is Verdict.FAIL for finding in findings) else FINE


def print_finding(finding: Finding) -> None:
    """Print one line, and the fix below it where there is one to make."""
    mark = click.style(f"{finding.verdict:<5}", fg=COLOURS[finding.verdict])
    click.echo(f"{mark} {finding.check:<19} {finding.detail}")
    if finding.fix and finding.verdict is not Verdict.ABSENT:
        click.echo(f"{'':<26}fix: {finding.fix}")


def plain(finding: Finding) -> dict[str, str]:
    """Return what scripts read: ok, warn or fail; what is not here and need not be is fine."""
    if finding.verdict is Verdict.ABSENT:
        return {"check": finding.check, "verdict": "ok", "detail": f"not here: {finding.detail}", "fix": ""}
    return {"check": finding.check, "verdict": str(finding.verdict), "detail": finding.detail, "fix": finding.fix}

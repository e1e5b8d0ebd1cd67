"""The proof: each rail that this machine could use is really opened, and one counted write goes over it.

In a child of its own for each, since a broken library may hang or crash. A write whose immediate does not arrive, or
whose bytes differ, is a failure whatever everything else reports.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncfabric.observe.build import read_build
from asyncfabric.observe.topology import NicKind, Topology, read_topology
from asyncfabric_services.doctor.child import ask_child
from asyncfabric_services.doctor.finding import PROVIDERS, Asked, Finding, Verdict
from asyncfabric_services.doctor.link_keys import read_link_keys

VERBS_KINDS = frozenset({NicKind.INFINIBAND, NicKind.ROCE})
PROGRAM = "asyncfabric_services.doctor.rail_trial"
ABSENT_FIXES = {
    "tcp": "apt-get install libfabric-dev libfabric1 and build again, for rails between hosts",
    "efa": "an AWS instance with EFA, and a build with libfabric",
    "verbs": "an InfiniBand or RoCE device, and a build with the verbs provider",
    "cuda": "an NVIDIA GPU, and a build with the cuda provider",
    "local": "build asyncfabric: make build",
}


@dataclass(frozen=True)
class Trial:
    """What became of one rail. `built`: in this build. `device`: what it needs is here. `error`: "" if it worked.

    `chosen`: the device that was named to the rail, "" when the rail chose. `admission`: of its two fabrics, "open" or
    "secret", as of nodes on this machine.
    """

    provider: str
    built: bool
    device: bool
    chosen: str = ""
    error: str = ""
    remedy: str = ""
    library: str = ""
    version: str = ""
    rail_device: str = ""
    admission: str = ""
    imm_arrived: bool = False
    seconds: float = 0.0

    @property
    def tried(self) -> bool:
        """A rail was opened, or should have been."""
        return self.built and self.device


@dataclass(frozen=True)
class TrialFacts:
    """One trial for each provider in question; of verbs one for each device: a broken port hides behind others."""

    trials: tuple[Trial, ...]


def read_trials(root: Path, providers: tuple[str, ...] = PROVIDERS) -> TrialFacts:
    """Try the rails, two at a time: each is mostly the start of a Python."""
    admission = read_link_keys(root).admission
    with ThreadPoolExecutor(2) as pool:
        trials = planned(read_topology(root), read_build().providers, providers)
        return TrialFacts(tuple(pool.map(lambda trial: try_rail(trial, admission), trials)))


def planned(topology: Topology, built: frozenset[str], providers: tuple[str, ...]) -> list[Trial]:
    """Return the trials to make, and those that cannot be made."""
    here = present(topology)
    trials = [Trial(name, name in built, name in here) for name in providers if name != "verbs" or name not in here]
    if "verbs" in providers and "verbs" in here:
        ports = [nic.name for nic in topology.nics if nic.up and nic.kind in VERBS_KINDS]
        trials += [Trial("verbs", "verbs" in built, True, name) for name in ports]
    return sorted(trials, key=lambda trial: PROVIDERS.index(trial.provider))


def try_rail(trial: Trial, admission: str) -> Trial:
    """Run one trial, of fabrics with a secret or open ones."""
    if not trial.tried:
        return trial
    stated = ask_child(PROGRAM, f"{trial.provider}:{trial.chosen}" if trial.chosen else trial.provider, admission)
    known: dict[str, Any] = {name: stated[name] for name in Trial.__dataclass_fields__ if name in stated}
    return replace(trial, **known)


def present(topology: Topology) -> frozenset[str]:
    """Return the providers whose hardware is here."""
    kinds = {nic.kind for nic in topology.nics if nic.up}
    here = {"local", "tcp"}
    here |= {"verbs"} if kinds & VERBS_KINDS else set()
    here |= {"efa"} if NicKind.EFA in kinds else set()
    here |= {"cuda"} if topology.gpus else set()
    return frozenset(here)


def check_trials(facts: TrialFacts, asked: Asked) -> list[Finding]:
    """State which rails work, and whether anything does."""
    findings = [_judged(trial, asked) for trial in facts.trials]
    working = {trial.provider: None for trial in facts.trials if trial.tried and not _error(trial)}
    if working:
        return [*findings, Finding("usable", Verdict.OK, ", ".join(working))]
    only = f" out of {', '.join(sorted(asked))}" if asked else ""
    fix = "see the lines above; `make build` compiles the local rail, which needs no library"
    return [*findings, Finding("usable", Verdict.FAIL, f"no rail works{only}", fix)]


def _error(trial: Trial) -> str:
    return trial.error or ("" if trial.imm_arrived else "the write completed, but its immediate never arrived")


def _judged(trial: Trial, asked: Asked) -> Finding:
    name = f"rail {trial.provider}" + (f":{trial.chosen}" if trial.chosen else "")
    if not trial.tried:
        found = "not in this build" if not trial.built else "nothing here that it could use"
        verdict = Verdict.FAIL if trial.provider in asked else Verdict.ABSENT
        return Finding(name, verdict, found, "needs " + ABSENT_FIXES[trial.provider])
    error = _error(trial)
    if not error:
        over = ", ".join(part for part in (trial.rail_device, trial.library, trial.version) if part)
        found = f"{trial.admission}; a first write with an immediate arrived in {trial.seconds * 1e3:.1f} ms"
        return Finding(name, Verdict.OK, f"{found} ({over})" if over else found)
    fix = trial.remedy or "see the lines above"
    # A library that nobody installed breaks nothing that is there; where there are devices, the libraries' lines fail.
    if error.startswith("libfabric could not be opened") and trial.provider not in asked:
        return Finding(name, Verdict.ABSENT, error, fix)
    return Finding(name, Verdict.FAIL, error, fix)

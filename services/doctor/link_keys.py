"""The key file of this machine's nodes: whether it can be used, which of its keys have no role, who may join transfers.

Fabrics of nodes have a secret where the settings name keys.
The file is the one of `cluster.keys` in the environment or its settings file, else the default of `asyncfabric keys`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from asyncfabric.control import read_keys
from asyncfabric.errors import DeviceError
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.keys.command import default_file
from asyncfabric_services.settings.keys import SettingsError
from asyncfabric_services.settings.sources import load_settings

SHOWN = 3


@dataclass(frozen=True)
class LinkKeyFacts:
    """What a key file holds. `error`: why it cannot be used, with `remedy`; `named`: settings name it."""

    file: str
    named: bool = False
    there: bool = True
    trusted: int = 0
    unbound: tuple[str, ...] = ()
    error: str = ""
    remedy: str = ""

    @property
    def admission(self) -> str:
        """What the rails of nodes on this machine are: "secret" or "open", as in `RailInfo.admission`."""
        return "secret" if self.named and self.there and not self.error else "open"


def read_link_keys(root: Path) -> LinkKeyFacts:
    """Read the key file and its trust list; secret keys stay where they are."""
    try:
        named = load_settings(environment=os.environ).settings.cluster.keys
    except SettingsError as error:
        return LinkKeyFacts(
            "", error=f"the settings cannot be read: {error}", remedy="look with: asyncfabric config show"
        )
    file = named or _default()
    path = root / file.absolute().relative_to("/")
    if not os.path.exists(path):  # False also where this user may not look, which Path raises
        return LinkKeyFacts(str(file), named is not None, there=False)
    try:
        keys = read_keys(path)
    except DeviceError as error:
        return LinkKeyFacts(str(file), named is not None, error=str(error.args[0]), remedy=error.remedy)
    return LinkKeyFacts(str(file), named is not None, trusted=len(keys.trusted), unbound=tuple(keys.unbound))


def _default() -> Path:
    try:
        return default_file()
    except click.UsageError:  # a user without a home
        return Path("link.key")


def check_link_keys(facts: LinkKeyFacts, asked: Asked) -> list[Finding]:
    """Return whether nodes can use the keys, which of them may register as anything, and who may join transfers."""
    del asked  # which rails are used changes nothing: links go over tcp beside each of them
    return [*_check_keys(facts), _check_admission(facts)]


def _check_admission(facts: LinkKeyFacts) -> Finding:
    name = "fabrics of nodes"
    if facts.admission == "secret":
        return Finding(name, Verdict.OK, "secret: peers prove the one that the directory gives to nodes with its keys")
    if facts.there and not facts.named and not facts.error:
        fix = f"set cluster.keys (ASYNCFABRIC_CLUSTER__KEYS) to {facts.file} for all nodes"
    else:
        fix = f"asyncfabric keys new {facts.file or 'FILE'}, and name it as cluster.keys of all nodes"
    return Finding(name, Verdict.WARN, "open: no cluster.keys, so whoever reaches a rail of a node is its peer", fix)


def _check_keys(facts: LinkKeyFacts) -> list[Finding]:
    name = "link keys"
    if not facts.there:
        fix = f"make one: asyncfabric keys new {facts.file}"
        if facts.named:
            return [Finding(name, Verdict.FAIL, f"cluster.keys names {facts.file}, which is not there", fix)]
        return [Finding(name, Verdict.ABSENT, "no key file: nodes of one host need none", fix)]
    if facts.error:
        return [Finding(name, Verdict.FAIL, facts.error, facts.remedy or f"look at {facts.file}")]
    if facts.unbound:
        shown = ", ".join(f"{key[:8]}..." for key in facts.unbound[:SHOWN])
        more = f" and {len(facts.unbound) - SHOWN} more" if len(facts.unbound) > SHOWN else ""
        found = f"{len(facts.unbound)} of {facts.trusted} keys without a role, nodes with them may register as any"
        fix = f"asyncfabric keys trust KEY --role ROLE --file {facts.file}"
        return [Finding(name, Verdict.WARN, f"{found}: {shown}{more}", fix)]
    return [Finding(name, Verdict.OK, f"{facts.trusted} trusted, each bound to its roles ({facts.file})")]

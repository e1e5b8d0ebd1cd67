"""A cluster as its file describes it: which nodes, how many, with which settings and resources. Pure but for one read.

The file is TOML. A key that does not exist is an error that names the nearest one, in settings of nodes too. What the
sections of single launchers hold is theirs to decode: `ClusterSpec.launcher_section`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.quantities import parse_size
from asyncfabric_services.settings.keys import SettingsError, all_keys, nearest
from asyncfabric_services.settings.readers import READERS

ROLES = tuple(role for role in READERS if role != "local")
MOST_NODES = 4096  # of a group
LAUNCHERS_OWN = frozenset({"node.name", "cluster.directory", "cluster.bind", "cluster.keys"})
"""Settings that a launcher makes, so that a file has nothing to state about them."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_Section = TypeVar("_Section", bound=msgspec.Struct)
SettingsTable = dict[str, dict[str, Any]]
"""Section -> key -> value, as in the configuration file of a node."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one node needs, in the terms of schedulers; nothing is asked for what is left out.

    Attributes:
        cpus: cores.
        gpus: whole GPUs.
        memory: host memory, such as "16GiB".
        rdma: name of a device resource -> how many, as a Kubernetes device plugin offers it.
    """

    cpus: float = 0
    gpus: int = 0
    memory: str = ""
    rdma: dict[str, int] = {}

    def __post_init__(self) -> None:
        """Check the values; ValueError names what is wrong."""
        if self.cpus < 0 or self.gpus < 0 or any(count < 1 for count in self.rdma.values()):
            raise ValueError("resources are counts: cpus and gpus of 0 or more, rdma of 1 or more")
        if self.memory:
            parse_size(self.memory)

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory, 0 when the file does not state any."""
        return parse_size(self.memory) if self.memory else 0


class NodeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that are alike.

    Attributes:
        count: how many.
        role: what `asyncfabric serve` runs; empty: the name of the group.
        engine: what computes in prefill and decode nodes; empty: as the settings have it.
        settings: of these nodes, over those of the cluster.
        environment: further variables of their processes.
        resources: of each of them.
    """

    count: int = 1
    role: str = ""
    engine: Literal["", "reference", "vllm"] = ""
    settings: SettingsTable = {}
    environment: dict[str, str] = {}
    resources: Resources = Resources()


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster.

    Attributes:
        name: of the cluster: lower-case letters, digits and `-`.
        settings: of all nodes.
        nodes: groups by name; names are written like that of the cluster.
        launcher: sections of single launchers by their name.
    """

    name: str
    nodes: dict[str, NodeGroup]
    settings: SettingsTable = {}
    launcher: dict[str, dict[str, Any]] = {}

    def __post_init__(self) -> None:
        """Check names, roles, counts and settings; ValueError names what is wrong."""
        for what, name in (("name", self.name), *((f"nodes.{group}", group) for group in self.nodes)):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{what}: {name!r} is no name: 1 to 40 lower-case letters, digits and -")
        check_settings(self.settings, "settings")
        for name, group in self.nodes.items():
            if self.role_of(name) not in ROLES:
                hint = nearest(self.role_of(name), list(ROLES))
                raise ValueError(f"nodes.{name}: {self.role_of(name)!r} is no role of a node{hint}; one of {ROLES}")
            if not 0 <= group.count <= MOST_NODES:
                raise ValueError(f"nodes.{name}.count is {group.count}, expected 0 to {MOST_NODES}")
            check_settings(group.settings, f"nodes.{name}.settings")
        self._check_directories()

    def _check_directories(self) -> None:
        """Raise ValueError unless there is a directory, or several of one table."""
        groups = [group for name, group in self.nodes.items() if self.role_of(name) == "directory" and group.count]
        count = sum(group.count for group in groups)
        if not count:
            raise ValueError("a cluster has a node of role directory, got 0: add [nodes.directory]")
        own = self.settings.get("directory", {})
        stores = {(own | group.settings.get("directory", {})).get("store", "memory") for group in groups}
        if count > 1 and (len(stores) > 1 or stores == {"memory"}):
            raise ValueError(
                f"{count} nodes of role directory have one table when they have the same directory.store, such as "
                f"'etcd://host:2379/{self.name}', got {', '.join(sorted(stores))}"
            )

    def role_of(self, group: str) -> str:
        """Return what `asyncfabric serve` runs for a group."""
        return self.nodes[group].role or group

    def scaled(self, group: str, count: int) -> ClusterSpec:
        """Return the same cluster with so many nodes of a group; SettingsError for a group that is not there."""
        if group not in self.nodes:
            raise SettingsError(f"{self.name} has no group {group!r}{nearest(group, list(self.nodes))}")
        one = msgspec.structs.replace(self.nodes[group], count=count)
        try:
            return msgspec.structs.replace(self, nodes={**self.nodes, group: one})
        except ValueError as error:
            raise SettingsError(str(error)) from None

    def launcher_section(self, name: str, kind: type[_Section]) -> _Section:
        """Return the section of a launcher as its struct, with defaults where the file has none.

        Raises SettingsError naming the key.
        """
        section = self.launcher.get(name, {})
        check_fields(section, kind, f"launcher.{name}")
        try:
            return msgspec.convert(section, kind)
        except msgspec.ValidationError as error:
            raise SettingsError(f"launcher.{name}: {error}") from None


def read_spec(file: Path) -> ClusterSpec:
    """Return the cluster that a file describes; raises SettingsError naming the file, the key and what was expected."""
    try:
        return spec_of(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from None
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None
    except UNREADABLE as error:
        raise SettingsError(f"{file} is not TOML: {error}") from None


def spec_of(document: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster of a parsed document; raises SettingsError naming the key and what was expected."""
    check_fields(document, ClusterSpec, "")
    groups = document.get("nodes", {})
    for name, group in groups.items() if isinstance(groups, dict) else ():
        check_fields(group, NodeGroup, f"nodes.{name}")
        check_fields(group.get("resources", {}), Resources, f"nodes.{name}.resources")
    try:
        return msgspec.convert(document, ClusterSpec)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error).removesuffix(" - at `$`")) from None


def check_fields(section: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Raise SettingsError for a section that is none, or for a key that its struct does not have."""
    if not isinstance(section, Mapping):
        raise SettingsError(f"{where}: expected a section, got {section!r}")
    for name in section:
        if name not in kind.__struct_fields__:
            near = nearest(name, list(kind.__struct_fields__))
            raise SettingsError(f"{where}{'.' * bool(where)}{name}: there is no such key{near}")


def check_settings(table: SettingsTable, where: str) -> None:
    """Raise ValueError for a setting that does not exist, is made by launchers, or has a value that is none."""
    for section, values in table.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in all_keys():
                raise ValueError(f"{where}.{key}: there is no such setting{nearest(key, list(all_keys()))}")
            if key in LAUNCHERS_OWN:
                raise ValueError(f"{where}.{key} is not for the file: what launches the cluster makes it")
            try:
                all_keys()[key].read(value)
            except SettingsError as error:
                raise ValueError(f"{where}.{key}: {error}") from None

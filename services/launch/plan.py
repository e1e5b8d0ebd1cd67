"""What a spec means node by node: names, order, command and environment of each process. Pure.

The rules of the environment are here and the same under every launcher; a launcher adds what it alone knows:
`cluster.bind`, `cluster.keys`, and where ranks of a training meet (MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from asyncfabric_services.launch.spec import ClusterSpec, NodeGroup, Resources, SettingsTable
from asyncfabric_services.settings.keys import all_keys

START_ORDER = ("directory", "coordinator", "prefill", "decode", "expert", "rollout", "trainer", "router")
"""Roles in the order of their starts; they end in the reverse of it."""
DIRECTORY = "directory"
ROUTER_PORT = 8000
DIRECTORY_VARIABLE = all_keys()["cluster.directory"].variable


class NodePlan(msgspec.Struct, frozen=True):
    """One node before it runs.

    Attributes:
        name: of the node: group and number.
        group: of the spec.
        role: what `asyncfabric serve` runs.
        environment: variables of the process, over those that its launcher has.
        resources: what it needs.
    """

    name: str
    group: str
    role: str
    environment: dict[str, str] = {}
    resources: Resources = Resources()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the command `asyncfabric` that run the node."""
        return ("serve", self.role, "--node-name", self.name)

    def joined(self, directories: str) -> NodePlan:
        """Return the plan of a node that joins the directories at these link addresses; a directory's is as it was."""
        if self.role == DIRECTORY:
            return self
        return self.given({DIRECTORY_VARIABLE: directories})

    def given(self, variables: Mapping[str, str]) -> NodePlan:
        """Return the plan with more variables, which win."""
        return msgspec.structs.replace(self, environment={**self.environment, **variables})


def plan_nodes(spec: ClusterSpec) -> tuple[NodePlan, ...]:
    """Return the nodes of a cluster in the order in which they start: directories first, routers last."""
    plans = [_plan(spec, name, index) for name, group in spec.nodes.items() for index in range(group.count)]
    return tuple(sorted(plans, key=lambda plan: START_ORDER.index(plan.role)))  # stable: groups as in the file


def stop_order(roles: Mapping[str, str]) -> list[str]:
    """Return the names of nodes, given with their roles, in the order in which they end: routers first."""
    return sorted(roles, key=lambda name: -START_ORDER.index(roles[name]))


def scale_changes(running: Iterable[str], spec: ClusterSpec, group: str) -> tuple[list[NodePlan], list[str]]:
    """Return which plans of a group are to start and which of the running nodes of the group are to stop.

    `running` are the names of the group's nodes now, perhaps with gaps where nodes were drained. Those that run go on
    unless they are too many: then the highest numbers stop. New ones take the lowest numbers that are free.
    """
    count, present = spec.nodes[group].count, {int(name.rpartition("-")[2]) for name in running}
    ending = sorted(present, reverse=True)[: max(0, len(present) - count)]
    free = (index for index in range(len(present) + count) if index not in present)
    starting = [_plan(spec, group, index) for index in islice(free, max(0, count - len(present)))]
    return starting, [f"{group}-{index}" for index in ending]


def settings_variables(table: SettingsTable) -> dict[str, str]:
    """Return settings as environment variables."""
    return {
        all_keys()[f"{section}.{name}"].variable: _text(value)
        for section, values in table.items()
        for name, value in values.items()
    }


def _plan(spec: ClusterSpec, name: str, index: int) -> NodePlan:
    group = spec.nodes[name]
    return NodePlan(
        f"{name}-{index}", name, spec.role_of(name), _environment(spec, name, group, index), group.resources
    )


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _environment(spec: ClusterSpec, name: str, group: NodeGroup, index: int) -> dict[str, str]:
    """Return the variables of a node: the cluster's settings, the group's over them, the group's own variables.

    A node that shares its host with others needs a port of its own: routers count up from 8000 or from what the file
    has, all others take a free one unless the file has one. A training's ranks get RANK and WORLD_SIZE.
    """
    role, kind = spec.role_of(name), all_keys()["engine.kind"].variable
    variables = settings_variables(spec.settings) | settings_variables(group.settings)
    if group.engine:
        variables[kind] = group.engine
    elif role == "router" and (engine := _engine_behind(spec)):
        variables.setdefault(kind, engine)
    stated = group.settings.get("http", {})
    if role == "router":
        stated = {"port": ROUTER_PORT} | spec.settings.get("http", {}) | stated
    port = int(stated.get("port", 0))
    variables[all_keys()["http.port"].variable] = str(port + index if port else 0)
    if role == "trainer":
        variables |= {"RANK": str(index), "WORLD_SIZE": str(group.count)}
    return {**variables, **group.environment}


def _engine_behind(spec: ClusterSpec) -> str:
    """Return the engine of the decode nodes, which the router is given too."""
    engines = [group.engine for name, group in spec.nodes.items() if spec.role_of(name) == "decode"]
    return next((engine for engine in engines if engine), "")

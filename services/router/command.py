"""`asyncfabric serve`: long-running node services. Options in, exit status out; torch is imported when one starts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping

import click
import trio

from asyncfabric_services.exits import FINE, EnvironmentUnfit
from asyncfabric_services.health.logs import open_log
from asyncfabric_services.settings.options import SettingsCommand, settings_options
from asyncfabric_services.settings.sources import LoadedSettings

PRINTED = "Prints one JSON object with `listening` and `link` on standard output when it listens."
NODES = {
    "directory": ("nodes.directory_service", "Know the nodes of a cluster; the others are given its link address."),
    "prefill": ("nodes.prefill_service", "Compute prompts and stream their keys and values to decode nodes."),
    "decode": ("nodes.decode_service", "Generate answers from prompts that prefill nodes compute."),
    "expert": (
        "experts.service",
        "Hold a part of the experts of a model, and answer in step with the other expert nodes.",
    ),
    "router": ("nodes.router_service", "Answer the OpenAI API from the prefill and decode nodes of a cluster."),
    "coordinator": (
        "fanout.coordinator_service",
        "Decide which version of the weights serves; keeps its decisions in a file.",
    ),
    "trainer": (
        "fanout.trainer_service",
        "Train a causal model and publish its weights; one rank, which one is in torchrun's variables.",
    ),
    "rollout": (
        "fanout.rollout_service",
        "Generate with the published weights, while the next version arrives, or in one copy that it is written over.",
    ),
}
"""Nodes of a cluster by command: the module whose `serve` runs, and what it does."""


@click.group()
def serve() -> None:
    """Run a node service until SIGTERM; each command has flags for the settings that it reads."""


@serve.command(cls=SettingsCommand)
@settings_options("local")
def local(loaded: LoadedSettings) -> int:
    """Answer the OpenAI API from one process: prefill and decode here, requests batched.

    Prints one JSON object with the address on standard output when it listens. Ends with 0 after SIGTERM.
    """
    return _run("asyncfabric_services.router.local_service", loaded)


def _add(name: str, module: str, purpose: str) -> None:
    @serve.command(name, cls=SettingsCommand, help=f"{purpose}\n\n{PRINTED}")
    @settings_options(name)
    def node(loaded: LoadedSettings) -> int:
        return _run(f"asyncfabric_services.{module}", loaded)


for _name, _about in NODES.items():
    _add(_name, *_about)


def _run(module: str, loaded: LoadedSettings) -> int:
    """Run `serve(settings, announce)` of a module; it is imported here, since some load torch."""
    try:
        service = importlib.import_module(module)
        from asyncfabric_services.interruption import failing_as
        from asyncfabric_services.router.server import StartError
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(f"{error}; install it with: pip install 'asyncfabric[serve]'") from None
    open_log(loaded.settings.log.level, loaded.settings.log.form)
    with failing_as(
        (StartError, lambda error: click.UsageError(str(error))),
        (click.ClickException, lambda error: error),  # it carries its status; a nursery around it would hide that
    ):
        trio.run(service.serve, loaded.settings, _announce)
    return FINE


def _announce(facts: Mapping[str, str]) -> None:
    click.echo(json.dumps(dict(facts)))

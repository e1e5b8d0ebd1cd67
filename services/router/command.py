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


@serve.command(cls=SettingsCommand)
@settings_options("directory")
def directory(loaded: LoadedSettings) -> int:
    """Know the nodes of a cluster; the others are given its link address.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.nodes.directory_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("prefill")
def prefill(loaded: LoadedSettings) -> int:
    """Compute prompts and stream their keys and values to decode nodes.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.nodes.prefill_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("decode")
def decode(loaded: LoadedSettings) -> int:
    """Generate answers from prompts that prefill nodes compute.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.nodes.decode_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("expert")
def expert(loaded: LoadedSettings) -> int:
    """Hold a part of the experts of a model, and answer in step with the other expert nodes.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.experts.service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("router")
def router(loaded: LoadedSettings) -> int:
    """Answer the OpenAI API from the prefill and decode nodes of a cluster.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.nodes.router_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("coordinator")
def coordinator(loaded: LoadedSettings) -> int:
    """Decide which version of the weights serves; keeps its decisions in a file.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.fanout.coordinator_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("trainer")
def trainer(loaded: LoadedSettings) -> int:
    """Train a causal model and publish its weights; one rank, which one is in torchrun's variables.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.fanout.trainer_service", loaded)


@serve.command(cls=SettingsCommand)
@settings_options("rollout")
def rollout(loaded: LoadedSettings) -> int:
    """Generate with the published weights, while the next version arrives, or in one copy that it is written over.

    Prints one JSON object with `listening` and `link` on standard output when it listens.
    """
    return _run("asyncfabric_services.fanout.rollout_service", loaded)


def _run(module: str, loaded: LoadedSettings) -> int:
    """Run `serve(settings, announce)` of a module; it is imported here, since some load torch."""
    try:
        service = importlib.import_module(module)
        from asyncfabric_services.interruption import first_failure
        from asyncfabric_services.router.server import StartError
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(f"{error}; install it with: pip install 'asyncfabric[serve]'") from None
    open_log(loaded.settings.log.level, loaded.settings.log.form)
    try:
        trio.run(service.serve, loaded.settings, _announce)
    except* StartError as group:
        raise click.UsageError(str(first_failure(group))) from None
    except* click.ClickException as group:  # it carries its status; a nursery around it would hide that
        raise first_failure(group) from None
    return FINE


def _announce(facts: Mapping[str, str]) -> None:
    click.echo(json.dumps(dict(facts)))

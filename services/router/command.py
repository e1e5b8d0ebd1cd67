"""`asyncfabric serve`: long-running node services. Options in, exit status out; torch is imported when one starts."""

from __future__ import annotations

import json
from functools import partial

import click
import trio

from asyncfabric_services.exits import FINE, EnvironmentUnfit
from asyncfabric_services.health.logs import open_log
from asyncfabric_services.settings.options import settings_options
from asyncfabric_services.settings.sources import Loaded


@click.group()
def serve() -> None:
    """Run a node service until SIGTERM."""


@serve.command()
@settings_options
def local(loaded: Loaded) -> int:
    """Answer the OpenAI API from one process: prefill and decode here, requests batched.

    Prints one JSON object with the address on standard output when it listens. Ends with 0 after SIGTERM.
    """
    try:
        from asyncfabric_services.router.local_service import serve_local
        from asyncfabric_services.router.server import StartError
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(f"{error}; install it with: pip install 'asyncfabric[serve]'") from None
    open_log(loaded.settings.log.level, loaded.settings.log.form)
    try:
        trio.run(partial(serve_local, loaded.settings, _announce))
    except* StartError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise click.UsageError(str(first)) from None
    return FINE


def _announce(address: str) -> None:
    click.echo(json.dumps({"listening": address}))

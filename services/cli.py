"""The `asyncfabric` command.

Sub-commands are imported when they are called. Errors become exit statuses here and nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from asyncfabric_services.exits import DEADLINE, FINE, UNFIT

COMMANDS = {
    "bench": ("asyncfabric_services.bench.commands", "bench"),
    "config": ("asyncfabric_services.settings.command", "config"),
    "demo": ("asyncfabric_services.demo", "demo_command"),
    "doctor": ("asyncfabric_services.doctor.command", "doctor"),
    "down": ("asyncfabric_services.launch.command", "down"),
    "drain": ("asyncfabric_services.launch.command", "drain"),
    "keys": ("asyncfabric_services.keys.command", "keys"),
    "mr": ("asyncfabric_services.look.command", "mr"),
    "peers": ("asyncfabric_services.look.command", "peers"),
    "plan": ("asyncfabric_services.plan.command", "plan"),
    "scale": ("asyncfabric_services.launch.command", "scale"),
    "serve": ("asyncfabric_services.router.command", "serve"),
    "status": ("asyncfabric_services.launch.command", "status"),
    "top": ("asyncfabric_services.look.top", "top"),
    "topo": ("asyncfabric_services.topo.command", "topo"),
    "trace": ("asyncfabric_services.trace.command", "trace"),
    "up": ("asyncfabric_services.launch.command", "up"),
    "version": ("asyncfabric_services.version", "version"),
    "why": ("asyncfabric_services.look.command", "why"),
}
"""Sub-command -> (module, attribute). A module that is not part of an installation hides its command."""


REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EFBIG}
)
"""What is no defect of ours: a disk that is full or may not be written, limits of the process."""


class LazyGroup(click.Group):
    """A group that imports a sub-command only when it is called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{attribute} is not a click command")
        return command


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from asyncfabric_services.version import version_lines

        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print it.")
def asyncfabric() -> None:
    """Awaitable one-sided transfers between processes: measure them, show them."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its status."""
    ending: list[int] = []
    atexit.register(_end, ending)  # first in, so it runs after all that others registered
    ending.append(_status(arguments))
    sys.exit(ending[0])


def _end(ending: Sequence[int]) -> None:
    """End a process that loaded torch before Python takes itself apart.

    A worker thread that still holds a tensor would ask for the GIL from C++ that may not be unwound, and abort the
    process (SIGABRT). Where the command raised, Python reports that and ends as it always does.
    """
    if ending and "torch" in sys.modules:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
                stream.flush()
        os._exit(ending[0])


def _status(arguments: Sequence[str] | None) -> int:
    try:
        status: object = asyncfabric.main(args=arguments, prog_name="asyncfabric", standalone_mode=False)
        return status if isinstance(status, int) else FINE
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "asyncfabric").startswith("asyncfabric"):
            raise
        click.echo(f"{error}; install it with: pip install 'asyncfabric[demo,bench]', or {error.name} alone", err=True)
        return UNFIT
    except TimeoutError as error:
        click.echo(f"deadline passed: {error}", err=True)
        return DEADLINE
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        click.echo(
            f"this machine refuses it: {error.strerror}{f': {error.filename}' if error.filename else ''}", err=True
        )
        return UNFIT
    except Exception as error:
        # DeviceError is named by a string, so that commands that need no fabric start without importing it.
        if type(error).__name__ == "DeviceError":
            click.echo(f"this machine cannot do it: {error}", err=True)
            return UNFIT
        raise

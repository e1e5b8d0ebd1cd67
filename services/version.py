"""`asyncfabric version`: what is installed and what was compiled in."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import click


def installed_version() -> str:
    """Return the version of the installed distribution, or of the checkout it runs from."""
    try:
        return importlib.metadata.version("asyncfabric")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def version_line() -> str:
    """Return one line for people."""
    return f"asyncfabric {installed_version()} (Python {platform.python_version()}, {platform.machine()})"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        facts = {
            "version": installed_version(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "system": platform.system(),
        }
        click.echo(json.dumps(facts))
    else:
        click.echo(version_line())

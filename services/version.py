"""`asyncfabric version`, and `--version`: what is installed, and what its build contains.

Works without a compiled engine, and then reports that none is there.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict

import click


def installed_version() -> str:
    """Return the version of the installed distribution, or of the checkout it runs from."""
    try:
        return importlib.metadata.version("asyncfabric")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def wheel_tags() -> list[str]:
    """Return the tags of the wheel that was installed; an editable installation has one too, that of its build."""
    try:
        text = importlib.metadata.distribution("asyncfabric").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        text = ""
    return re.findall(r"^Tag: (\S+)", text, re.MULTILINE)


def build_facts() -> dict[str, object]:
    """Return what was compiled, by what, from what; `engine` states the error where nothing was."""
    from asyncfabric.errors import DeviceError
    from asyncfabric.observe import read_build

    try:
        facts = asdict(read_build())
    except DeviceError as error:
        return {"engine": str(error)}
    return facts | {"providers": sorted(facts["providers"])}


def facts() -> dict[str, object]:
    """Return everything that `--json` prints."""
    return {
        "version": installed_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "wheel": wheel_tags(),
        "build": build_facts(),
    }


def version_lines() -> Iterator[str]:
    """Yield lines for people."""
    yield f"asyncfabric {installed_version()} (Python {platform.python_version()}, {platform.machine()})"
    build = build_facts()
    if "engine" in build:
        yield f"  engine      none: {build['engine']}"
        return
    if build["version"] != installed_version():
        yield f"  engine      of version {build['version']}: build it anew"
    yield f"  providers   {', '.join(build['providers'])}"  # type: ignore[arg-type]
    yield f"  compiler    {build['compiler']}, for glibc {build['glibc']} and newer{', debug' * bool(build['debug'])}"
    yield f"  sanitizers  {build['sanitize'] or 'none'}"
    yield f"  commit      {build['commit'] or 'not recorded'}"
    yield f"  wheel       {', '.join(wheel_tags()) or 'none'}"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the version, and what the build contains."""
    for line in [json.dumps(facts())] if as_json else version_lines():
        click.echo(line)

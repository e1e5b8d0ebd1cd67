"""`asyncfabric keys new|show|trust`: options in, key files and public keys out. Secret keys are never printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from asyncfabric_services.exits import FINE


def default_file() -> Path:
    """Return the key file of this user."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(config) if config else Path.home() / ".config") / "asyncfabric" / "link.key"
    except RuntimeError:  # a container's user may have neither a name nor HOME
        raise click.UsageError("this user has no home: name the file, or set HOME or XDG_CONFIG_HOME") from None


_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Make and show the keys of nodes that talk over TCP, and say whom they trust."""


@keys.command()
@_file
@_json
def new(file: Path | None, as_json: bool) -> int:
    """Make a key pair in FILE (mode 0600) and its public half in FILE.pub."""
    from asyncfabric._control.keys import public_file, write_keys
    from asyncfabric._control.zmq_wire import make_keys

    path = file or default_file()
    public, secret = make_keys()
    try:
        write_keys(path, public, secret)
    except FileExistsError:
        raise click.UsageError(
            f"{path} is there already and is never overwritten: nodes trust its key; name another file, or move it"
        ) from None
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps({"file": str(path), "public": public}))
    else:
        click.echo(public)
        click.echo(f"secret key in {path}, public key in {public_file(path)}; on each peer:", err=True)
        click.echo(f"  asyncfabric keys trust {public}", err=True)
    return FINE


@keys.command()
@_file
@_json
def show(file: Path | None, as_json: bool) -> int:
    """Show our public key and the keys that we trust."""
    from asyncfabric._control.keys import read_keys

    path = file or default_file()
    found = read_keys(path)
    trusted = sorted(found.trusted - {found.public})
    if as_json:
        click.echo(json.dumps({"file": str(path), "public": found.public, "trusted": trusted}))
        return FINE
    click.echo(found.public)
    for key in trusted:
        click.echo(f"trusts {key}")
    if not trusted:
        click.echo("trusts nobody but nodes with this very key; add some: asyncfabric keys trust KEY", err=True)
    return FINE


@keys.command()
@click.argument("key")
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help="Key file whose trust list gets the key.")
@click.option("--note", default="", help="Whose key it is.")
def trust(key: str, file: Path | None, note: str) -> int:
    """Trust the owner of KEY: a public key, or a file that holds one (.pub)."""
    from asyncfabric._control.keys import add_trusted, parse_public, read_keys, trust_file

    path = file or default_file()
    read_keys(path)  # a trust list without a key would trust in vain
    given = Path(key)
    if given.suffix == ".pub" and not given.is_file():
        raise click.UsageError(f"there is no file {given}; name the .pub file of the other node, or its 64 hex digits")
    try:
        public = parse_public(given.read_text(encoding="utf-8") if given.is_file() else key)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    is_new = add_trusted(trust_file(path), public, note)
    click.echo(f"{public} {'is trusted now' if is_new else 'was trusted already'} ({trust_file(path)})")
    return FINE

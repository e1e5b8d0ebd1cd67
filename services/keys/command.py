"""`asyncfabric keys new|show|trust`: options in, key files and public keys out. Secret keys are never printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from asyncfabric_services.exits import FINE
from asyncfabric_services.settings.readers import READERS

ROLES = ("operator", *(role for role in READERS if role != "local"))


def default_file() -> Path:
    """Return the key file of this user."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(config) if config else Path.home() / ".config") / "asyncfabric" / "link.key"
    except RuntimeError:  # a container's user may have neither a name nor HOME
        raise click.UsageError("this user has no home: name the file, or set HOME or XDG_CONFIG_HOME") from None


_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
_role = click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    help="Bind the key to this role: its nodes register as nothing else. Repeat it for several; without, as any.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Make and show the keys of nodes that talk over TCP, and state whom they trust."""


@keys.command()
@_file
@_role
@_json
def new(file: Path | None, roles: tuple[str, ...], as_json: bool) -> int:
    """Make a key pair in FILE (mode 0600) and its public half in FILE.pub, both with the roles of the key."""
    from asyncfabric.control.keys import public_file, write_keys
    from asyncfabric.control.zmq_wire import make_keys

    path = file or default_file()
    public, secret = make_keys()
    try:
        write_keys(path, public, secret, frozenset(roles))
    except FileExistsError:
        raise click.UsageError(
            f"{path} is there already and is never overwritten: nodes trust its key; name another file, or move it"
        ) from None
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps({"file": str(path), "public": public, "roles": sorted(roles)}))
    else:
        click.echo(public)
        click.echo(f"secret key in {path}, public key in {public_file(path)}; on each peer:", err=True)
        click.echo(f"  asyncfabric keys trust {' '.join([public, *(f'--role {role}' for role in roles)])}", err=True)
    return FINE


@keys.command()
@_file
@_json
def show(file: Path | None, as_json: bool) -> int:
    """Show our public key and the keys that we trust, each with the roles that it is bound to."""
    from asyncfabric.control.keys import read_keys, spoken_roles

    path = file or default_file()
    found = read_keys(path)
    trusted = {key: sorted(roles) for key, roles in sorted(found.trusted.items()) if key != found.public}
    if as_json:
        roles = sorted(found.roles)
        click.echo(json.dumps({"file": str(path), "public": found.public, "roles": roles, "trusted": trusted}))
        return FINE
    click.echo(f"{found.public} as {spoken_roles(found.roles)}")
    for key in trusted:
        click.echo(f"trusts {key} as {spoken_roles(found.trusted[key])}")
    if not trusted:
        click.echo("trusts nobody but nodes with this very key; add some: asyncfabric keys trust KEY", err=True)
    return FINE


@keys.command()
@click.argument("key")
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help="Key file whose trust list gets the key.")
@_role
@click.option("--note", default="", help="Whose key it is.")
def trust(key: str, file: Path | None, roles: tuple[str, ...], note: str) -> int:
    """Trust the owner of KEY: a public key, or a file that holds one (.pub), with its roles unless others are given."""
    from asyncfabric.control.keys import add_trusted, parse_trusted, read_keys, read_trusted, spoken_roles, trust_file

    path = file or default_file()
    read_keys(path)  # a trust list without a key would trust in vain
    given = Path(key)
    if given.suffix == ".pub" and not given.is_file():
        raise click.UsageError(f"there is no file {given}; name the .pub file of the other node, or its 64 hex digits")
    try:
        found = parse_trusted(given.read_text(encoding="utf-8") if given.is_file() else key)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    if found is None:
        raise click.UsageError(f"{key!r} holds no public key; `asyncfabric keys show` prints one")
    public, stated = found
    is_new = add_trusted(trust_file(path), public, note, frozenset(roles) or stated)
    bound = spoken_roles(read_trusted(trust_file(path))[public])
    click.echo(f"{public} {'is trusted now' if is_new else 'was trusted already'} as {bound} ({trust_file(path)})")
    return FINE

"""The file of a running cluster, from which `status`, `scale`, `drain` and `down` find it in another shell. Blocking.

One folder for each cluster, of this user alone (0700): the record, the key file, logs. It is in the state folder of the
user (XDG_STATE_HOME, or ~/.local/state), or wherever `--folder` names one, such as on storage that hosts share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec

from asyncfabric.control import make_keys
from asyncfabric.control.ipc_folder import make_private
from asyncfabric.control.keys import write_keys
from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.spec import ROLES, ClusterSpec

FILE = "cluster.json"
KEYS = "link.key"


class ClusterRecord(msgspec.Struct, frozen=True):
    """A cluster that runs.

    Attributes:
        launcher: its name.
        spec: as it is now: `scale` and `drain` change counts.
        directories: the nodes of role directory, with their addresses.
        facts: what the launcher needs to find it; see Launcher.facts.
    """

    launcher: str
    spec: ClusterSpec
    directories: list[LaunchedNode]
    facts: dict[str, str] = {}

    @property
    def links(self) -> str:
        """The link addresses of the directories, as nodes read them."""
        return links_of(self.directories)


def links_of(directories: Iterable[LaunchedNode]) -> str:
    """Return the link addresses of directories as nodes read them: joined by commas."""
    return ",".join(node.link for node in directories)


def clusters_folder() -> Path:
    """Return the folder that holds those of the clusters of this user."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "asyncfabric"


def make_folder(folder: Path) -> Path:
    """Make the folder of a cluster, with a key file that its nodes share; return that file.

    Raises DeviceError when the folder cannot be made, or others may enter it.
    """
    make_private(folder)
    keys = folder / KEYS
    if not keys.exists():
        write_keys(keys, *make_keys(), frozenset(ROLES))
    return keys


def save_record(folder: Path, record: ClusterRecord) -> None:
    """Write the record in one step."""
    write_whole(folder / FILE, msgspec.json.format(msgspec.json.encode(record)))


def write_whole(file: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old content or the new one."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(file)


def remove_record(folder: Path) -> None:
    """Remove the record of a cluster that ended; its logs stay."""
    (folder / FILE).unlink(missing_ok=True)


def load_record(folder: Path) -> ClusterRecord:
    """Return the record in a folder; raises EnvironmentUnfit when there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=ClusterRecord)
    except FileNotFoundError:
        raise EnvironmentUnfit(f"no cluster runs from {folder}: see `asyncfabric status`") from None
    except (OSError, *UNREADABLE, msgspec.MsgspecError) as error:
        raise EnvironmentUnfit(f"{folder / FILE} cannot be read: {error}") from None


def running_folders() -> Iterator[Path]:
    """Yield the folders of the clusters of this user that have a record."""
    yield from (path.parent for path in sorted(clusters_folder().glob(f"*/{FILE}")))


def folder_of(name: str, folder: Path | None) -> Path:
    """Return the folder of a cluster: the one given, that of its name, or without either that of the only cluster."""
    if folder is not None:
        return folder
    if name:
        return clusters_folder() / name
    running = list(running_folders())
    if len(running) != 1:
        names = ", ".join(one.name for one in running) or "none runs"
        raise click.UsageError(f"name the cluster: {names}")
    return running[0]

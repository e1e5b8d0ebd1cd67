"""The folder where ipc sockets live: ours alone (0700), swept of the sockets of killed processes.

Blocking but short file calls, on the event loop's thread while a link opens. The folder is what protects ipc: whoever
may enter it may connect.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Final

from asyncfabric.errors import DeviceError

LONGEST_PATH: Final = 107  # sun_path of Linux, less the ending zero
_OURS = re.compile(r".+-(?P<pid>\d+)-[0-9a-f]+\.sock")


def default_folder() -> Path:
    """Return the folder of this user: in XDG_RUNTIME_DIR where there is one, else below /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.getuid():  # sudo -E leaves another's
        return Path(runtime) / "asyncfabric"
    return Path("/tmp") / f"asyncfabric-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Make the folder, or check that the one which is there is ours alone.

    Raises:
        DeviceError: it belongs to somebody else, or others may enter it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DeviceError(f"cannot make {folder} for ipc sockets: {error.strerror}", raw=error.errno or 0) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DeviceError(
            f"{folder} is no folder of this user",
            remedy="name another one: LinkConfig.ipc_folder, or of a node cluster.bind = ipc:///folder/",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise DeviceError(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}: others could connect to the sockets in it",
            remedy=f"chmod 700 {folder}",
        )


def socket_path(folder: Path, name: str, incarnation: int) -> Path:
    """Return a path for a socket of this process.

    Raises:
        ValueError: the path would be longer than the kernel takes.
    """
    readable = re.sub(r"[^A-Za-z0-9_.]", "_", name)[:24]
    path = folder / f"{readable}-{os.getpid()}-{incarnation:x}.sock"
    check_length(path)
    return path


def check_length(path: Path) -> None:
    """Check that the kernel takes a path of this length for a socket; ValueError when not."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ValueError(f"{path} has {len(os.fsencode(path))} bytes, a socket's path may have {LONGEST_PATH}")


def sweep(folder: Path) -> list[Path]:
    """Remove sockets that nobody listens on and whose process is gone; return them.

    Both are asked, since either alone can be wrong: a process may be between bind and listen, and a process of another
    container has a number that means nothing here.
    """
    swept = []
    for path in folder.glob("*.sock"):
        found = _OURS.fullmatch(path.name)
        if found is None or _is_alive(int(found["pid"])) or is_listened_on(path):
            continue
        path.unlink(missing_ok=True)
        swept.append(path)
    return swept


def is_listened_on(path: Path) -> bool:
    """Return whether somebody listens on a socket file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as trial:
        try:
            trial.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True

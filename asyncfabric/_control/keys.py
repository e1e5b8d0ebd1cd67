"""Keys of links: values, key files and trust lists. Raw Curve25519 keys of 32 bytes, written as 64 hex digits.

Blocking file calls: for programs that start, not for tasks. Making a key pair needs libsodium's arithmetic, so it is in
`zmq_wire`, the only importer of zmq. Secret files have mode 0600; others are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncfabric.errors import DeviceError

SECRET_MODE: Final = 0o600
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The keys of one link.

    Attributes:
        public: our public key, 64 hex digits.
        secret: our secret key; never printed.
        trusted: public keys of the peers that may connect and be connected to. Our own is always among them, so nodes
            that share one key file trust each other.
    """

    public: str
    secret: str = field(repr=False)
    trusted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the form of each key."""
        for name, value in (("public", self.public), ("secret", self.secret)):
            if not _HEX.fullmatch(value):
                raise ValueError(f"{name} must be 64 hex digits, got {len(value)} characters")
        object.__setattr__(self, "trusted", frozenset(map(parse_public, self.trusted)) | {self.public})


def parse_public(text: str) -> str:
    """Return a public key in its one form; raises ValueError naming the text."""
    key = text.strip().lower()
    if not _HEX.fullmatch(key):
        raise ValueError(f"{text.strip()[:80]!r} is no public key: expected 64 hex digits, as `keys show` prints them")
    return key


def write_keys(path: Path, public: str, secret: str) -> None:
    """Write a new key file (mode 0600) and its public half beside it (`.pub`).

    Raises:
        FileExistsError: there is a key file already; it is never overwritten.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SECRET_MODE)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"# secret key of an asyncfabric node: keep it to yourself\npublic {public}\nsecret {secret}\n")
    public_file(path).write_text(f"{public}\n", encoding="ascii")


def public_file(path: Path) -> Path:
    """Return the file of the public half."""
    return path.with_name(f"{path.name}.pub")


def trust_file(path: Path) -> Path:
    """Return the trust list that belongs to a key file."""
    return path.with_name(f"{path.name}.trusted")


def read_keys(path: Path, trust: Path | None = None) -> LinkKeys:
    """Read a key file and its trust list.

    Raises:
        DeviceError: the file is missing, is readable by others, or is no key file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    except FileNotFoundError:
        raise DeviceError(f"no key file {path}", remedy=f"make one: asyncfabric keys new {path}") from None
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}", raw=error.errno or 0) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DeviceError(f"{path} is no file", remedy="name the key file itself")
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise DeviceError(
                f"{path} holds a secret key and has mode {mode:04o}: others on this machine can read it",
                remedy=f"chmod 600 {path}; if others may have read it, make a new key",
            )
        words = dict(line.split(maxsplit=1) for line in file if line[:1] != "#" and len(line.split()) == 2)
    try:
        public, secret = words["public"].strip(), words["secret"].strip()
        return LinkKeys(public, secret, read_trusted(trust or trust_file(path)))
    except KeyError as missing:
        raise DeviceError(
            f"{path} is no key file: it has no line {missing.args[0]!r}",
            remedy=f"make one: asyncfabric keys new {path}",
        ) from None
    except ValueError as error:
        raise DeviceError(f"{path}: {error}", remedy="make a new one: asyncfabric keys new") from None


def read_trusted(path: Path) -> frozenset[str]:
    """Read a trust list: one public key in each line, then anything; a missing file trusts nobody.

    Raises:
        DeviceError: it cannot be read, others may write it, or a line is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}", raw=error.errno or 0) from None
    if mode & 0o022:
        raise DeviceError(
            f"{path} says who may join and has mode {mode:04o}: others on this machine can add themselves",
            remedy=f"look through it, then chmod 600 {path}",
        )
    return frozenset(_parse_lines(path, lines))


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterable[str]:
    for number, line in enumerate(lines, 1):
        key = line.partition("#")[0].split(maxsplit=1)
        if key:
            try:
                yield parse_public(key[0])
            except ValueError as error:
                raise DeviceError(f"{path}, line {number}: {error}", remedy="correct or remove the line") from None


def add_trusted(path: Path, key: str, note: str = "") -> bool:
    """Add a public key to a trust list; return whether it was new."""
    key = parse_public(key)
    if key in read_trusted(path):
        return False
    remark = f" # {' '.join(note.split())}" if note.strip() else ""
    with path.open("ab+") as file:
        os.fchmod(file.fileno(), SECRET_MODE)  # who may add a line here may join the cluster
        if file.tell():
            file.seek(-1, os.SEEK_END)
        begun = file.read(1) not in (b"", b"\n")  # a line without its end: the key would become part of its remark
        file.write((b"\n" if begun else b"") + f"{key}{remark}\n".encode())
    return True

"""Keys of links: values, key files and trust lists. Raw Curve25519 keys of 32 bytes, written as 64 hex digits.

A key may be bound to roles: then a link that has it states one of them, or is refused (`names`). A key that is bound
to none may state any role, and `unbound` names it.
Blocking file calls: for programs that start, not for tasks. Making a key pair needs libsodium's arithmetic, so it is in
`zmq_wire`, the only importer of zmq. Secret files have mode 0600; others are refused.
The secret of a cluster's fabrics follows from the key of its directory, which gives it to the nodes over their links.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from asyncfabric.control.messages import checked_name
from asyncfabric.errors import DeviceError

SECRET_MODE: Final = 0o600
_FABRIC_SECRET: Final = b"asyncfabric fabric secret 1"
Roles = frozenset[str]
"""Roles that a key is bound to; empty for a key that may state any."""
ANY_ROLE: Final[Roles] = frozenset()
NOBODY: Final[Mapping[str, Roles]] = MappingProxyType({})
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The keys of one link.

    Attributes:
        public: our public key, 64 hex digits.
        secret: our secret key; never printed.
        trusted: public keys of the peers that may connect and be connected to, each with the roles that it is bound
            to. Our own is always among them, so nodes that share one key file trust each other.
    """

    public: str
    secret: str = field(repr=False)
    trusted: Mapping[str, Roles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the form of each key."""
        for name, value in (("public", self.public), ("secret", self.secret)):
            if not _HEX.fullmatch(value):
                raise ValueError(f"{name} must be 64 hex digits, got {len(value)} characters")
        trusted = {self.public: ANY_ROLE} | {parse_public(key): roles for key, roles in self.trusted.items()}
        object.__setattr__(self, "trusted", MappingProxyType(trusted))

    @property
    def roles(self) -> Roles:
        """The roles that our own key is bound to."""
        return self.trusted[self.public]

    @property
    def fabric_secret(self) -> bytes:
        """The secret that the fabrics of a cluster prove to each other, where this is the key of its directory.

        32 bytes, HMAC-SHA256 of a fixed text under the secret key: the same after each restart of the directory, and
        of no use to find the key (RFC 5869 derives keys in this way).
        """
        return hmac.digest(bytes.fromhex(self.secret), _FABRIC_SECRET, "sha256")

    @property
    def unbound(self) -> list[str]:
        """The trusted keys that are bound to no role, in order: a node that has one may register as anything."""
        return sorted(key for key, roles in self.trusted.items() if not roles)


def parse_public(text: str) -> str:
    """Return a public key in its one form; raises ValueError naming the text."""
    key = text.strip().lower()
    if not _HEX.fullmatch(key):
        raise ValueError(f"{text.strip()[:80]!r} is no public key: expected 64 hex digits, as `keys show` prints them")
    return key


def parse_trusted(text: str) -> tuple[str, Roles] | None:
    """Return the key of one line of a trust list and the roles that it is bound to, None for an empty line.

    A line is `KEY`, `KEY role=decode` or `KEY role=prefill,decode`; after `#`, and in parts without `=`, it may remark
    anything.

    Raises:
        ValueError: the key, or what it is bound to, has another form; the text names it.
    """
    parts = text.partition("#")[0].split()
    if not parts:
        return None
    bound = ANY_ROLE
    for part in parts[1:]:
        name, equals, value = part.partition("=")
        if equals and name != "role":
            raise ValueError(f"{part[:80]!a} binds a key to nothing known: expected role=ROLE, or # before a remark")
        if equals:
            bound |= parse_roles(value)
    return parse_public(parts[0]), bound


def parse_roles(text: str) -> Roles:
    """Return roles that are joined by commas; raises ValueError where one is none, or there is none at all."""
    return frozenset(checked_name("role", part.strip()) for part in text.split(","))


def spoken_roles(roles: Roles) -> str:
    """Return roles for people."""
    return " or ".join(sorted(roles)) or "any role"


def write_keys(path: Path, public: str, secret: str, roles: Roles = ANY_ROLE) -> None:
    """Write a new key file (mode 0600) and its public half beside it (`.pub`), both with the roles it is bound to.

    Raises:
        FileExistsError: there is a key file already; it is never overwritten.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SECRET_MODE)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"# secret key of an asyncfabric node: keep it to yourself\npublic {public}\nsecret {secret}\n")
        file.write(f"role {','.join(sorted(roles))}\n" if roles else "")
    public_file(path).write_text(f"{_line(public, roles)}\n", encoding="ascii")


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
        fields = dict(line.split(maxsplit=1) for line in file if line[:1] != "#" and len(line.split()) == 2)
    try:
        public, secret = fields["public"].strip(), fields["secret"].strip()
        own = {public: parse_roles(fields["role"])} if "role" in fields else {}
        return LinkKeys(public, secret, own | read_trusted(trust or trust_file(path)))
    except KeyError as missing:
        raise DeviceError(
            f"{path} is no key file: it has no line {missing.args[0]!r}",
            remedy=f"make one: asyncfabric keys new {path}",
        ) from None
    except ValueError as error:
        raise DeviceError(f"{path}: {error}", remedy="make a new one: asyncfabric keys new") from None


def read_trusted(path: Path) -> dict[str, Roles]:
    """Read a trust list: a key and its roles in each line, see `parse_trusted`; a missing file trusts nobody.

    Of two lines for one key the later one holds.

    Raises:
        DeviceError: it cannot be read, others may write it, or a line is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}", raw=error.errno or 0) from None
    if mode & 0o022:
        raise DeviceError(
            f"{path} states who may join and has mode {mode:04o}: others on this machine can add themselves",
            remedy=f"look through it, then chmod 600 {path}",
        )
    return dict(_parse_lines(path, lines))


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterable[tuple[str, Roles]]:
    for number, line in enumerate(lines, 1):
        try:
            found = parse_trusted(line)
        except ValueError as error:
            raise DeviceError(f"{path}, line {number}: {error}", remedy="correct or remove the line") from None
        if found is not None:
            yield found


def _line(key: str, roles: Roles) -> str:
    return f"{key} role={','.join(sorted(roles))}" if roles else key


def add_trusted(path: Path, key: str, note: str = "", roles: Roles = ANY_ROLE) -> bool:
    """Add a public key to a trust list, or bind one that is in to other roles; return whether the list changed.

    A key that is in and is given without roles keeps those that it has.
    """
    key = parse_public(key)
    known = read_trusted(path).get(key)
    if known is not None and roles in (ANY_ROLE, known):
        return False
    remark = f" # {' '.join(note.split())}" if note.strip() else ""
    with path.open("ab+") as file:
        os.fchmod(file.fileno(), SECRET_MODE)  # who may add a line here may join the cluster
        if file.tell():
            file.seek(-1, os.SEEK_END)
        begun = file.read(1) not in (b"", b"\n")  # a line without its end: the key would become part of its remark
        file.write((b"\n" if begun else b"") + f"{_line(key, roles)}{remark}\n".encode())
    return True

"""Configuration of one fabric: one typed, frozen dataclass; bad values raise when it is made.

Common: imported by every layer, imports none. Reading files and the environment is not done here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal
from urllib.parse import parse_qsl

Polling = Literal["adaptive", "busy", "manual"]
POLLING_NUMBERS = {"adaptive": 0, "busy": 1, "manual": 2}
LEAST_SECRET_BYTES = 16
MOST_SECRET_BYTES = 4096
AUTO: Literal["auto"] = "auto"
"""In place of rails, or one of them: those that this process can use."""


@dataclass(frozen=True, slots=True)
class RailSpec:
    """One rail to open, parsed from `provider[:device][?key=value&...]`.

    Providers: `local`, `cuda`, `tcp` and `efa` (profiles of libfabric), `verbs` (RoCE and
    InfiniBand devices), and `fault+<provider>`. Examples: `"local"`, `"tcp:lo"`, `"verbs:mlx5_0?gid=3"`.
    """

    provider: str
    device: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Refuse the shared-memory provider of libfabric by name."""
        if self.provider.rpartition("+")[2] == "shm":
            raise ValueError(
                f"rail {self.provider!r}: libfabric's shared memory is not a rail; "
                "name 'local', which connects the processes of one host"
            )

    @classmethod
    def parse(cls, text: str) -> RailSpec:
        """Parse the text form; raises ValueError naming the text."""
        if not isinstance(text, str):
            raise TypeError(f"a rail is a text or a RailSpec, got {type(text).__name__} {text!r}")
        head, _, query = text.partition("?")
        provider, _, device = head.partition(":")
        if not provider or any(ch.isspace() for ch in text):
            raise ValueError(f"rail {text!r}: expected provider[:device][?key=value&...]")
        try:
            options = tuple(parse_qsl(query, strict_parsing=True)) if query else ()
        except ValueError:
            raise ValueError(f"rail {text!r}: options must be key=value pairs joined by '&'") from None
        return cls(provider, device, options)


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """How a fabric is opened. Times are seconds, sizes are bytes.

    Attributes:
        rails: "auto", the rails that this process can use, see the guide; or rails to open, as text (see RailSpec) or
            RailSpec: two of one provider give two rails. `("auto", "tcp:eth0")` names one beside those that are chosen.
        polling: adaptive (spin for `spin_us`, then sleep), busy (never sleeps), manual (tests call step()).
        spin_us: how long the adaptive worker spins before it sleeps.
        drain_deadline: how long a cancelled or closing transfer may drain before its peer is disconnected.
        connect_deadline: how long connection set-up is retried, and how long a peer that lives may take to show memory
            that is written to for the first time.
        peer_deadline_network: silence after which a peer of another host is lost; while this process did not run
            itself, nobody was silent.
        peer_deadline_host: silence after which a peer of this host is lost.
        stripe_bytes: a write is split over several rails only from this many bytes per rail on.
        inline_bytes: ops up to this size may be posted by the calling thread while the worker sleeps.
        max_ops: transfers in flight; one more raises BusyError.
        worker_cpu: core to pin the worker thread to, -1 for none; opening refuses a core that the process may not use.
        require: when not empty, providers that must carry every peer; anything else is an error.
        secret: what peers must prove that they have too: 16 to 4096 bytes, or the path of a file with so many, which is
            read as it is when the fabric is opened. None: whoever reaches a rail is a peer. It is never shown.
    """

    rails: Literal["auto"] | tuple[str | RailSpec, ...] = AUTO
    polling: Polling = "adaptive"
    spin_us: float = 20.0
    drain_deadline: float = 5.0
    connect_deadline: float = 5.0
    peer_deadline_network: float = 5.0
    peer_deadline_host: float = 1.0
    stripe_bytes: int = 64 * 1024
    inline_bytes: int = 16 * 1024
    max_ops: int = 16384
    worker_cpu: int = -1
    require: tuple[str, ...] = ()
    secret: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check every value and name the wrong one."""
        if isinstance(self.rails, str) and self.rails != AUTO:
            raise TypeError(f"rails must be {AUTO!r} or a tuple of texts, got the string {self.rails!r}")
        if isinstance(self.require, str):
            raise TypeError(f"require must be a tuple of texts, got the string {self.require!r}")
        for name in ("max_ops", "stripe_bytes", "inline_bytes", "worker_cpu"):
            _check_kind(name, getattr(self, name), Integral)
        for name in ("drain_deadline", "connect_deadline", "peer_deadline_network", "peer_deadline_host", "spin_us"):
            _check_kind(name, getattr(self, name), Real)
        if not isinstance(self.rails, (str, tuple, list)):
            raise TypeError(f"rails must be {AUTO!r} or a tuple of rail texts, got {type(self.rails).__name__}")
        if not isinstance(self.rails, str):
            if not 1 <= len(self.rails) <= 32:
                raise ValueError(f"rails must name 1..32 rails, got {len(self.rails)}")
            if self.rails.count(AUTO) > 1:
                raise ValueError(f"rails must name {AUTO!r} once, got {self.rails!r}")
        if self.polling not in POLLING_NUMBERS:
            raise ValueError(f"polling must be one of {sorted(POLLING_NUMBERS)}, got {self.polling!r}")
        for name in ("drain_deadline", "connect_deadline", "peer_deadline_network", "peer_deadline_host"):
            if not 0 < getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be in (0, 3600] seconds, got {getattr(self, name)!r}")
        if not 0 <= self.spin_us <= 1e6:
            raise ValueError(f"spin_us must be in 0..1e6, got {self.spin_us!r}")
        if not 1 <= self.max_ops <= 1 << 20:
            raise ValueError(f"max_ops must be in 1..1048576, got {self.max_ops!r}")
        for name in ("stripe_bytes", "inline_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        _check_secret(self.secret)
        if self.worker_cpu < -1:
            raise ValueError(f"worker_cpu must be >= -1, got {self.worker_cpu!r}")
        for name in self.require:
            RailSpec(name)  # refuses what is no provider
        providers = [rail.provider for rail in self.rail_specs()]
        if self.automatic or not self.require:
            return
        if not any(name.endswith(tuple(providers)) for name in self.require):  # fake+local is a local
            raise ValueError(
                f"require permits {sorted(self.require)}, but rails are of {providers}: none could be used"
            )

    @property
    def automatic(self) -> bool:
        """Whether rails are chosen when the fabric is opened, perhaps beside some that are named."""
        return self.rails == AUTO or AUTO in self.rails

    def rail_specs(self) -> tuple[RailSpec, ...]:
        """Return the rails that are named, as parsed specs; raises ValueError naming a malformed one."""
        named = () if isinstance(self.rails, str) else tuple(rail for rail in self.rails if rail != AUTO)
        return tuple(rail if isinstance(rail, RailSpec) else RailSpec.parse(rail) for rail in named)


def _check_secret(secret: object) -> None:
    # Its value is in no text: errors are logged.
    if isinstance(secret, bytes):
        if not LEAST_SECRET_BYTES <= len(secret) <= MOST_SECRET_BYTES:
            raise ValueError(
                f"secret must have {LEAST_SECRET_BYTES}..{MOST_SECRET_BYTES} bytes, got {len(secret)}: "
                "make one with os.urandom(32)"
            )
    elif isinstance(secret, str):
        if not secret:
            raise ValueError("secret must be bytes or the path of a file, got an empty path")
    elif secret is not None and not isinstance(secret, os.PathLike):
        raise TypeError(f"secret must be bytes or the path of a file, got {type(secret).__name__}")


def _check_kind(name: str, value: object, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "an integer" if kind is Integral else "a number"
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__} {value!r}")

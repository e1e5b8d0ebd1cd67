"""RegionRecord: what a fabric keeps of a registered region until it is released, also when nobody holds the Region.

Runs on the event loop's thread. The owner of the memory lives here (INV-2), so dropping a Region frees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from asyncfabric.types import AccessMode


@dataclass(slots=True, eq=False)
class RegionRecord:
    """One registered region.

    Attributes:
        id, length, device, access: as of the Region.
        of_caller: the memory is the caller's; otherwise pages of the engine, which live as long as views of them.
        keepalive: the owner of the memory.
        cost_s: what registering took.
        since: when that ended, by the monotonic clock.
    """

    id: int
    length: int
    device: str
    access: AccessMode
    of_caller: bool
    keepalive: object
    cost_s: float
    since: float = field(default_factory=monotonic)

    def let_go(self) -> None:
        """Give memory of the caller back: nothing can touch it any more, and it may be resized or freed."""
        if self.of_caller:
            self.keepalive = None

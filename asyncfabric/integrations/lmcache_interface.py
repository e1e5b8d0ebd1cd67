"""The classes of LMCache that the channel derives from and deals in, declared for type checkers as far as they go here.

LMCache is not installed where types are checked, and a base class of unknown type would hide that of every member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass, field

    @dataclass(frozen=True)
    class L1MemoryDesc:
        """The host memory of a server: first address, bytes, bytes of a page."""

        ptr: int
        size: int
        align_bytes: int

    @dataclass(frozen=True)
    class TransferChannelAddress:
        """An object in that memory."""

        offset: int
        size: int

    @dataclass
    class TransferChannelReadResult:
        """Whether a task has ended, and then which of its objects arrived."""

        finished: bool
        succeeded_mask: list[bool] = field(default_factory=list)

    class TransferChannelServer:
        """The interface of what peers meet."""

    class TransferChannelClient:
        """The interface of what reads from one peer."""

    class TransferChannelContext:
        """The interface of a channel."""

else:
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.transfer_channel.abstract import (
        TransferChannelClient,
        TransferChannelContext,
        TransferChannelServer,
    )
    from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress, TransferChannelReadResult

__all__ = [
    "L1MemoryDesc",
    "TransferChannelAddress",
    "TransferChannelClient",
    "TransferChannelContext",
    "TransferChannelReadResult",
    "TransferChannelServer",
]

"""The reasons for which frames and peers are not taken, and their counts. Logs the 1st, 2nd, 4th ... of a reason.

Pure but for the log; on the event loop's thread. What is done about a reason is decided by the session table.
"""

from __future__ import annotations

import logging
from typing import Final

from asyncfabric.errors import PeerError

log: logging.Logger = logging.getLogger("asyncfabric.control")

REASONS: Final = {
    "oversized": "the frame is larger than the limit",
    "parts": "the message has not exactly one frame",
    "magic": "the frame is none of asyncfabric",
    "version": "the schema version is unknown",
    "malformed": "the frame is no MessagePack envelope",
    "tag": "the kind of message is unknown",
    "types": "a field has the wrong type or is out of range",
    "unauthenticated": "the key is not trusted, or there is none",
    "sender": "the frame names another sender than its session",
    "own_name": "the peer has the name of this process",
    "name_taken": "a live peer of this name has another role or another key",
    "key_role": "the key is trusted in another role",
    "retired": "the sender is an earlier incarnation of its name",
    "unknown_session": "there is no such session, it may have been lost",
    "unexpected": "the kind of message does not belong into this state",
    "replayed": "the frame was received before",
    "gap": "frames before this one were lost",
    "overrun": "the peer sent more than it has credit for",
    "channels": "the peer opened too many channels",
    "credit": "the peer gave credit for what was never sent",
    "refused_by_peer": "the peer did not take a frame of ours",
}
"""Reason -> what it means; the keys of `LinkStatistics.protocol_errors`."""


REFUSALS: Final = frozenset(("unauthenticated", "own_name", "name_taken", "key_role", "retired"))
"""Reasons that lie in who the dialer is: dialing again helps only when the peer changes its mind."""

REMEDIES: Final = {
    "key_role": "start the process with a key of its role, or bind its key anew where it is refused: "
    "asyncfabric keys trust KEY --role ROLE, then start that node again",
}
"""What to do about a refusal, where the reason alone does not teach it."""


class RefusedError(PeerError):
    """The peer answered, and takes no session with us.

    Attributes:
        code: the reason, one of REFUSALS.
    """

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class ProtocolErrors:
    """Counts by reason."""

    def __init__(self, owner: str) -> None:
        self.counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._owner = owner

    def count(self, reason: str, detail: str) -> None:
        """Count one; the log gets the 1st, 2nd, 4th, 8th ... of a reason, so that a flood fills no disk."""
        count = self.counts[reason] = self.counts[reason] + 1
        if count & (count - 1) == 0:
            log.warning(
                "%s: protocol error %s (%d so far): %s: %s", self._owner, reason, count, REASONS[reason], detail
            )

"""Messages whose parts come in any order, put together; those of which parts are missing are bounded.

Pure. One thread at a time.
"""

from __future__ import annotations


class UnfinishedMessages:
    """Parts of messages that are not whole; of too many the oldest is dropped, since its sender may have died.

    Attributes:
        dropped: messages that were dropped.
    """

    def __init__(self, most_messages: int, most_bytes: int) -> None:
        self.dropped: int = 0
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._bytes = 0
        self._parts: dict[tuple[int, int, int], dict[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def join(self, peer: int, number: int, part: int, parts: int, payload: bytes) -> bytes | None:
        """Take a part of the sender's message `number`; return the message if it is whole now."""
        if parts == 1:
            return payload
        place = (peer, number, parts)
        have = self._parts.setdefault(place, {})
        if part not in have:
            have[part] = payload
            self._bytes += len(payload)
        if len(have) == parts:
            whole = b"".join(have[index] for index in range(parts))
            self._forget(place)
            return whole
        while len(self._parts) > self._most_messages or self._bytes > self._most_bytes:
            self._forget(next(iter(self._parts)))
            self.dropped += 1
        return None

    def _forget(self, place: tuple[int, int, int]) -> None:
        self._bytes -= sum(len(payload) for payload in self._parts.pop(place).values())

"""Holders of names: the newest living incarnation, in the role and under the key that it came with. Pure, bounded.

A key that the trust list binds to roles brings no session in another role, under whatever name.

Incarnations are wall-clock times of process starts. A higher one replaces a lower one at once. A lower one is refused
while the higher lives, and for good once it was replaced; a lower one that was never replaced is taken when nobody
else lives under the name, since a machine's clock may have gone back between two starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, TypeVar

from asyncfabric.control.keys import ANY_ROLE, NOBODY, Roles
from asyncfabric.control.messages import Identity
from asyncfabric.control.session import SessionPeer

REMEMBERED: Final = 4096
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class NameTable:
    """Living peers by identity and name, and what is remembered of the dead."""

    def __init__(self, me: Identity, trusted: Mapping[str, Roles] = NOBODY) -> None:
        self._me = me
        self._trusted = trusted
        self._retired: OrderedDict[Identity, None] = OrderedDict()
        self._opened: OrderedDict[tuple[Identity, int], None] = OrderedDict()
        self._by_name: dict[str, SessionPeer] = {}
        self.peers: dict[Identity, SessionPeer] = {}
        self.last_words: OrderedDict[Identity, str] = OrderedDict()

    def objection(self, sender: Identity, role: str, key: str) -> str:
        """Return the reason for which no session with this sender may begin, "" when there is none."""
        if sender.name == self._me.name:
            return "own_name"
        if role not in (self.bound(key) or (role,)):
            return "key_role"
        living = self._by_name.get(sender.name)
        if living is not None and (living.role, living.key) != (role, key):
            return "name_taken"
        return "retired" if self.is_retired(sender) else ""

    def bound(self, key: str) -> Roles:
        """Return the roles that the trust list binds a key to; empty for none, and where there are no keys."""
        return self._trusted.get(key, ANY_ROLE)

    def is_retired(self, identity: Identity) -> bool:
        """Return whether a later incarnation replaced this one."""
        living = self._by_name.get(identity.name)
        return identity in self._retired or (living is not None and identity.incarnation < living.identity.incarnation)

    def predecessor(self, sender: Identity) -> SessionPeer | None:
        """Return the living peer that this sender replaces, if there is one."""
        living = self._by_name.get(sender.name)
        return living if living is not None and living.identity != sender else None

    def retire(self, identity: Identity) -> None:
        """Never take this incarnation again."""
        _remember(self._retired, identity, None)

    def opens(self, sender: Identity, nonce: int) -> bool:
        """Note that a sender opens a session; False when it opened this very one before: the Hello was replayed."""
        if (sender, nonce) in self._opened:
            return False
        _remember(self._opened, (sender, nonce), None)
        return True

    def add(self, peer: SessionPeer) -> None:
        """Add a living peer."""
        self.peers[peer.identity] = self._by_name[peer.identity.name] = peer
        self.last_words.pop(peer.identity, None)

    def remove(self, peer: SessionPeer, reason: str) -> None:
        """Remove a peer that is lost, and remember why."""
        del self.peers[peer.identity]
        del self._by_name[peer.identity.name]
        _remember(self.last_words, peer.identity, reason)


def _remember(memory: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to a memory that forgets its oldest."""
    memory[key] = value
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)

"""How sessions begin: Hello from the dialer, Welcome from the other side, and whom they may not be with.

Pure; the half of `session_table` that knows names, incarnations and keys (the rules are in `names`). A Hello of the
incarnation that we have a session with means one of two things. It dialed that session: then it lost it, and so do
we, before the new one begins. We dialed it: then both dialed at once, and the new path joins the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncfabric.control.events import Action, Change, Dial, Dialed, Emit, Path, Received, SessionChange
from asyncfabric.control.keys import NOBODY, Roles, spoken_roles
from asyncfabric.control.messages import (
    ENVELOPE_BYTES,
    Envelope,
    Hello,
    Identity,
    Message,
    SessionRefusal,
    Welcome,
    encode,
)
from asyncfabric.control.name_table import NameTable
from asyncfabric.control.protocol_errors import REASONS, ProtocolErrors
from asyncfabric.control.session import Session, SessionConfig, SessionPeer
from asyncfabric.control.window import ReceiveWindow, SendWindow, largest_body

ANSWERS_PER_HEARTBEAT = 64  # more refusals than that would let a flood of garbage double itself


class Handshake:
    """The beginnings; `SessionTable` adds the rest."""

    def __init__(
        self,
        me: Identity,
        config: SessionConfig,
        address: str,
        capabilities: tuple[str, ...],
        nonce: Callable[[], int],
        role: str,
        trusted: Mapping[str, Roles] = NOBODY,
    ) -> None:
        self.me = me
        self.role = role
        self.config = config
        self.address = address
        self.capabilities = capabilities
        self.sessions: dict[Path, Session] = {}
        self.names: NameTable = NameTable(me, trusted)
        self.errors: ProtocolErrors = ProtocolErrors(str(me))
        self.now_ns = 0
        self.actions: list[Action] = []
        self._nonce = nonce
        self._answers = ANSWERS_PER_HEARTBEAT
        self._answers_until_ns = 0

    def _dial(self, event: Dial) -> None:
        session = self._new_session(event.path, self._nonce(), event.address, event.key, dialed=True)
        self.sessions[event.path] = session
        self._send_hello(session)

    def _new_session(self, path: Path, nonce: int, address: str, key: str, *, dialed: bool) -> Session:
        return Session(
            path=path,
            nonce=nonce,
            dialed=dialed,
            address=address,
            key=key,
            state="dialing",
            receives=ReceiveWindow(self.config.window_bytes),
            sends=SendWindow(0),
            received_ns=self.now_ns,
            sent_ns=self.now_ns,
            deadline_ns=self.now_ns + self.config.connect_deadline_ns,
        )

    def _send_hello(self, session: Session) -> None:
        config = self.config
        hello = Hello(self.address, self.capabilities, config.window_bytes, config.max_frame_bytes, self.role)
        self._emit(session.path, Envelope(self.me, session.nonce, 0, None, hello))
        session.sent_ns = self.now_ns
        session.unanswered += 1

    def _send_welcome(self, session: Session) -> None:
        config = self.config
        welcome = Welcome(self.address, self.capabilities, config.window_bytes, config.max_frame_bytes, self.role)
        self._emit(session.path, Envelope(self.me, session.nonce, 0, None, welcome))
        session.sent_ns = self.now_ns

    def _on_hello(self, event: Received, envelope: Envelope, hello: Hello) -> None:
        sender, nonce = envelope.sender, envelope.session
        here = self.sessions.get(event.path)
        if here is not None and (here.dialed or here.identity != sender):
            reason = "unexpected" if here.dialed else "sender"
            self._refuse(event.path, nonce, reason, f"Hello of {sender} on a path of {here.identity}")
            return
        if here is not None and here.nonce == nonce:
            if here.next_in == 1:
                self._send_welcome(here)  # ours was lost, or is on its way
            else:
                self.errors.count("replayed", f"Hello of {sender}")
            return
        if objection := self.names.objection(sender, hello.role, event.key):
            self._refuse(event.path, nonce, objection, f"Hello of {self._stated(sender, hello.role, event.key)}")
            return
        if not self.names.opens(sender, nonce):
            self._refuse(event.path, nonce, "replayed", f"Hello of {sender}")
            return
        self._replace(sender)
        known = self.names.peers.get(sender)
        if known is not None and any(not session.dialed for session in known.sessions):
            self._lose(known, "the peer connected anew")
        session = self._new_session(event.path, nonce, hello.address, event.key, dialed=False)
        self._ready(session, sender, hello)
        self._send_welcome(session)

    def _on_welcome(self, event: Received, session: Session, envelope: Envelope, welcome: Welcome) -> None:
        if session.identity is not None or not session.dialed:
            if session.identity == envelope.sender and session.unanswered > 0:
                session.unanswered -= 1  # our Hellos waited for a listener that started late, and each is answered
            else:
                self.errors.count("replayed", f"Welcome of {envelope.sender}")
            return
        session.unanswered -= 1
        if objection := self.names.objection(envelope.sender, welcome.role, session.key):
            stated = self._stated(envelope.sender, welcome.role, session.key)
            self.errors.count(objection, f"Welcome of {stated}")
            self._end(session, f"{stated} answered, but {REASONS[objection]}", code=objection)
            return
        self._replace(envelope.sender)
        known = self.names.peers.get(envelope.sender)
        if known is not None and any(other.dialed for other in known.sessions):
            self._lose(known, "connected anew")  # as the peer did at our Hello: what it had sent before is gone
        self._ready(session, envelope.sender, welcome)
        assert isinstance(session.path, int)
        self.actions.append(Dialed(session.path, envelope.sender))

    def _stated(self, sender: Identity, role: str, key: str) -> str:
        """Return who a peer claims to be, and what our trust list knows of its key."""
        bound = self.names.bound(key)
        known = f" under the key {key[:8]}..., which is trusted as {spoken_roles(bound)}" if bound else ""
        return f"{sender} as {role or 'no node'}{known}"

    def _replace(self, sender: Identity) -> None:
        """A new incarnation of a known name: the old one is lost, and never accepted again."""
        before = self.names.predecessor(sender)
        if before is not None:
            self.names.retire(before.identity)
            self._lose(before, f"replaced by {sender}")

    def _ready(self, session: Session, identity: Identity, facts: Hello | Welcome) -> None:
        session.state = "ready"
        session.identity = identity
        session.role = facts.role
        session.address = session.address or facts.address
        session.capabilities = facts.capabilities
        session.received_ns = self.now_ns
        session.sends = SendWindow(facts.window_bytes)
        session.largest_body = max(0, min(facts.max_frame_bytes - ENVELOPE_BYTES, largest_body(facts.window_bytes)))
        self.sessions[session.path] = session
        peer = self.names.peers.get(identity)
        if peer is not None:
            peer.sessions.append(session)
            return
        peer = SessionPeer(identity, session.role, session.key, [session])
        self.names.add(peer)
        self.actions.append(Change(SessionChange(identity, "ready", f"session {session.nonce:x}")))

    # ---- speaking

    def _send(self, session: Session, message: Message, trace: str | None = None) -> None:
        self._emit(session.path, Envelope(self.me, session.nonce, session.next_out, trace, message))
        session.next_out += 1
        session.sent_ns = self.now_ns

    def _refuse(self, path: Path, nonce: int, reason: str, detail: str) -> None:
        """Count a frame that is not taken, and answer it with a typed error, a bounded number of times."""
        self.errors.count(reason, detail)
        if self.now_ns >= self._answers_until_ns:
            self._answers_until_ns = self.now_ns + self.config.heartbeat_ns
            self._answers = ANSWERS_PER_HEARTBEAT
        if self._answers > 0:
            self._answers -= 1
            self._emit(
                path, Envelope(self.me, nonce, 0, None, SessionRefusal(reason, f"{REASONS[reason]}: {detail}"[:500]))
            )

    def _emit(self, path: Path, envelope: Envelope) -> None:
        self.actions.append(Emit(path, encode(envelope)))

    # ---- what the other half gives

    def _lose(self, peer: SessionPeer, reason: str, *, notify: bool = True) -> None:
        raise NotImplementedError

    def _end(self, session: Session, reason: str, *, code: str = "", notify: bool = True) -> None:
        raise NotImplementedError

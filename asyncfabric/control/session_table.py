"""All sessions of one process as a table without sockets or clock: events and the time in, actions out.

Pure, on the event loop's thread. A session goes connect -> ready -> draining -> lost. What is held:
CS-1 of each sender, listeners get a prefix of what it posted, in order, each parcel once, or the session is lost;
CS-2 a name belongs to one incarnation at a time, and a replaced one never speaks again;
CS-3 no bytes from outside raise: they are counted by reason, and answered where an answer is possible.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from asyncfabric.control.events import (
    Action,
    Arrival,
    Change,
    Close,
    Deliver,
    Dial,
    DialFailed,
    Event,
    Leave,
    ParcelTaken,
    PathLost,
    Received,
    Room,
    SendParcel,
    SessionChange,
    State,
    Tick,
)
from asyncfabric.control.handshake import Handshake
from asyncfabric.control.keys import NOBODY, Roles
from asyncfabric.control.messages import (
    Credit,
    Drain,
    Drained,
    Envelope,
    Goodbye,
    Heartbeat,
    Hello,
    Identity,
    Message,
    Parcel,
    SessionRefusal,
    Undecodable,
    Welcome,
    decode,
)
from asyncfabric.control.protocol_errors import REASONS
from asyncfabric.control.session import SECOND_NS, Session, SessionConfig, SessionPeer
from asyncfabric.control.window import cost_of

ENDS_SESSION = frozenset(("unknown_session", "retired"))


class SessionTable(Handshake):
    """The state table. `feed` is its only entry that changes anything."""

    def __init__(
        self,
        me: Identity,
        config: SessionConfig | None = None,
        *,
        address: str = "",
        capabilities: tuple[str, ...] = (),
        nonce: Callable[[], int] = lambda: secrets.randbits(63),
        role: str = "",
        trusted: Mapping[str, Roles] = NOBODY,
    ) -> None:
        super().__init__(me, config or SessionConfig(), address, capabilities, nonce, role, trusted)

    # ---- questions

    def admits(self, to: Identity, channel: str, body_bytes: int) -> bool:
        """Return whether a parcel may be posted now; raises KeyError when there is no ready session."""
        peer = self.names.peers[to]
        if peer.state != "ready":
            raise KeyError(to)
        return peer.way_out.sends.admits(channel, cost_of(body_bytes))

    def next_deadline_ns(self) -> int | None:
        """Return when the table wants a Tick at the latest."""
        config = self.config
        times = [peer.drain_deadline_ns for peer in self.names.peers.values() if peer.state == "draining"]
        for session in self.sessions.values():
            if self._is_draining(session):
                continue
            times.append(session.sent_ns + config.heartbeat_ns)
            dialing = session.state == "dialing"
            times.append(session.deadline_ns if dialing else session.received_ns + config.peer_deadline_ns)
        return min(times, default=None)

    # ---- the entry

    def feed(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event and return what to do, in order."""
        self.now_ns = now_ns
        self.actions: list[Action] = []
        match event:
            case Received():
                self._receive(event)
            case SendParcel():
                peer = self.names.peers[event.to]
                peer.way_out.sends.send(event.channel, cost_of(len(event.body)))
                self._send(peer.way_out, Parcel(event.channel, event.body), event.trace)
            case ParcelTaken():
                self._take(event)
            case Tick():
                self._excuse()
                self._tick()
            case Dial():
                self._dial(event)
            case Leave():
                self._leave(event.peer)
            case PathLost():
                session = self.sessions.get(event.path)
                if session is not None:
                    self._end(session, event.reason, code=event.code)
        return self.actions

    # ---- time

    def _excuse(self) -> None:
        """Take from everybody's silence what we overslept: who stood still cannot know who was silent."""
        late_ns = self.now_ns - (self.next_deadline_ns() or self.now_ns)
        if late_ns > self.config.peer_deadline_ns // 4:
            for session in self.sessions.values():
                session.received_ns = min(self.now_ns, session.received_ns + late_ns)

    def _tick(self) -> None:
        now, config = self.now_ns, self.config
        for peer in list(self.names.peers.values()):
            if peer.state == "draining" and now >= peer.drain_deadline_ns:
                self._lose(peer, f"did not drain within {config.drain_deadline_ns / SECOND_NS:g} s")
        for session in list(self.sessions.values()):
            if session.path not in self.sessions or self._is_draining(session):
                continue  # it was lost with the peer's other session; a drain has a deadline of its own
            if session.state == "dialing":
                if now >= session.deadline_ns:
                    self._end(session, f"no answer within {config.connect_deadline_ns / SECOND_NS:g} s")
                elif now >= session.sent_ns + config.heartbeat_ns:
                    self._send_hello(session)
            elif now >= session.received_ns + config.peer_deadline_ns:
                self._end(session, f"silent for {(now - session.received_ns) / SECOND_NS:.3g} s")
            elif now >= session.sent_ns + config.heartbeat_ns:
                self._send(session, Heartbeat())

    # ---- frames

    def _receive(self, event: Received) -> None:
        envelope = decode(event.frame, self.config.max_frame_bytes)
        if isinstance(envelope, Undecodable):
            self._refuse(event.path, 0, envelope.reason, envelope.detail)
            return
        match envelope.message:
            case Hello():
                self._on_hello(event, envelope, envelope.message)
            case SessionRefusal():
                self._on_refusal(event, envelope, envelope.message)
            case _:
                self._on_session_frame(event, envelope)

    def _on_session_frame(self, event: Received, envelope: Envelope) -> None:
        session = self.sessions.get(event.path)
        if session is None or session.nonce != envelope.session:
            # No answer to a last message: two processes that end at the same time would teach each other for nothing.
            if not isinstance(envelope.message, Goodbye | Drained):
                reason = "retired" if self.names.is_retired(envelope.sender) else "unknown_session"
                self._refuse(event.path, envelope.session, reason, f"from {envelope.sender}")
            return
        if isinstance(envelope.message, Welcome):
            self._on_welcome(event, session, envelope, envelope.message)
            return
        if session.identity is None:
            self._refuse(event.path, envelope.session, "unexpected", "before the session was ready")
            return
        if envelope.sender != session.identity:
            self._refuse(event.path, envelope.session, "sender", f"{envelope.sender} instead of {session.identity}")
            return
        if envelope.sequence < session.next_in:
            self.errors.count("replayed", f"frame {envelope.sequence} of {envelope.sender}")
            return
        peer = self.names.peers[session.identity]
        if envelope.sequence > session.next_in:
            self._fault(peer, session, "gap", f"frame {envelope.sequence} came, {session.next_in} was next")
            return
        session.next_in += 1
        session.received_ns = self.now_ns
        self._obey(peer, session, envelope.message, envelope.trace)

    def _obey(self, peer: SessionPeer, session: Session, message: Message, trace: str | None) -> None:
        match message:
            case Parcel():
                cost = cost_of(len(message.body))
                if reason := session.receives.arrive(message.channel, cost):
                    self._fault(peer, session, reason, f"channel {message.channel!r}")
                    return
                taken = ParcelTaken(session.path, session.nonce, message.channel, cost)
                arrival = Arrival(peer.identity, message.body, trace)
                self.actions.append(Deliver(message.channel, arrival, taken))
            case Credit():
                if session.sends.credit(message.channel, message.taken):
                    self.actions.append(Room(peer.identity))
                else:
                    self._fault(peer, session, "credit", f"{message.taken} for channel {message.channel!r}")
            case Drain():
                if peer.state == "ready":
                    self._drain(peer, "the peer leaves")
                self._send(peer.way_out, Drained())
            case Drained():
                if peer.leaving:
                    self._lose(peer, "left")
                else:
                    self._fault(peer, session, "unexpected", "Drained without Drain")
            case Goodbye():
                stated = message.reason
                self._lose(peer, stated if stated == "left" else f"the peer states: {stated}", notify=False)
            case _:
                pass  # a heartbeat was received, that is all

    def _on_refusal(self, event: Received, envelope: Envelope, refusal: SessionRefusal) -> None:
        code = refusal.code if refusal.code in REASONS else "unknown code"
        self.errors.count("refused_by_peer", f"{code}: {refusal.text}")
        session = self.sessions.get(event.path)
        if session is None or session.nonce != envelope.session:
            return
        if session.identity is None:
            text = f"refused by {envelope.sender}: {code}: {REASONS.get(code, '')}: {refusal.text}"
            self._end(session, text, code=code)
        elif envelope.sender == session.identity and code in ENDS_SESSION:
            self._end(session, f"the peer states: {REASONS[code]}", notify=False)

    # ---- orders from above

    def _take(self, event: ParcelTaken) -> None:
        session = self.sessions.get(event.path)
        if session is None or session.nonce != event.session:
            return  # lost meanwhile: nobody to give credit to
        if self._is_draining(session):
            return  # no more parcels come, and after our last frame the peer may be gone
        total = session.receives.take(event.channel, event.cost)
        if total is not None:
            self._send(session, Credit(event.channel, total))

    def _is_draining(self, session: Session) -> bool:
        return session.identity is not None and self.names.peers[session.identity].state == "draining"

    def _leave(self, identity: Identity) -> None:
        peer = self.names.peers.get(identity)
        if peer is None or peer.state == "draining":
            return  # gone, or on the way: when the peer leaves us, our part is sent
        peer.leaving = True
        self._drain(peer, "we leave")
        self._send(peer.way_out, Drain())

    def _drain(self, peer: SessionPeer, reason: str) -> None:
        peer.state = "draining"
        peer.drain_deadline_ns = self.now_ns + self.config.drain_deadline_ns
        self._change(peer.identity, "draining", reason)

    # ---- ends

    def _fault(self, peer: SessionPeer, session: Session, reason: str, detail: str) -> None:
        """The peer broke the session's protocol: count it, notify it, lose it."""
        self._refuse(session.path, session.nonce, reason, f"{detail}, from {peer.identity}")
        self._lose(peer, f"{REASONS[reason]} ({detail})")

    def _end(self, session: Session, reason: str, *, code: str = "", notify: bool = True) -> None:
        """End a session: its peer is lost, or its dial has failed."""
        if session.identity is not None:
            self._lose(self.names.peers[session.identity], reason, notify=notify)
            return
        del self.sessions[session.path]
        self.actions += [Close(session.path), DialFailed(_number(session), reason, code)]

    def _lose(self, peer: SessionPeer, reason: str, *, notify: bool = True) -> None:
        """All sessions with a peer are over; the last message has the reason."""
        for session in peer.sessions:
            if notify:
                self._send(session, Goodbye(reason[:200]))
            del self.sessions[session.path]
            self.actions.append(Close(session.path))
        self.names.remove(peer, reason)
        self._change(peer.identity, "lost", reason)

    def _change(self, identity: Identity, state: State, reason: str) -> None:
        self.actions += [Change(SessionChange(identity, state, reason)), Room(identity)]


def _number(session: Session) -> int:
    """Return the path of a dialed session, which is a number."""
    assert isinstance(session.path, int)
    return session.path

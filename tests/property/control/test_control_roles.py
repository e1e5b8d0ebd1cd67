"""Trust lists that bind keys to roles: what a line means, and that no order of Hellos puts a key into another role."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.control.events import Dial, DialFailed, Emit, PathLost, Received
from asyncfabric.control.keys import ANY_ROLE, parse_trusted
from asyncfabric.control.messages import (
    MAX_FRAME_BYTES,
    Envelope,
    Hello,
    Identity,
    SessionRefusal,
    Undecodable,
    Welcome,
    decode,
    encode,
)
from asyncfabric.control.session_table import SessionTable

ROLES = ("decode", "router", "")
ALICE, BOB, CAROL = "aa" * 32, "bb" * 32, "cc" * 32
TRUSTED = {ALICE: frozenset(["decode"]), BOB: frozenset(["router", "decode"]), CAROL: ANY_ROLE}
SETS = st.frozensets(st.text("aZ9._-", min_size=1, max_size=64), max_size=4)
HELLOS = st.lists(
    st.tuples(
        st.sampled_from("xy"), st.integers(1, 3), st.sampled_from(ROLES), st.sampled_from(list(TRUSTED)), st.booleans()
    ),
    max_size=30,
)


@given(st.text("0123456789abcdefABCDEF", min_size=64, max_size=64), SETS, st.text("a1 #=,é\t", max_size=20))
def test_a_line_has_a_key_and_its_roles_and_a_remark_changes_neither(
    key: str, roles: frozenset[str], note: str
) -> None:
    line = f"{key} role={','.join(sorted(roles))}" if roles else key
    assert parse_trusted(line) == parse_trusted(f"  {line}  # {note}") == (key.lower(), roles)


@given(st.text("ab,=# é", max_size=40))
def test_no_text_that_binds_a_key_lets_it_loose(text: str) -> None:
    try:
        found = parse_trusted(f"{ALICE} role={text}")
    except ValueError:
        return
    assert found is not None and found[0] == ALICE and found[1]


@given(HELLOS)
def test_a_name_keeps_its_role_and_key_while_it_lives_and_a_key_its_roles(
    hellos: list[tuple[str, int, str, str, bool]],
) -> None:
    """Who is in is who came first, in a role of its key; a path that is lost makes room for others."""
    table = SessionTable(Identity("me", 1), trusted=TRUSTED)
    held: dict[str, tuple[str, str]] = {}
    for number, (name, incarnation, role, key, leaves) in enumerate(hellos):
        sender, path = Identity(name, incarnation), b"%d" % number
        hello = Hello("ipc:///x", (), 4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES, role)
        actions = table.feed(Received(path, encode(Envelope(sender, number, 0, None, hello)), key), 0)
        answers = [decode(action.frame) for action in actions if isinstance(action, Emit)]
        refused = [
            answer.message.code
            for answer in answers
            if not isinstance(answer, Undecodable) and isinstance(answer.message, SessionRefusal)
        ]
        if TRUSTED[key] and role not in TRUSTED[key]:
            assert refused == ["key_role"]
        elif held.get(name, (role, key)) != (role, key):
            assert refused == ["name_taken"]
        elif not refused or refused == ["retired"]:
            held.setdefault(name, (role, key))
        living = {peer.identity.name: (peer.role, peer.key) for peer in table.names.peers.values()}
        held = {name: pair for name, pair in held.items() if name in living}
        assert living == held
        if leaves and path in table.sessions:
            table.feed(PathLost(path, "it left"), 0)
            held.pop(name)


def test_a_dialer_takes_no_answer_of_a_key_in_another_role() -> None:
    """A trusted decode node that listens where the directory did is no directory."""
    nonces = itertools.count(7)
    table = SessionTable(Identity("me", 1), trusted=TRUSTED, nonce=lambda: next(nonces))
    table.feed(Dial(1, "tcp://there", ALICE), 0)
    welcome = Welcome("tcp://there", (), 4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES, "directory")
    actions = table.feed(Received(1, encode(Envelope(Identity("d", 1), 7, 0, None, welcome)), ALICE), 0)
    (failed,) = [action for action in actions if isinstance(action, DialFailed)]
    assert failed.code == "key_role" and not table.names.peers
    assert "d@1 as directory under the key aaaaaaaa..., which is trusted as decode" in failed.reason

"""Agents of the NIXL face, over the fake engine and over the compiled one: data, notes, states, errors, ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from nixl_agents import LENGTH, Agent, notes_of, until

from asyncfabric.integrations.nixl import _bindings as bind
from asyncfabric.integrations.nixl import nixl_agent_config
from asyncfabric.testing import FakeNetwork

Make = Callable[..., Agent]


@pytest.fixture
def network(engine_kind: str) -> FakeNetwork | None:
    return FakeNetwork() if engine_kind == "fake" else None


@pytest.fixture
def make(network: FakeNetwork | None) -> Iterator[Make]:
    made: list[Agent] = []

    def agent(name: str, **config: Any) -> Agent:
        made.append(Agent(name, network, **config))
        return made[-1]

    yield agent
    if network is not None:
        network.release()
    for one in made:
        one.close()


@pytest.fixture
def pair(make: Make) -> tuple[Agent, Agent]:
    a, b = make("a"), make("bb")
    a.meets(b)
    return a, b


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize(
    "lengths",
    [[4096], [100] * 9, [0, 5, 5, 7], [64, 32, 64, 16], list(range(1, 60))],
    ids=["one", "equal", "with an empty one", "mixed", "many lengths"],
)
def test_blocks_arrive_and_nothing_else_changes(pair: tuple[Agent, Agent], operation: str, lengths: list[int]) -> None:
    a, b = pair
    random = np.random.default_rng(5)
    own = random.permutation(LENGTH // 4096)[: len(lengths)] if len(lengths) < 16 else np.arange(len(lengths))
    step = 4096 if len(lengths) < 16 else 1000
    near = [(int(slot) * step + 3, size) for slot, size in zip(own, lengths, strict=True)]
    far = [(int(slot) * step + 9, size) for slot, size in zip(random.permutation(own), lengths, strict=True)]
    expected = [a.memory.copy(), b.memory.copy()]
    source, target = (0, 1) if operation == "WRITE" else (1, 0)
    for one, other in zip(near, far, strict=True):
        begin, end = (one[0], other[0]) if operation == "WRITE" else (other[0], one[0])
        expected[target][end : end + one[1]] = [a, b][source].memory[begin : begin + one[1]]
    local, remote = a.get_xfer_descs(a.rows(*near), "DRAM"), a.get_xfer_descs(b.rows(*far), "DRAM")
    a.ended(a.initialize_xfer(operation, local, remote, "bb"))
    assert (a.memory == expected[0]).all() and (b.memory == expected[1]).all()


@pytest.mark.parametrize("many", [2, 20], ids=["lists", "powers of two"])
def test_descriptors_of_nothing_name_no_memory(pair: tuple[Agent, Agent], many: int) -> None:
    a, b = pair
    nothing, before = (0, 0, 0), b.memory.copy()
    spans = [(index * 64, 10 + index) for index in range(many)]
    local = [row for at, size in spans for row in ((a.at(at), size, 0), nothing)]
    remote = [row for at, size in spans for row in ((b.at(at + 7), size, 0), (3, 0, 9))]
    near, far = a.get_xfer_descs(local, "DRAM"), a.get_xfer_descs(remote, "DRAM")
    a.ended(a.initialize_xfer("WRITE", near, far, "bb"))
    for at, size in spans:
        before[at + 7 : at + 7 + size] = a.memory[at : at + size]
    assert (b.memory == before).all()
    only = a.get_xfer_descs([nothing], "DRAM")
    assert a.check_remote_metadata("bb", only)
    a.ended(a.initialize_xfer("READ", only, only, "bb"))
    with pytest.raises(bind.nixlNotFoundError, match="local descriptor 1: 5 bytes at 0x0"):
        outside = a.get_xfer_descs([nothing, (0, 5, 0)], "DRAM")
        a.initialize_xfer("READ", outside, outside, "bb")
    with pytest.raises(bind.nixlInvalidParamError, match="descriptor 1 has 0 bytes locally and 5 remotely"):
        rows = [(b.at(0), 1, 0), (b.at(0), 5, 0)]
        a.initialize_xfer(
            "READ", a.get_xfer_descs([(a.at(0), 1, 0), nothing], "DRAM"), a.get_xfer_descs(rows, "DRAM"), "bb"
        )


def test_prepared_lists_give_the_blocks_at_their_positions(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    strided = np.array([[b.at(0), 16, 0, 32, 4], [b.at(1024), 16, 0, 16, 3]], dtype=np.uint64)
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", a.rows(*[(i * 16, 16) for i in range(7)]), "DRAM")
    remote = a.prep_xfer_dlist("bb", strided, "DRAM")
    before = b.memory.copy()
    handle = a.make_prepped_xfer("WRITE", local, [0, 2, 4], remote, np.array([3, 4, 6], dtype=np.int32))
    a.ended(handle)
    for own, far in ((0, 96), (2, 1024), (4, 1056)):
        before[far : far + 16] = a.memory[own * 16 : own * 16 + 16]
    assert (b.memory == before).all()
    a.release_dlist_handle(local)
    a.release_dlist_handle(local)
    a.ended(handle)  # made from a list that is released: it goes on
    with pytest.raises(bind.nixlInvalidParamError, match="released"):
        a.make_prepped_xfer("WRITE", local, [0], remote, [0])


def test_transfers_are_few_calls_of_the_fabric(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    local = a.prep_xfer_dlist("", a.rows(*[(i * 16, 16) for i in range(4000)]), "DRAM")
    remote = a.prep_xfer_dlist("bb", b.rows(*[(i * 16, 16) for i in range(4000)]), "DRAM")
    order = np.random.default_rng(1).permutation(4000)
    assert len(a.make_prepped_xfer("WRITE", local, order, remote, order[::-1])._request._steps) == 1
    joined = a.make_prepped_xfer("WRITE", local, range(9, 99), remote, range(109, 199))._request._steps
    assert [step.total_bytes for step in joined] == [90 * 16]
    lengths = [(i * 200, 1 + i % 100) for i in range(300)]
    near, far = a.get_xfer_descs(a.rows(*lengths), "DRAM"), a.get_xfer_descs(b.rows(*lengths), "DRAM")
    assert len(a.initialize_xfer("READ", near, far, "bb")._request._steps) <= 7  # bits of a length


def test_several_registrations_and_an_agent_itself(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    more = np.zeros(5000, np.uint8)
    b.register_memory([(more.ctypes.data, 5000, 3, "")], "DRAM")
    a.meets(b)
    local = a.get_xfer_descs(a.rows((0, 100), (100, 200), (300, 100)), "DRAM")
    remote = a.get_xfer_descs([(b.at(7), 100, 0), (more.ctypes.data, 200, 3), (b.at(900), 100, 0)], "DRAM")
    a.ended(a.initialize_xfer("WRITE", local, remote, "bb"))
    assert (more[:200] == a.memory[100:300]).all() and (b.memory[900:1000] == a.memory[300:400]).all()
    within = a.made("WRITE", (0, 500), a, (1000, 500), b"to myself")
    a.ended(within)
    assert (a.memory[1000:1500] == a.memory[:500]).all()
    assert notes_of(a, 1) == {"a": [b"to myself"]}


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_note_comes_with_each_transfer(pair: tuple[Agent, Agent], operation: str) -> None:
    a, b = pair
    handle = a.made(operation, (0, 64), b, (64, 64), b"first")
    a.ended(handle)
    assert notes_of(b, 1) == {"a": [b"first"]}
    a.transfer(handle, b"second")
    until(lambda: a.check_xfer_state(handle) == "DONE")
    a.ended(handle)
    assert notes_of(b, 2) == {"a": [b"second", b"second"]}
    assert b.get_new_notifs() == {}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.bytes_])
def test_notes_of_transfers_are_whatever_holds_bytes(pair: tuple[Agent, Agent], kind: Callable[[bytes], Any]) -> None:
    a, b = pair
    b.notifs = defaultdict(list)
    first = a.made("WRITE", (0, 64), b, (64, 64), kind(b"made"))
    second = a.made("WRITE", (0, 64), b, (64, 64))
    a.transfer(first)
    a.transfer(second, kind(b"posted"))
    until(lambda: {a.check_xfer_state(handle) for handle in (first, second)} == {"DONE"})
    until(lambda: a.get_new_notifs() == {} and sum(map(len, b.update_notifs().values())) == 2)
    assert sorted(b.notifs["a"]) == [b"made", b"posted"]


def test_notes_of_every_kind_and_length(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    long = bytes(range(256)) * 100
    for note in (b"plain", b"", b"\xff\x00", "text", long):
        a.send_notif("bb", note)  # type: ignore[arg-type]
    assert sorted(notes_of(b, 5)["a"]) == sorted([b"plain", b"", b"\xff\x00", b"text", long])
    a.send_notif(b"bb", b"tag: x")
    until(lambda: b.check_remote_xfer_done("a", b"tag"))
    assert not b.check_remote_xfer_done("a", b"tag") and b.notifs == {"a": []}


def test_the_states_and_the_figures_of_a_transfer(make: Make) -> None:
    a, b = make("a", capture_telemetry=True), make("bb")
    a.meets(b)
    handle = a.made("WRITE", (0, 64), b, (64, 64))
    with pytest.raises(bind.nixlNotPostedError, match="call transfer"):
        a.check_xfer_state(handle)
    with pytest.raises(bind.nixlNotPostedError, match="not complete"):
        a.get_xfer_telemetry(handle)
    a.ended(handle)
    figures = a.get_xfer_telemetry(handle)
    assert (figures.totalBytes, figures.descCount) == (64, 1) and figures.xferDuration >= figures.postDuration >= 0
    assert a.query_xfer_backend(handle) == "UCX" and a.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    a.release_xfer_handle(handle)
    a.release_xfer_handle(handle)
    for call in (a.check_xfer_state, a.transfer, a.get_xfer_telemetry):
        with pytest.raises(bind.nixlInvalidParamError, match="released"):
            call(handle)
    with pytest.raises(bind.nixlNoTelemetryError, match="capture_telemetry"):
        b.meets(a)
        b.get_xfer_telemetry(b.made("READ", (0, 1), a, (0, 1)))


def test_misuse_raises_what_nixl_raises(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    local = a.prep_xfer_dlist("", a.rows((0, 10), (10, 10)), "DRAM")
    remote = a.prep_xfer_dlist("bb", b.rows((0, 10), (10, 10), (20, 5)), "DRAM")
    near, far = a.get_xfer_descs(a.rows((0, 10)), "DRAM"), a.get_xfer_descs(b.rows((0, 10)), "DRAM")
    invalid, missing = bind.nixlInvalidParamError, bind.nixlNotFoundError
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: a.initialize_xfer("WRITE", near, far, "zz"), missing, "add_remote_agent"),
        (lambda: a.initialize_xfer("PUT", near, far, "bb"), KeyError, "PUT"),
        (lambda: a.initialize_xfer("WRITE", near, near, "bb"), missing, "remote descriptor 0: 10 bytes"),
        (lambda: a.initialize_xfer("WRITE", far, far, "bb"), missing, "local descriptor 0: 10 bytes"),
        (lambda: a.made("WRITE", (0, 9), b, (0, 10)), invalid, "9 bytes locally and 10 remotely"),
        (lambda: a.prep_xfer_dlist("zz", b.rows((0, 1)), "DRAM"), missing, "'zz' is not known"),
        (lambda: a.prep_xfer_dlist("bb", b.rows((LENGTH - 1, 2)), "DRAM"), missing, "no registered memory"),
        (lambda: a.make_prepped_xfer("WRITE", local, [2], remote, [0]), invalid, "position 2 is out of range"),
        (lambda: a.make_prepped_xfer("WRITE", local, [-1], remote, [0]), invalid, "position -1"),
        (lambda: a.make_prepped_xfer("WRITE", local, [0, 1], remote, [0]), invalid, "2 local positions and 1"),
        (lambda: a.make_prepped_xfer("WRITE", local, [], remote, []), invalid, "at least one"),
        (lambda: a.make_prepped_xfer("WRITE", local, [0], remote, [2]), invalid, "10 bytes locally and 5"),
        (lambda: a.make_prepped_xfer("WRITE", remote, [0], local, [0]), invalid, "cannot be the local side"),
        (lambda: a.make_prepped_xfer("WRITE", local, [0.5], remote, [0]), invalid, "integers"),
        (lambda: a.check_xfer_state(7), invalid, "handle"),  # type: ignore[arg-type]
        (lambda: a.send_notif("zz", b""), missing, "'zz' is not known"),
        (lambda: a.send_notif("bb", 3), TypeError, "note is bytes"),  # type: ignore[arg-type]
        (lambda: a.make_connection("zz"), missing, "'zz' is not known"),
        (lambda: a.add_remote_agent(b"garbage"), bind.nixlMismatchError, "no metadata"),
        (lambda: a.add_remote_agent(a.get_agent_metadata()), invalid, "itself"),
        (lambda: a.register_memory([(a.at(0), 1, 0, "")], "FILE"), missing, "storage"),
        (lambda: a.register_memory([(a.at(0), 1, 0, "")], "VRAM"), bind.nixlBackendError, "rail of that GPU"),
        (lambda: a.deregister_memory(a.get_reg_descs([(a.at(1), 1, 0, "")], "DRAM")), missing, "registered 0 times"),
        (
            lambda: a.get_partial_agent_metadata(a.get_reg_descs([(a.at(1), 1, 0, "")], "DRAM")),
            missing,
            "not registered",
        ),
        (lambda: a.create_backend("GDS"), missing, "GDS.* is storage"),
        (lambda: a.create_backend("NOPE"), missing, "unknown"),
        (lambda: a.create_backend("UCX"), invalid, "already"),
        (lambda: a.query_memory([(a.at(0), 1, 0, "")], "UCX", "DRAM"), bind.nixlNotSupportedError, "storage"),
        (lambda: a.query_memory([(a.at(0), 1, 0, "")], "NOPE", "DRAM"), ValueError, "NOPE"),
        (lambda: a.send_local_metadata("127.0.0.1"), bind.nixlNotSupportedError, "get_agent_metadata"),
        (lambda: Agent("c", None, backends=["POSIX"]), missing, "POSIX"),
        (lambda: nixl_agent_config(sync_mode=3), TypeError, "sync_mode"),  # type: ignore[arg-type]
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


def test_removed_agents_are_not_found_until_they_are_added_again(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    local = a.prep_xfer_dlist("", a.rows((0, 10)), "DRAM")
    remote = a.prep_xfer_dlist("bb", b.rows((0, 10)), "DRAM")
    handle = a.make_prepped_xfer("WRITE", local, [0], remote, [0], b"note")
    assert a.check_remote_metadata("bb") and a.check_remote_metadata("bb", a.get_xfer_descs(b.rows((0, 10)), "DRAM"))
    assert not a.check_remote_metadata("bb", a.get_xfer_descs(b.rows((-5, 10)), "DRAM"))
    a.remove_remote_agent(b"bb")
    a.remove_remote_agent("bb")
    assert not a.check_remote_metadata("bb")
    for call in (lambda: a.make_prepped_xfer("WRITE", local, [0], remote, [0]), lambda: a.transfer(handle)):
        with pytest.raises(bind.nixlNotFoundError, match="was removed"):
            call()
    a.meets(b)
    a.ended(a.made("WRITE", (0, 10), b, (0, 10), b"again"))
    assert notes_of(b, 1) == {"a": [b"again"]}


def test_metadata_grows_and_never_goes_back(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    old = b.get_agent_metadata()
    more = np.zeros(100, np.uint8)
    listed = b.register_memory([(more.ctypes.data, 100, 0, "")], "DRAM")
    new, part = b.get_agent_metadata(), b.get_partial_agent_metadata(listed)
    assert new == b.get_agent_metadata() and len(part) < len(new)
    place = a.get_xfer_descs([(more.ctypes.data, 100, 0)], "DRAM")
    assert not a.check_remote_metadata("bb", place)
    with pytest.raises(bind.nixlNotFoundError, match="inc_conn_info"):
        b.add_remote_agent(b.get_partial_agent_metadata(listed).replace(b"bb", b"cc"))
    a.add_remote_agent(part)
    assert a.check_remote_metadata("bb", place)
    a.add_remote_agent(old)  # late: it is older than what was registered, and what came in part stays
    a.add_remote_agent(new)
    a.add_remote_agent(old)
    assert a.check_remote_metadata("bb", place)
    b.deregister_memory(listed)
    a.meets(b)
    assert not a.check_remote_metadata("bb", place)


def test_registrations_are_counted_and_end_alone(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    twice = b.register_memory([(b.at(0), LENGTH, 0, "")], "DRAM")
    inner = b.register_memory([(b.at(100), 50, 0, "")], "DRAM")
    assert len(b._core.memory) == 2 and len(b._core.fabric.regions()) == 2
    handle = a.made("WRITE", (0, 10), b, (100, 10))
    b.deregister_memory(inner)
    b.deregister_memory(twice)
    a.ended(handle)  # the range is registered once more
    b.deregister_memory(b.registered)
    assert len(b._core.memory) == 0 and not b._core.fabric.regions()
    with pytest.raises(bind.nixlNotFoundError, match="deregistered"):
        a.ended(handle)
    with pytest.raises(bind.nixlNotFoundError, match="registered 0 times"):
        b.deregister_memory(b.registered)
    some = b.get_reg_descs([(b.at(0), 10, 0, ""), (b.at(20), 10, 0, "")], "DRAM")
    b.register_memory(some)
    with pytest.raises(bind.nixlNotFoundError):
        b.deregister_memory(b.get_reg_descs([(b.at(0), 10, 0, ""), (b.at(1), 10, 0, "")], "DRAM"))
    assert len(b._core.memory) == 2  # all of a list, or none


def test_a_new_life_replaces_the_old(make: Make) -> None:
    a, old = make("a"), make("bb")
    a.meets(old)
    handle = a.made("WRITE", (0, 10), old, (0, 10))
    a.ended(handle)
    old.close()
    new = make("bb")
    a.meets(new)
    a.ended(a.made("WRITE", (0, 10), new, (0, 10), b"hello"))
    assert notes_of(new, 1) == {"a": [b"hello"]}
    with pytest.raises(bind.nixlNotFoundError, match="was removed"):
        a.transfer(handle)


def test_an_agent_that_is_gone_is_named(make: Make) -> None:
    a, b = make("a"), make("bb")
    a.meets(b)
    handle = a.made("WRITE", (0, 10), b, (0, 10), b"note")
    a.ended(handle)
    b.close()

    def failed() -> bool:
        try:
            a.transfer(handle)
            a.check_xfer_state(handle)
        except bind.nixlRepostActiveError:
            return False
        except (bind.nixlRemoteDisconnectError, bind.nixlNotFoundError) as error:
            return "'bb'" in str(error)
        return False

    until(failed)
    a.release_xfer_handle(handle)


def test_an_agent_takes_calls_of_many_threads_and_its_thread_ends_with_it(make: Make) -> None:
    a, b = make("a", enable_prog_thread=True), make("bb", enable_prog_thread=True)
    a.meets(b)
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"nobody polls")
    a.transfer(handle)
    until(lambda: len(b._core.notes.waiting) == 1)  # taken in by the caretaker; nobody has asked
    assert notes_of(b, 1) == {"a": [b"nobody polls"]}
    thread = a._core.caretaker
    assert thread is not None and thread.is_alive()
    a.close()
    assert not thread.is_alive()

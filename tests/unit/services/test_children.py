"""Child processes of a command: messages both ways, several at once, a death with its stderr, a bounded end."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from asyncfabric_services.children.child import ChildDied, ChildProcess, wait_any

PROGRAM = """
import os, signal, sys, time
import msgspec, trio
from asyncfabric_services.children.worker import take_pipes

class Order(msgspec.Struct, tag=True):
    text: str

class Echo(msgspec.Struct, tag=True):
    text: str

async def serve(pipes):
    parent = pipes.channel(Order)
    print("a library prints", flush=True)
    while (order := await parent.receive()) is not None:
        if order.text == "die":
            print("the reason", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if order.text == "stay":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            await parent.send(Echo("staying"))
            time.sleep(60)
        await parent.send(Echo(order.text))

trio.run(serve, take_pipes())
"""
PATIENCE_S = 30.0


class Order(msgspec.Struct, tag=True):
    text: str


class Echo(msgspec.Struct, tag=True):
    text: str


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "echoing_child.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@contextmanager
def child(environment: dict[str, str], role: str = "echo") -> Iterator[ChildProcess]:
    started = ChildProcess(role, "echoing_child", receives=Echo, environment=environment)
    try:
        yield started
    finally:
        started.kill()
        started.end(PATIENCE_S)


def answer(child: ChildProcess) -> str:
    while not child.ready:
        assert wait_any([child], PATIENCE_S) == [child]
        assert child.take(), child.death()
    echo = child.next_nowait()
    assert isinstance(echo, Echo)
    return echo.text


def test_messages_of_any_length_go_both_ways_and_prints_are_no_messages(environment: dict[str, str]) -> None:
    with child(environment) as echo:
        for text in ("", "two\nlines", "x" * 3_000_000):
            echo.send(Order(text))
            assert answer(echo) == text
        echo.hang_up()
        assert wait_any([echo], PATIENCE_S) == [echo] and not echo.take()
        assert echo.death() == "exit status 0\n    a library prints"


def test_what_is_taken_at_once_comes_as_single_messages_in_order(environment: dict[str, str]) -> None:
    with child(environment) as echo:
        texts = [str(number) for number in range(100)]
        for text in texts:
            echo.send(Order(text))
        assert [answer(echo) for _ in texts] == texts
        assert echo.next_nowait() is None and not echo.ready


def test_several_are_waited_for_together_and_only_who_sent_is_returned(environment: dict[str, str]) -> None:
    with ExitStack() as stack:
        one, two = (stack.enter_context(child(environment, role)) for role in ("one", "two"))
        assert wait_any([one, two], 0.0) == []
        two.send(Order("here"))
        assert wait_any([one, two], PATIENCE_S) == [two]
        assert answer(two) == "here"


def test_a_task_receives_without_holding_up_the_loop(environment: dict[str, str]) -> None:
    async def main(echo: ChildProcess) -> list[str]:
        with trio.move_on_after(0.01) as scope:
            await echo.receive()
        assert scope.cancelled_caught
        with trio.fail_after(PATIENCE_S):
            for text in ("one", "two"):
                echo.send(Order(text))
            found = [(await echo.receive()).text for _ in range(2)]
            echo.hang_up()
            assert await echo.receive() is None
        return found

    with child(environment) as echo:
        assert trio.run(main, echo) == ["one", "two"]


def test_a_death_has_the_signal_and_the_end_of_stderr(environment: dict[str, str]) -> None:
    with child(environment) as echo:
        echo.send(Order("die"))
        while echo.take():
            pass
        assert echo.death().splitlines() == ["killed by SIGKILL", "    a library prints", "    the reason"]
        with pytest.raises(ChildDied, match=r"echo died: killed by SIGKILL\n.*\n    the reason"):
            echo.send(Order("again"))


def test_a_child_that_does_not_leave_is_killed_in_bounded_time(environment: dict[str, str]) -> None:
    echo = ChildProcess("echo", "echoing_child", receives=Echo, environment=environment)
    try:
        echo.send(Order("stay"))
        assert answer(echo) == "staying"
    finally:
        began = time.monotonic()
        written = echo.end(0.2)
    assert time.monotonic() - began < PATIENCE_S
    assert written == "a library prints\n"
    assert not os.path.exists(f"/proc/{echo.pid}")


def test_a_child_that_reads_nothing_is_ended_while_a_thread_sends_to_it(environment: dict[str, str]) -> None:
    echo = ChildProcess("echo", "echoing_child", receives=Echo, environment=environment)
    failures: list[BaseException] = []

    def send() -> None:
        try:
            echo.send(Order("x" * 3_000_000))
        except (ChildDied, ValueError) as error:
            failures.append(error)

    sender = threading.Thread(target=send)
    try:
        echo.send(Order("stay"))
        assert answer(echo) == "staying"
        sender.start()
        with open(f"/proc/{echo.pid}/fd/0", "rb") as pipe:
            filled = array("i", [0])
            while filled[0] < 4096:  # the sender is in the middle of its write
                fcntl.ioctl(pipe, termios.FIONREAD, filled)
    finally:
        echo.end(0.2)
    sender.join(PATIENCE_S)
    assert len(failures) == 1


def test_ctrl_c_reaches_the_parent_alone(environment: dict[str, str]) -> None:
    with child(environment) as echo:
        assert os.getpgid(echo.pid) == echo.pid != os.getpgid(0)
        echo.send(Order("ready"))
        assert answer(echo) == "ready"
        os.kill(echo.pid, signal.SIGINT)
        echo.send(Order("still here"))
        assert answer(echo) == "still here"

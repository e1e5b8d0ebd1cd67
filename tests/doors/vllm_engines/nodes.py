"""Engines as processes, seen from a test: forked from one that has imported vLLM, asked over pipes, stopped and killed.

vLLM is not imported in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

PULL, PUSH, OURS = "NixlPullConnector", "NixlPushConnector", "Connector"
PATIENCE_S = 60.0
TCP = {"ASYNCFABRIC_NIXL_RAILS": "tcp:lo", "ASYNCFABRIC_RAILS": "tcp:lo"}
"""A frozen process moves no bytes over this rail, so what is in flight stays in flight."""
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends with a request to the engine that prefills."""


def free_port() -> int:
    """Return a free port below those that the kernel gives to connections: vLLM binds it only seconds later."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


class Node:
    """One engine. Leaving the block ends it and requires that it ends well; `kill` ends it otherwise."""

    def __init__(
        self,
        name: str,
        connector: str,
        *,
        blocks: int = 64,
        head_size: int = 16,
        step_tokens: int = 64,
        packed: bool = False,
        ranks: int = 1,
        order: str = "HND",
        lease_s: int = 30,
        **environment: str,
    ) -> None:
        """Start an engine that prefills, by a name that begins with P, or decodes."""
        transfer = {
            "engine_id": name,
            "kv_connector": connector,
            "kv_role": "kv_producer" if name.startswith("P") else "kv_consumer",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s, "lease_s": lease_s},
        }
        if connector == OURS:
            transfer["kv_connector_module_path"] = "asyncfabric.integrations.vllm"
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        settings = {
            "transfer": transfer,
            "blocks": blocks,
            "head_size": head_size,
            "step_tokens": step_tokens,
            "packed": packed,
            "ranks": ranks,
            "order": order,
        }
        self.blocks, self.connector = blocks, connector
        self._names = self._computed = 0
        self._finished: dict[str, dict[str, Any]] = {}
        self._process = context.Process(target=run, args=(theirs, settings, environment), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> Node:
        """Wait until the engine takes requests."""
        assert self._receive() == {"ready": True}
        return self

    def ask(self, do: str, *arguments: Any) -> Any:
        """Call a method of the engine between two steps."""
        self.post(do, *arguments)
        return self.answers(1)[0]

    def post(self, do: str, *arguments: Any) -> None:
        """Send a call without waiting; calls that are there together are made before the next step."""
        self._pipe.send((do, arguments))

    def answers(self, count: int) -> list[Any]:
        """Wait for the answers of calls that were posted."""
        found = []
        while len(found) < count:
            message = self._receive()
            if "answer" in message:
                found.append(message["answer"])
            else:
                self._keep(message)
        return found

    def waits(self, name: str) -> None:
        """Wait until a request loads, and has been looked at in two more steps without an end."""
        begun = self.until(lambda report: report["loading"] == [name])["steps"]
        assert self.until(lambda report: report["steps"] > begun + 2)["loading"] == [name]

    def add(self, name: str, prompt: list[int], count: int, params: dict[str, Any] | None = None) -> None:
        """Send a request."""
        self.ask("add", name, prompt, count, params)

    def result(self, name: str) -> dict[str, Any]:
        """Wait until a request has finished."""
        while name not in self._finished:
            self._keep(self._receive())
        return self._finished.pop(name)

    def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Have a prompt computed, and return what a proxy sends to the engine that decodes."""
        self.add(name, prompt, 1, dict(ASK))
        params: dict[str, Any] = self.result(name)["params"]
        return params

    def until(self, condition: Any) -> dict[str, Any]:
        """Ask for reports until one fulfils a condition."""
        limit = time.monotonic() + PATIENCE_S
        while not condition(report := self.ask("report")):
            assert time.monotonic() < limit, report
        return report  # type: ignore[no-any-return]

    def alone(self, prompt: list[int], count: int) -> list[int]:
        """Return the text that this engine gives by itself."""
        self._names += 1
        self.add(f"alone {self._names}", prompt, count)
        tokens: list[int] = self.result(f"alone {self._names}")["tokens"]
        return tokens

    def computed(self) -> int:
        """Return how many tokens the engine has computed, from the start or from the last call on."""
        before, self._computed = self._computed, int(self.ask("report")["computed"])
        return self._computed - before

    def emptied(self) -> dict[str, Any]:
        """Wait until no request is left, and return the report: every block must be free."""
        report = self.until(lambda report: not report["requests"])
        assert report["free"] == self.blocks - 1, "vLLM keeps one block for itself"
        return report

    def freeze(self) -> None:
        """Stop the process where it is; a thread of it that has not run yet stops the others late, so wait for all."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.glob("*/stat")):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it by -9."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _keep(self, message: dict[str, Any]) -> None:
        self._finished[message["finished"]["name"]] = message["finished"]

    def _receive(self) -> dict[str, Any]:
        assert self._pipe.poll(PATIENCE_S), f"engine {self._process.pid} is silent"
        try:
            message: dict[str, Any] = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"engine ended with {self._process.exitcode}") from None
        return message

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._process.is_alive():
            return
        if kind is not None:
            self.kill()
            return
        self._pipe.close()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0, f"engine ended with {self._process.exitcode}"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return tokens of a prompt."""
    return [(seed * 7919 + position * 31) % 31000 + 10 for position in range(length)]


def hold_a_cancelled_load(first: Node, second: Node, tokens: list[int]) -> None:
    """Abort a load while its source stands still: its blocks are held until the source goes on, which it does now."""
    second.add("well", tokens, 1, first.prefill("well", tokens))
    second.result("well")
    params = first.prefill("gone", tokens)
    first.freeze()
    second.add("gone", tokens, 1, params)
    second.waits("gone")
    second.ask("abort", "gone")
    steps = second.ask("report")["steps"]
    held = second.until(lambda report: report["steps"] > steps + 3 or not report["requests"])
    assert held["free"] < second.blocks - 1, "nothing has proved that no byte arrives any more"
    first.thaw()


def kill_in_mid_transfer(first: Node, second: Node, tokens: list[int]) -> list[int]:
    """End an engine that prefills by -9 while another one loads from it; require the right text, and return it."""
    second.add("well", tokens, 2, first.prefill("well", tokens))
    expected: list[int] = second.result("well")["tokens"]
    params = first.prefill("cut", tokens)
    second.computed()
    first.freeze()
    second.add("cut", tokens, 2, params)
    second.waits("cut")
    first.kill()
    assert second.result("cut")["tokens"] == expected
    assert second.computed() == len(tokens) + 1
    return expected


def run(pipe: Connection, settings: dict[str, Any], environment: dict[str, str]) -> None:
    """Be an engine; in its process."""
    import engine  # vLLM, which the forkserver has imported

    engine.serve(pipe, settings, environment)

"""A Ray cluster of two raylets, and a scenario for each line of JSON that comes; one line answers it.

    {"do": "<name of a scenario>"} -> {"ok": true, ...what the scenario saw} or {"error": "..."}

Actors take their rails in their constructor: `local` where they only move tensors, `tcp` where one of them is stopped,
because a stopped process still answers over shared memory, and does not over a socket. Ends with its input.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncfabric.integrations import nixl as nixl_face

FOLDER = tempfile.mkdtemp(prefix="af-ray-")
os.environ.update(
    PYTHONPATH=os.pathsep.join(filter(None, (str(nixl_face.pythonpath()), os.environ.get("PYTHONPATH")))),
    ASYNCFABRIC_NIXL_RAILS="local",
    RAY_TMPDIR=FOLDER,
    RAY_USAGE_STATS_ENABLED="0",
    RAY_prestart_worker_first_driver="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything binds to the loopback interface
)

sys.path.append(str(Path(__file__).parent))

import ray  # noqa: E402
import torch  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.experimental import set_target_for_ref  # noqa: E402
from ray.experimental.rdt.util import get_tensor_transport_manager  # noqa: E402
from scenario_lines import serve  # noqa: E402

import asyncfabric as af  # noqa: E402
from asyncfabric.integrations import process_fabric  # noqa: E402
from asyncfabric.integrations import ray as fabric_transport  # noqa: E402

PATIENCE_S = 60.0
LARGE = 1 << 20
FILLED = 4
"""Tensors of `mixed_tensors` that have bytes."""
ON_FIRST, ON_SECOND = {"resources": {"first": 1}}, {"resources": {"second": 1}}


def configuration(silence_s: float, *rails: str) -> af.FabricConfig:
    """Return a configuration in which a process may be stopped for a while, and does not drain for long."""
    return af.FabricConfig(
        rails=rails, peer_deadline_host=silence_s, peer_deadline_network=silence_s, drain_deadline=0.5
    )


fabric_transport.register()  # before `ray.method` names it


def mixed_tensors() -> list[torch.Tensor]:
    return [
        torch.arange(LARGE, dtype=torch.float32),
        torch.full((3, 5), 2.5, dtype=torch.bfloat16),
        torch.empty(0, 7),
        torch.tensor(-9, dtype=torch.int64),
        torch.arange(12, dtype=torch.uint8).reshape(3, 4),
    ]


def filled_tensors() -> list[torch.Tensor]:
    return [tensor for tensor in mixed_tensors() if tensor.nbytes]


def digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {float(tensor.double().sum())}"


EXPECTED = [digest(tensor) for tensor in mixed_tensors()]


@ray.remote(num_cpus=0, enable_tensor_transport=True, concurrency_groups={"look": 1})
class Party:
    """Makes tensors, and looks at those of others."""

    def __init__(self, silence_s: float, *rails: str) -> None:
        process_fabric.configure(configuration(silence_s, *rails))
        self.kept = torch.arange(1 << 16, dtype=torch.int32)

    def pid(self) -> int:
        return os.getpid()

    def id(self) -> str:
        return ray.get_runtime_context().get_actor_id()

    @ray.method(tensor_transport="asyncfabric")
    def mixed(self) -> list[torch.Tensor]:
        return mixed_tensors()

    @ray.method(tensor_transport="asyncfabric")
    def part(self, begin: int, end: int) -> torch.Tensor:
        return self.kept[begin:end]

    @ray.method(tensor_transport="nixl")
    def mixed_by_nixl(self) -> list[torch.Tensor]:
        return filled_tensors()

    def nixl_file(self) -> str:
        return str(importlib.import_module("nixl._api").__file__)

    def digests(self, tensors: list[torch.Tensor]) -> list[str]:
        return [digest(tensor) for tensor in tensors]

    def sum(self, tensor: torch.Tensor) -> int:
        return int(tensor.sum())

    @ray.method(concurrency_group="look")
    def registered(self) -> int:
        return len(transport().registrations)

    @ray.method(concurrency_group="look")
    def under_way(self) -> int:
        return submitted()


def transport() -> fabric_transport.AsyncfabricTransport:
    return get_tensor_transport_manager("ASYNCFABRIC")


def submitted() -> int:
    """Return how many reads are under way."""
    return sum(len(reads.transfers) for reads in transport()._fetches.reads())


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_S} s for {what}")
        time.sleep(0.01)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for as long as the block takes."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Caught(threading.Thread):
    """Runs a call, and keeps what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the call has not ended"
        if self.error is not None:
            raise self.error
        return self.value


class Scenarios:
    """What the tests ask for."""

    def __init__(self) -> None:
        process_fabric.configure(configuration(PATIENCE_S, "local", "tcp:lo"))
        nixl_face.install()
        self.one = Party.options(**ON_FIRST).remote(PATIENCE_S, "local", "tcp:lo")
        self.other = Party.options(**ON_SECOND).remote(PATIENCE_S, "local")
        self.far = Party.options(**ON_SECOND).remote(PATIENCE_S, "tcp:lo")

    def both_ways(self) -> dict[str, Any]:
        there = ray.get(self.other.digests.remote(self.one.mixed.remote()), timeout=PATIENCE_S)
        back = ray.get(self.one.digests.remote(self.other.mixed.remote()), timeout=PATIENCE_S)
        driver = [digest(tensor) for tensor in ray.get(self.one.mixed.remote(), timeout=PATIENCE_S)]
        put = ray.put(mixed_tensors(), _tensor_transport="asyncfabric")
        from_driver = ray.get(self.other.digests.remote(put), timeout=PATIENCE_S)
        pids = ray.get([self.one.pid.remote(), self.other.pid.remote()])
        return {"there": there, "back": back, "driver": driver, "put": from_driver, "expected": EXPECTED, "pids": pids}

    def nixl(self) -> dict[str, Any]:
        """Ray's own NIXL transport, unchanged, over the face: it finds the face on PYTHONPATH."""
        there = ray.get(self.other.digests.remote(self.one.mixed_by_nixl.remote()), timeout=PATIENCE_S)
        back = ray.get(self.one.digests.remote(self.other.mixed_by_nixl.remote()), timeout=PATIENCE_S)
        ref = self.one.mixed_by_nixl.remote()
        buffers = [torch.full_like(tensor, 1) for tensor in filled_tensors()]
        set_target_for_ref(ref, buffers)
        ray.get(ref, timeout=PATIENCE_S)
        return {
            "there": there,
            "back": back,
            "driver": [digest(tensor) for tensor in buffers],
            "expected": [digest(tensor) for tensor in filled_tensors()],
            "files": ray.get([self.one.nixl_file.remote(), self.other.nixl_file.remote()]),
            "face": str(nixl_face.pythonpath()),
        }

    def one_registration(self) -> dict[str, Any]:
        """Two objects over one storage: registered once, and for as long as one of them lives."""
        before = ray.get(self.one.registered.remote())
        first, second = self.one.part.remote(0, 100), self.one.part.remote(100, 300)
        sums = ray.get([self.other.sum.remote(first), self.other.sum.remote(second)], timeout=PATIENCE_S)
        both = ray.get(self.one.registered.remote()) - before
        del first
        again = ray.get(self.other.sum.remote(second), timeout=PATIENCE_S)
        del second
        until(lambda: ray.get(self.one.registered.remote()) == before, "both objects to be collected")
        return {"sums": [*sums, again], "both": both, "receiver": ray.get(self.other.registered.remote())}

    def target_buffers(self) -> dict[str, Any]:
        ref = self.other.mixed.remote()
        wanted = mixed_tensors()
        buffers = [torch.full_like(tensor, 1) for tensor in wanted]
        set_target_for_ref(ref, buffers)
        got = ray.get(ref, timeout=PATIENCE_S)
        same = [a.data_ptr() == b.data_ptr() for a, b in zip(got, buffers, strict=True)]
        fabric_transport.pin(buffers[0])
        pinned = len(transport().registrations)
        fabric_transport.unpin(buffers[0])
        return {
            "same": all(same),
            "digests": [digest(tensor) for tensor in buffers],
            "pinned": pinned,
            "left": len(transport().registrations),
        }

    def overlap(self) -> dict[str, Any]:
        """While the source is stopped nothing ends: what is under way was begun without waiting for the others."""
        source = self.far
        pid = ray.get(source.pid.remote())
        refs = [source.part.remote(begin, begin + 1000) for begin in range(0, 4000, 1000)]
        ray.wait(refs, num_returns=4, fetch_local=False)
        assert ray.get(source.part.remote(0, 10), timeout=PATIENCE_S).sum() == 45  # connected
        with stopped(pid):
            call = Caught(lambda: ray.get(refs, timeout=PATIENCE_S))
            until(lambda: submitted() == 4, "four fetches under way")
        sums = [int(tensor.sum()) for tensor in call.end()]
        return {"sums": sums, "expected": [sum(range(begin, begin + 1000)) for begin in range(0, 4000, 1000)]}

    def abort(self) -> dict[str, Any]:
        """An aborted fetch raises once its memory is free; source and receiver live."""
        source = self.far
        pid = ray.get(source.pid.remote())
        ref = source.mixed.remote()
        assert ray.get(source.part.remote(0, 10), timeout=PATIENCE_S).sum() == 45  # connected
        with stopped(pid):
            call = Caught(lambda: ray.get(ref, timeout=PATIENCE_S))
            until(lambda: submitted() == FILLED, "the reads of all tensors")
            transport().abort_transport(ref.hex(), transport().get_communicator_metadata(None, None))
            text = self.error_of(call)
        digests = [digest(tensor) for tensor in ray.get(ref, timeout=PATIENCE_S)]
        return {"text": text, "digests": digests, "expected": EXPECTED, "left": submitted()}

    def timeout(self) -> dict[str, Any]:
        """A ray.get that gave up has its reads cancelled, and its buffers are let go by a later call."""
        source = self.far
        pid = ray.get(source.pid.remote())
        ref = source.mixed.remote()
        assert ray.get(source.part.remote(0, 10), timeout=PATIENCE_S).sum() == 45  # connected
        with stopped(pid):
            text = self.error_of(Caught(lambda: ray.get(ref, timeout=0.2)))
            fetches = transport()._fetches

            def collected() -> bool:
                gc.collect()  # the error and the frames that hold the request refer to each other
                fetches.collect()
                return not fetches.reads()

            until(collected, "the reads to drain")
        regions = len(process_fabric.process_fabric().regions())
        return {"text": text, "regions": regions}

    def killed(self) -> dict[str, Any]:
        """The source is killed while another actor reads from it."""
        source, receiver = self.far, Party.options(**ON_FIRST).remote(5.0, "tcp:lo")
        pid, name = ray.get([source.pid.remote(), source.id.remote()])
        assert ray.get(receiver.sum.remote(source.part.remote(0, 10)), timeout=PATIENCE_S) == 45  # connected
        ref = source.mixed.remote()
        ray.wait([ref], fetch_local=False)
        os.kill(pid, signal.SIGSTOP)
        answer = receiver.digests.remote(ref)
        until(lambda: ray.get(receiver.under_way.remote()) == FILLED, "the receiver to read")
        os.kill(pid, signal.SIGKILL)
        text = self.error_of(Caught(lambda: ray.get(answer, timeout=PATIENCE_S)))
        alive = ray.get(receiver.digests.remote(self.one.mixed.remote()), timeout=PATIENCE_S)
        return {"text": text, "name": name, "pid": pid, "alive": alive, "expected": EXPECTED}

    @staticmethod
    def error_of(call: Caught) -> str:
        try:
            call.end()
        except RayError as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("no error")


@contextmanager
def cluster() -> Iterator[Scenarios]:
    """Run two raylets on the loopback interface, and leave nothing."""
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    raylets = Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False, "resources": {"first": 100}}
    )
    try:
        raylets.add_node(**node, resources={"second": 100})
        ray.init(address=raylets.address, log_to_driver=False)
        yield Scenarios()
    finally:
        process_fabric.close_process_fabric()
        ray.shutdown()
        raylets.shutdown()
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    serve(cluster(), FOLDER)

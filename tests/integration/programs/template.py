"""A process that has imported what nodes take seven seconds to import, and forks them: each is a process of its own.

Orders come over a socket: JSON, with the descriptors of stdout and stderr. A node becomes a child of whoever asked,
which is the nearest subreaper, since the process between is gone; it reports it itself, once that is true.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys

DIE_WITH_PARENT = 1
LARGEST_ORDER = 1 << 17
CLONE_NEWNET = 0x40000000


FOREIGN = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "hypercorn.trio",
    "starlette.applications",
    "starlette.requests",
    "starlette.routing",
    "prometheus_client",
    "msgspec",
    "trio",
    "zmq",
)


def warm() -> None:
    """Import what nodes import that is not ours, and start no thread but those of OpenBLAS, which survive a fork."""
    import numpy  # noqa: F401

    before = len(os.listdir("/proc/self/task"))
    for name in FOREIGN:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == before, "a library started a thread while it was imported"


def next_node(link: socket.socket) -> dict[str, object]:
    """Fork a node for each order; returns in the node."""
    warmed = False
    while True:
        order, fds, _, _ = socket.recv_fds(link, LARGEST_ORDER, 2)
        if not order:
            sys.exit()
        if not warmed:
            warm()
            warmed = True
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            asked: dict[str, object] = json.loads(order)
            become(asked, link, fds)
            return asked
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def become(order: dict[str, object], link: socket.socket, fds: list[int]) -> None:
    """Be the node: its descriptors, signals, network, environment and arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while os.getppid() != order["parent"]:
        os.sched_yield()
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, int(signal.SIGKILL))  # no orphan survives the test that started it
    if order["namespace"]:
        with open(f"/run/netns/{order['namespace']}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
    link.send(str(os.getpid()).encode())
    link.close()
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])  # type: ignore[call-overload]
    sys.argv = order["arguments"]  # type: ignore[assignment]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    next_node(socket.socket(fileno=int(sys.argv[1])))
    from asyncfabric_services.cli import main

    main()

"""The router's choosing half in the process of a test: asks the nodes of a cluster for tokens, not for text.

The text of an answer hides what is no UTF-8 behind U+FFFD; whoever compares token for token asks here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from prometheus_client import CollectorRegistry

from asyncfabric.actors import Membership, open_node
from asyncfabric.control import DirectoryClient, LinkConfig, open_link
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.router.attempts import ATTEMPTS, Attempts, AttemptsActor
from asyncfabric_services.router.backend import GenerateRequest, ServedModel
from asyncfabric_services.router.cluster_backend import ClusterBackend
from asyncfabric_services.runner.sampling import Sampling
from asyncfabric_services.runner.tokenizer import ByteTokenizer

DEADLINE = 300.0


class Asker:
    """Asks for greedy answers; made by `open_asker`."""

    def __init__(self, backend: ClusterBackend, membership: Membership) -> None:
        self.membership = membership
        self._backend = backend
        self._asked = 0

    async def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the tokens of a greedy answer."""
        return (await self.answer(prompt, count))[0]

    async def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
        """Return the tokens of a greedy answer, and the prefill node that was asked first."""
        self._asked += 1
        request = GenerateRequest(f"r{self._asked}", "one", tuple(prompt), count, Sampling(), DEADLINE)
        async with self._backend.generate(request) as tokens:
            answer = [token async for token in tokens]
            (asked,) = (one for one in self._backend.asked() if one.request is request)
            return answer, asked.sources[0]

    async def crowd(self, prompts: Sequence[Sequence[int]], count: int, together: int) -> list[list[int]]:
        """Ask for all prompts, so many at a time; returns the answers in the order of the prompts."""
        answers: list[list[int]] = [[] for _ in prompts]
        places = trio.Semaphore(together)

        async def ask(index: int) -> None:
            async with places:
                answers[index] = await self.tokens(prompts[index], count)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
        return answers


@asynccontextmanager
async def open_asker(ipc_folder: str, directory_address: str, *, by_prefix: bool = True) -> AsyncIterator[Asker]:
    """Join a cluster of this host as a router does."""
    attempts, membership = Attempts(), Membership()

    async with (
        open_link("asker", bind="ipc", config=LinkConfig(ipc_folder=ipc_folder)) as link,
        open_node("asker", link) as node,
        DirectoryClient(link, directory_address) as directory,
        trio.open_nursery() as nursery,
    ):
        answers = await node.spawn(AttemptsActor, attempts, name=ATTEMPTS)
        nursery.start_soon(follow, directory, membership.apply)
        backend = ClusterBackend(
            ServedModel("one", ByteTokenizer(), 1 << 20),
            node,
            link,
            directory,
            membership,
            attempts,
            answers,
            most_running=64,
            patience=60.0,
            registry=CollectorRegistry(),
            by_prefix=by_prefix,
        )
        yield Asker(backend, membership)
        nursery.cancel_scope.cancel()

"""SendingEngine: the half of vLLM's weight transfer that runs in each rank of a training.

The thread that trains; updates run on an event loop in a thread of their own. Rank 0 serves the store where everybody
meets, and calls the engines by vLLM's client.
"""

from __future__ import annotations

import atexit
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch.distributed as dist

from asyncfabric.errors import BrokenError
from asyncfabric.integrations.rails_variable import config_from
from asyncfabric.integrations.vllm_weights.calling_join import CallingJoin, text_of
from asyncfabric.integrations.vllm_weights.source import HeldWeights
from asyncfabric.integrations.vllm_weights.versions import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    named_to_base,
)
from asyncfabric.weights.blocking import BlockingSender, open_sender
from asyncfabric.weights.sessions.stores import connect_store, serve_store


@dataclass
class TrainerInit(TrainerInitInfo):
    """What a rank of a training needs.

    Attributes:
        rank: of this process in the training; rank 0 calls the engines.
        ranks: of the training.
        host: of rank 0, as engines and ranks reach it.
        port: of the store that rank 0 serves there; 0 takes a free one, which the other ranks learn by
            torch.distributed.
        deadline_s: how long an engine may take to have a version that was decided.
        shadow: where versions arrive beside an engine's layers: in "host" memory, or on its "device", which has to have
            room for two more copies of the weights, and takes them from there in milliseconds.
    """

    backend: ClassVar[str] = "asyncfabric"

    ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    deadline_s: float = 60.0
    shadow: str = "host"


class SendingEngine(TrainerWeightTransferEngine):
    """The backend "asyncfabric" of one rank of a training; made by `trainer_init`.

    Attributes:
        version: the last one that was published, 0 for none.
    """

    init_info_cls = TrainerInit

    def __init__(self, named: dict[str, Any], held: HeldWeights, deadline_s: float) -> None:
        """Not for users: `trainer_init`."""
        super().__init__(**named)
        self.version: int = 0
        self._held = held
        self._deadline_s = deadline_s
        self._stack = ExitStack()
        self._sender: BlockingSender | None = None

    @classmethod
    def trainer_init(
        cls, config: Any = None, init_info: Any = None, *, client: VLLMWeightSyncClient, source: Any = None
    ) -> Self:
        """Bring a training and its engines together; every rank calls it, and it returns when all have a plan.

        Args:
            config: of vLLM 0.26; 0.33 has `init_info` in its place.
            init_info: a `TrainerInit`.
            client: calls the engines; used at rank 0 alone.
            source: the weights: vLLM's `ModuleSource`, whose shards are sent as they lie, or another source of vLLM, of
                which each rank keeps a copy of its part.

        Raises:
            TypeError: no `TrainerInit`, or no source.
            ValueError: the parameters do not go into the engine's layers; the text names the tensor.
            Exception: whatever the client raised at rank 0; other ranks raise a ValueError with its text.
        """
        info = config if init_info is None else init_info
        if not isinstance(info, TrainerInit):
            raise TypeError(f"trainer_init() takes a TrainerInit of asyncfabric, got {type(info).__name__}")
        if not 0 <= info.rank < info.ranks:
            raise ValueError(f"rank must be in 0..{info.ranks - 1}, got {info.rank}")
        held = HeldWeights(source, info.rank, info.ranks)
        engine = cls(named_to_base(config, source, client, info.rank), held, info.deadline_s)
        engine._open(info)
        return engine

    @property
    def update_info(self) -> dict[str, Any]:
        """What `update_weights` of the engines needs to bring the last version into their layers."""
        return {"version": self.version, "deadline_s": self._deadline_s}

    def publish(self, pairs: Any = None) -> None:
        """Bring the weights, as they are now, beside those of every engine, which go on generating meanwhile.

        Every rank calls it, and it returns when the version is decided; then the weights may change again.

        Args:
            pairs: names and tensors as the source yields them; None asks the source.

        Raises:
            RuntimeError: after `shutdown`.
            BrokenError: the version was aborted; engines keep what they have. The next call is a later one.
            ValueError: the source yields other tensors than at first.
        """
        if self._sender is None:
            raise RuntimeError("this training has left its engines: shutdown() was called")
        self.version += 1
        self._held.renew(pairs)
        self._sender.publish(self.version)

    def send_weights(self) -> None:
        """Bring the weights, as they are now, into the layers of every engine; every rank calls it.

        Rank 0 returns when the engines have them, the other ranks when theirs are sent.

        Raises:
            RuntimeError, BrokenError, ValueError: as `publish`; no engine was called then.
            Exception: whatever the client raised at rank 0, as when an engine did not get the version in time.
        """
        self.publish()
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights(self.update_info)
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the engines, which go on with the weights that they have; again does nothing."""
        self._sender = None
        self._stack.pop_all().close()
        atexit.unregister(self.shutdown)

    def _open(self, info: TrainerInit) -> None:
        store, port = _meeting(info)
        join = CallingJoin(store)
        call: Future[None] | None = None
        with ExitStack() as opening:
            if info.rank == 0:
                caller = opening.enter_context(ThreadPoolExecutor(1, "engines join"))
                where = {"host": info.host, "port": port, "shadow": info.shadow}
                call = caller.submit(self.client.init_weight_transfer_engine, where)
                call.add_done_callback(partial(_end_if_failed, join))
            try:
                self._sender = opening.enter_context(
                    open_sender(
                        self._held.tensors,
                        join,
                        rank=info.rank,
                        ranks=info.ranks,
                        parts=self._held.parts,
                        config=config_from(os.environ),
                    )
                )
                if call is not None:
                    call.result()
            except BaseException as error:
                refused = call.exception() if call is not None and call.done() else None
                cause = refused if refused is not None and text_of(refused) in str(error) else error
                with suppress(BrokenError):
                    join.end(cause)
                raise cause from None
            self._stack = opening.pop_all()
        atexit.register(self.shutdown)  # before the interpreter takes the threads apart


def _end_if_failed(join: CallingJoin, call: Future[None]) -> None:
    error = call.exception()
    if error is not None:
        with suppress(BrokenError):
            join.end(error)


def _meeting(info: TrainerInit) -> tuple[Any, int]:
    """Return the store where everybody meets, and its port; rank 0 serves it."""
    if not info.port and info.ranks > 1 and not dist.is_initialized():
        raise ValueError("port 0 with several ranks needs torch.distributed to be initialised; or give a port")
    if info.rank:
        port = info.port or _of_rank_0(0)
        return connect_store(info.host, port, info.deadline_s), port
    store, port = serve_store(info.host, info.port, info.deadline_s)
    if not info.port and info.ranks > 1:
        _of_rank_0(port)
    return store, port


def _of_rank_0(port: int) -> int:
    ports = [port]
    dist.broadcast_object_list(ports, src=0)
    return ports[0]

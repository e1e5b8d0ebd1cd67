"""Kernels: the text that the package carries, compiled by the driver, and the structs that they are launched with.

Any thread. The structs are those of native/cuda/moe.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64
from importlib import resources
from typing import ClassVar, Literal

import torch

from asyncfabric._gpu import Driver, Function, Module
from asyncfabric.moe.gpu.handle import CudaMoeHandle
from asyncfabric.moe.gpu.layout import (
    BACK_WARPS,
    MAX_RANKS,
    RECEIVE_WARPS,
    SEND_WARPS,
    NvlinkLayout,
)

SEND, RECEIVE = 1, 2
AS_THEY_ARE, TO_FP8, POWERS_OF_TWO = 0, 1, 2
"""How tokens are cast on their way; the last: to fp8 with scales that are powers of two."""
KINDS = 3
"""Of arrivals by way of a proxy: routes and private rows, the rest of the rows, sums."""
STATE_WORDS = 8 + MAX_RANKS
BETWEEN_THREADS = 256
WAITS = {1: "its routes", 2: "a token of it", 3: "sums from it", 4: "its end of the step", 5: "its weights"}


class ExchangeWords(ctypes.Structure):
    """moe::Exchange: the shape, and where everything is."""

    _fields_: ClassVar = [
        ("outbox", c_uint64 * MAX_RANKS),
        ("inbox", c_uint64 * MAX_RANKS),
        ("verdict_out", c_uint64 * MAX_RANKS),
        ("verdict_in", c_uint64 * MAX_RANKS),
        *((name, c_uint64) for name in ("state", "broken", "missing", "deadline_ns", "turn_bytes")),
        *((name, c_uint64) for name in ("head", "record_words", "counts", "pairs", "token_words", "slots")),
        *((name, c_uint64) for name in ("head_word", "back_words", "back", "late_weights", "arrivals")),
        ("reported", c_uint64 * 2),
        ("verdict_sent", c_uint64 * 2),
        ("notes", c_uint64),
        *((name, c_uint32) for name in ("rank", "ranks", "present", "proxied", "experts", "top_k", "max_tokens")),
        *((name, c_uint32) for name in ("in_flight", "alignment", "row_bytes", "scales", "slot_bytes")),
        *((name, c_uint32) for name in ("back_row_bytes", "parts", "stage_bytes", "most_experts", "routers")),
        *((name, c_uint32) for name in ("private_tokens", "first_rank", "rank_stride", "slot_rows")),
    ]


class DispatchWords(ctypes.Structure):
    """moe::Dispatch: what one dispatch reads and writes here."""

    _fields_: ClassVar = [
        *((name, c_uint64) for name in ("x", "indices", "weights", "given_scales", "count", "rows", "row_scales")),
        *((name, c_uint64) for name in ("tokens_per_expert", "offsets", "source_ranks", "source_tokens")),
        *((name, c_uint64) for name in ("source_choices", "pairs", "reached", "counts", "places", "ranges", "waited")),
        *((name, c_uint32) for name in ("tokens", "wide_indices", "roles", "cast")),
    ]


class CombineWords(ctypes.Structure):
    """moe::Combine: what one combine reads and writes here."""

    _fields_: ClassVar = [
        *((name, c_uint64) for name in ("expert_rows", "y", "pairs", "reached", "counts", "places")),
        *((name, c_uint64) for name in ("weights", "waited")),
        *((name, c_uint32) for name in ("roles", "unused")),
    ]


class GateWords(ctypes.Structure):
    """moe::Gate: which halves it stands between."""

    _fields_: ClassVar = [("back", c_uint32), ("roles", c_uint32)]


class NodeWords(ctypes.Structure):
    """moe::NodeStep: what lies between the two lanes of a step by the nodes."""

    _fields_: ClassVar = [
        *(
            (name, c_uint64)
            for name in ("indices", "weights", "given_scales", "count", "chosen", "words", "came", "rows")
        ),
        *((name, c_uint64) for name in ("here", "here_weights", "here_words", "taken", "end", "row_scales")),
        *((name, c_uint64) for name in ("source_ranks", "source_tokens")),
        *((name, c_uint32) for name in ("tokens", "wide_indices", "experts", "ranks", "node_size", "rank")),
        *(
            (name, c_uint32)
            for name in ("max_tokens", "top_k", "scale_words", "first_expert", "node_experts", "unused")
        ),
    ]


def dispatch_words(handle: CudaMoeHandle, roles: int) -> DispatchWords:
    """Return what a dispatch of a step is launched with, or a half of it."""
    x, indices, weights, scales, count = handle.given
    assert x is not None and indices is not None and weights is not None
    output = handle.output
    return DispatchWords(
        x=x.data_ptr(),
        indices=indices.data_ptr(),
        weights=weights.data_ptr(),
        given_scales=scales.data_ptr() if scales is not None else 0,
        count=count.data_ptr() if count is not None else 0,
        rows=output.rows.data_ptr(),
        row_scales=output.scales.data_ptr() if output.scales is not None else 0,
        tokens_per_expert=output.tokens_per_expert.data_ptr(),
        offsets=output.offsets.data_ptr(),
        source_ranks=output.source_ranks.data_ptr(),
        source_tokens=output.source_tokens.data_ptr(),
        source_choices=output.source_choices.data_ptr(),
        pairs=output.pairs.data_ptr(),
        reached=output.reached.data_ptr(),
        counts=output.counts.data_ptr(),
        places=output.places.data_ptr(),
        ranges=output.ranges.data_ptr() if output.ranges is not None else 0,
        waited=handle.waited.data_ptr() if handle.waited is not None else 0,
        tokens=handle.tokens,
        wide_indices=indices.dtype == torch.int64,
        roles=roles,
        cast=handle.cast,
    )


def combine_words(handle: CudaMoeHandle, y: torch.Tensor, roles: int) -> CombineWords:
    """Return what a combine of a step is launched with, or a half of it."""
    assert handle.expert_rows is not None
    output = handle.output
    return CombineWords(
        expert_rows=handle.expert_rows.data_ptr(),
        y=y.data_ptr(),
        pairs=output.pairs.data_ptr(),
        reached=output.reached.data_ptr(),
        counts=output.counts.data_ptr(),
        places=output.places.data_ptr(),
        weights=handle.late_weights.data_ptr() if handle.late_weights is not None else 0,
        waited=handle.waited.data_ptr() if handle.waited is not None else 0,
        roles=roles,
    )


def kernel_text() -> bytes:
    """Return the kernels as PTX."""
    return resources.files("asyncfabric.moe.gpu").joinpath("_generated/kernels.ptx").read_bytes()


class Kernels:
    """The kernels of one device, for one shape."""

    def __init__(self, driver: Driver, layout: NvlinkLayout, device: torch.device, blocks: int) -> None:
        """Compile them for a device; `blocks` of each launch.

        Raises:
            DeviceError: the driver does not compile them, or the device has too little shared memory.
        """
        self._device = device
        self._blocks = blocks
        with torch.cuda.device(device):
            self._module = Module(driver, kernel_text())
            self._dispatch = self._function("moe_dispatch", layout.dispatch_shared_bytes)
            dtype, shared_bytes = layout.config.out_dtype, layout.combine_shared_bytes
            self._combine = self._function(f"moe_combine_{dtype}", shared_bytes)
            self._weigh = self._function(f"moe_weigh_{dtype}", shared_bytes) if layout.slot_rows else None
            self._gate = self._function("moe_gate", 0)
            self._between = {name: self._function(f"moe_{name}", 0) for name in ("spread", "unpack", "trace")}

    def dispatch(self, exchange: ExchangeWords, words: DispatchWords, stream: int) -> None:
        """Launch a dispatch, or a half of it."""
        threads = (SEND_WARPS + RECEIVE_WARPS) * 32
        self._step(self._dispatch, threads, GateWords(0, words.roles), stream, exchange, words)

    def combine(self, exchange: ExchangeWords, words: CombineWords, stream: int) -> None:
        """Launch a combine, or a half of it; one that is given weights, where there are any."""
        function = self._weigh if words.weights and self._weigh else self._combine
        self._step(function, 2 * BACK_WARPS * 32, GateWords(1, words.roles), stream, exchange, words)

    def between(self, name: Literal["spread", "unpack", "trace"], words: NodeWords, stream: int) -> None:
        """Launch what goes before, between or after the lanes of a step by the nodes; waits for no other rank."""
        self._launch(self._between[name], self._blocks, BETWEEN_THREADS, stream, words)

    def close(self) -> None:
        """Unload; none of them may run any more."""
        with torch.cuda.device(self._device):
            self._module.unload()

    def _function(self, name: str, shared_bytes: int) -> Function:
        found = self._module.function(name)
        # The same share for all kernels: a multiprocessor that has to change it waits until it is empty.
        found.reserve_shared(shared_bytes, 100)
        return found

    def _step(
        self,
        function: Function,
        threads: int,
        gate: GateWords,
        stream: int,
        exchange: ExchangeWords,
        words: DispatchWords | CombineWords,
    ) -> None:
        """One launch; or, where there are ranks behind a proxy, sending, the gate, receiving."""
        if not exchange.proxied:
            self._launch(function, self._blocks, threads, stream, exchange, words)
            return
        roles = words.roles
        if roles & SEND:
            words.roles = SEND
            self._launch(function, self._blocks, threads, stream, exchange, words)
        self._launch(self._gate, 1, 32, stream, exchange, gate)
        if roles & RECEIVE:
            words.roles = RECEIVE
            self._launch(function, self._blocks, threads, stream, exchange, words)

    def _launch(
        self,
        function: Function,
        blocks: int,
        threads: int,
        stream: int,
        *words: ctypes.Structure,
    ) -> None:
        with torch.cuda.device(self._device):  # the default stream is that of the current device
            function.launch((blocks, 1), threads, stream, words)

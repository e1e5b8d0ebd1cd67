"""Prefill on a GPU: the forward pass of a chunk is one CUDA graph, whose kernels count finished layers in a watch word.

The writes of a chunk are submitted before it runs, each after its own value of the word: while the graph runs, the
engine's worker sees a layer's count and sends its pages. No event loop and no Python stands between a layer and its
transfer. A graph belongs to one chunk (first token, last token) and is kept: the block table is copied into it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

import asyncfabric as af
from asyncfabric.bench.gpu_driver import Module, open_driver
from asyncfabric_services.demo.pair.generation import forward
from asyncfabric_services.demo.pair.paged_cache import PairPagedCache

COUNT = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry count(.param .u64 word)
{
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [word];
  membar.sys;
  ld.volatile.global.u64 %rd2, [%rd1];
  add.s64 %rd2, %rd2, 1;
  st.volatile.global.u64 [%rd1], %rd2;
  ret;
}
"""
"""Adds one to a word: what was computed before it in its stream is visible to the host and to copy engines first."""


@dataclass
class _Chunk:
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    table: torch.Tensor
    logits: torch.Tensor


class GpuPrefill:
    """Computes prompts of one model on one GPU. Used by one worker thread at a time."""

    def __init__(self, model: Any, pool: torch.Tensor, word: af.WatchWord) -> None:
        """Load the counting kernel; the word counts layers from now on."""
        self._model = model
        self._pool = pool
        self._word = ctypes.c_uint64(word.address)
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        with torch.cuda.device(model.device):
            torch.cuda.synchronize()  # the context is current
            self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.graph_pool_handle()
            self._count = Module(open_driver(), COUNT).function("count")

    @property
    def graphs(self) -> int:
        """Return how many graphs are kept."""
        return len(self._chunks)

    def prepare(self, start: int, end: int) -> None:
        """Capture the graph of tokens start..end, unless it is there; nothing is computed."""
        if (start, end) in self._chunks:
            return
        device, page_tokens = self._model.device, self._pool.shape[4]
        with torch.cuda.device(device), torch.inference_mode():
            ids = torch.zeros((1, end - start), dtype=torch.int64, device=device)
            cache = PairPagedCache(self._pool, [0] * -(-end // page_tokens), length=start, on_written=self._bump)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # The engine's worker uses the driver beside us: only this thread is bound by the capture.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                logits = forward(self._model, ids, cache)
        self._chunks[start, end] = _Chunk(graph, ids, cache.paged_layers[0].table, logits)

    def run(self, tokens: list[int], start: int, pages: list[int]) -> torch.Tensor:
        """Replay the graph of a chunk that was prepared, and wait for it; return the last logits on the host."""
        chunk = self._chunks[start, start + len(tokens)]
        with torch.cuda.device(self._model.device), torch.cuda.stream(self._stream), torch.inference_mode():
            chunk.ids.copy_(torch.tensor([tokens], dtype=torch.int64))
            chunk.table.copy_(torch.tensor(pages[: chunk.table.numel()], dtype=torch.int64))
            chunk.graph.replay()
            return chunk.logits.cpu()

    def _bump(self, _layer: int, _start: int, _end: int) -> None:
        self._count.launch((1, 1), 1, torch.cuda.current_stream().cuda_stream, (self._word,))

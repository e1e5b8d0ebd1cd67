"""Between: GPU memory of one turn between the two lanes of a step by the nodes, and the steps of both lanes in it.

Runs on the thread that calls the exchange. The kernels that fill it: native/cuda/moe/nodes.cuh.
"""

from __future__ import annotations

import torch

from asyncfabric.moe.gpu.handle import CudaMoeHandle, Output, handle_of
from asyncfabric.moe.gpu.lanes import NodeLanes
from asyncfabric.moe.gpu.launch import NodeWords


class Between:
    """Memory of one turn.

    Attributes:
        sums: of the node for each row that crossed: what goes back across.
        scales: of the rows of this rank's experts; None where tokens have none.
    """

    def __init__(self, lanes: NodeLanes, rank: int, across: Output, inside: Output) -> None:
        """Allocate it, for the turn that has these outputs."""
        config, device = lanes.config, across.counts.device
        tokens, rows = config.max_tokens, lanes.inside.config.max_tokens
        experts = lanes.node_experts(rank // config.node_size)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self._outputs = across, inside
        self._chosen, self._ones = ints(tokens, config.nodes), floats(tokens, config.nodes) + 1.0
        self._words = floats(tokens, lanes.across.words)
        self._here, self._here_weights = ints(rows, config.top_k), floats(rows, config.top_k)
        self._here_words = floats(rows, lanes.inside.words)
        self.sums: torch.Tensor = torch.zeros(rows, config.hidden, dtype=config.out_torch, device=device)
        found = lanes.inside.row_capacity(rank % config.node_size)
        self.scales: torch.Tensor | None = floats(found, config.scales) if config.scales else None
        assert across.scales is not None and inside.scales is not None
        self._fixed = {
            "chosen": self._chosen,
            "words": self._words,
            "came": across.scales,
            "rows": across.offsets[-1:],
            "here": self._here,
            "here_weights": self._here_weights,
            "here_words": self._here_words,
            "taken": inside.scales,
            "end": inside.offsets[-1:],
            "source_ranks": inside.source_ranks,
            "source_tokens": inside.source_tokens,
        }
        self._shape = {
            "experts": config.num_experts,
            "ranks": config.ranks,
            "node_size": config.node_size,
            "rank": rank,
            "max_tokens": tokens,
            "top_k": config.top_k,
            "scale_words": config.scales,
            "first_expert": experts.start,
            "node_experts": len(experts),
        }

    def begin(self, handle: CudaMoeHandle) -> None:
        """Give a step, whose tensors are known, its steps in both lanes."""
        x, _, _, _, count = handle.given
        assert x is not None
        across_output, inside_output = self._outputs
        across = handle_of(handle.number, handle.epoch, handle.tokens, across_output)
        across.given = (x, self._chosen[: handle.tokens], self._ones, self._words, count)
        inside = handle_of(handle.number, handle.epoch, len(self._here), inside_output)
        inside.given = (
            across_output.rows,
            self._here,
            self._here_weights,
            self._here_words,
            across_output.offsets[-1:],
        )
        handle.lanes = (across, inside)
        handle.scales = self.scales

    def words(self, handle: CudaMoeHandle) -> NodeWords:
        """Return what the kernels between the lanes are launched with."""
        _, indices, weights, scales, count = handle.given
        assert indices is not None and weights is not None
        return NodeWords(
            indices=indices.data_ptr(),
            weights=weights.data_ptr(),
            given_scales=scales.data_ptr() if scales is not None else 0,
            count=count.data_ptr() if count is not None else 0,
            row_scales=self.scales.data_ptr() if self.scales is not None else 0,
            tokens=handle.tokens,
            wide_indices=indices.dtype == torch.int64,
            **{name: tensor.data_ptr() for name, tensor in self._fixed.items()},
            **self._shape,
        )

"""ExpertShard: the experts of one rank as a torch module, over rows that an exchange has grouped by expert.

Pure computation, on the thread that calls it. Knows the packed weights of transformers 5 and nothing of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

from asyncfabric.moe import MoeHandle, TrainingStep
from asyncfabric.moe.fp8 import from_fp8


class ExpertShard(torch.nn.Module):
    """Gated experts: down(act(gate(x)) * up(x)), for some consecutive experts of a layer.

    Attributes:
        gate_up_proj: shape [experts, 2 * intermediate, hidden].
        down_proj: shape [experts, hidden, intermediate].
        tile_rows: rows of one product; 0: as many as there are. With a fixed number the bits of a row do not depend on
            the rows beside it: matrix libraries choose kernels, and with them the order of sums, by the number of rows.
    """

    def __init__(
        self,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        tile_rows: int = 0,
    ) -> None:
        super().__init__()
        if tile_rows < 0:
            raise ValueError(f"tile_rows must be at least 0, got {tile_rows}")
        # Copies: a view would keep the weights of all experts alive.
        self.gate_up_proj: torch.nn.Parameter = torch.nn.Parameter(gate_up_proj.detach().clone(), requires_grad=False)
        self.down_proj: torch.nn.Parameter = torch.nn.Parameter(down_proj.detach().clone(), requires_grad=False)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = activation
        self.tile_rows: int = tile_rows

    def forward(self, handle: MoeHandle | TrainingStep) -> torch.Tensor:
        """Return the outputs for the rows of a received step, shape [rows, hidden]; rows of padding are zeros.

        Rows in fp8 are scaled back to the dtype of the weights first.
        """
        assert handle.rows is not None and handle.offsets is not None and handle.tokens_per_expert is not None
        outputs = torch.zeros(handle.rows.shape, dtype=self.down_proj.dtype)
        for expert, (low, count) in enumerate(
            zip(handle.offsets.tolist()[:-1], handle.tokens_per_expert.tolist(), strict=True)
        ):
            if count:
                rows = handle.rows[low : low + count]
                if handle.scales is not None:
                    rows = from_fp8(rows, handle.scales[low : low + count], self.down_proj.dtype)
                outputs[low : low + count] = self.one(expert, rows)
        return outputs

    def one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Return what the expert with this place in the shard makes of rows, shape [rows, hidden]."""
        tile, count = self.tile_rows, rows.shape[0]
        if not tile:
            return self._tile(expert, rows)
        tiles = torch.split(pad(rows, (0, 0, 0, -count % tile)), tile)
        return torch.cat([self._tile(expert, each) for each in tiles])[:count]

    def _tile(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return linear(self.activation(gate) * up, self.down_proj[expert])

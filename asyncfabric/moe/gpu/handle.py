"""CudaMoeHandle: one step among GPUs, from its dispatch to its combine; and the memory that steps hand out in turns.

What users read; no logic beyond allocation. Runs on the thread that calls the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from asyncfabric.moe.gpu.layout import NvlinkLayout


@dataclass(slots=True, eq=False)
class Output:
    """Memory of one turn: what a dispatch writes for this rank. All on its GPU."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    source_ranks: torch.Tensor
    source_tokens: torch.Tensor
    source_choices: torch.Tensor
    pairs: torch.Tensor
    reached: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor
    ranges: torch.Tensor | None = None
    """Of rows in slots, shape [experts, ranks]: where the rows of a rank begin, << 32, and how many there are."""


def output_of(layout: NvlinkLayout, rank: int, device: torch.device) -> Output:
    """Allocate the memory of one turn; that of rows in slots is each step's own, see `with_slots`."""
    config = layout.config
    capacity, experts = layout.row_capacity(rank), len(config.experts_of(rank))
    rows = 0 if layout.slot_rows else capacity

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return Output(
        rows=torch.zeros(rows, layout.row_bytes, dtype=torch.uint8, device=device).view(config.in_torch),
        scales=torch.zeros(rows, layout.words, dtype=torch.float32, device=device) if layout.words else None,
        tokens_per_expert=ints(experts),
        offsets=ints(experts + 1),
        source_ranks=ints(capacity),
        source_tokens=ints(capacity),
        source_choices=ints(capacity),
        pairs=ints(config.ranks, config.max_tokens, config.top_k, 2),
        reached=ints(config.max_tokens),
        counts=ints(config.ranks),
        places=ints(2, config.ranks, config.max_tokens),
    )


def with_slots(layout: NvlinkLayout, rank: int, turn: Output) -> Output:
    """Return the memory of a turn with what the user of a step gets from it as tensors of their own.

    Rows behind the last of an expert are anything. Scales have the shape [experts, scales, rows of an expert].
    """
    config, device = layout.config, turn.counts.device
    experts, each = len(config.experts_of(rank)), layout.slot_rows

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return replace(
        turn,
        rows=torch.empty(experts * each, config.hidden, dtype=config.in_torch, device=device),
        scales=torch.empty(experts, config.scales, each, device=device, dtype=torch.float32) if config.scales else None,
        tokens_per_expert=ints(experts),
        source_tokens=ints(experts * each),
        ranges=torch.empty(experts, config.ranks, dtype=torch.int64, device=device),
    )


@dataclass(slots=True, eq=False)
class CudaMoeHandle:
    """One step. The tensors are the exchange's: they are written again `config.in_flight` steps later.

    Their contents are there for work on the stream that dispatched. How many rows there are is known to the GPU only:
    `rows` has room for the most that can come, and `offsets[-1]` is how many count.

    Attributes:
        number: of the step.
        tokens: rows of x; where a count was given, the most there can be.
        rows: shape [most rows, hidden], grouped by expert in the order of experts; within an expert in the order of
            ranks, by the nodes in that of places in a node and then of nodes, then of tokens, then of choices. Rows of
            padding are zeros, rows behind the last are anything.
        scales: the scales of each row, shape [most rows, scales]; None where tokens have none.
        tokens_per_expert: rows of each expert of this rank, without padding, int32.
        offsets: row at which each expert begins; the last entry is the number of rows. int32.
        source_ranks: for each row the rank that it came from, -1 for padding. int32.
        source_tokens: for each row which token of that rank it is, -1 for padding. int32.
        source_choices: for each row which of the token's top-k choices it is, -1 for padding. int32.
        filled: rows that outputs are given for, where the host knows that no more count; None: as many as `rows` has.
        late_weights: given to a combine of rows in slots, shape [tokens, top_k].
        waited: int64 [ranks] on the GPU: a kernel adds the nanoseconds that it waits for each rank; None: not wanted.
        cast: how tokens are cast before they are sent, by the numbers of `launch`.
    """

    number: int
    epoch: int
    tokens: int
    output: Output
    rows: torch.Tensor
    scales: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    source_ranks: torch.Tensor
    source_tokens: torch.Tensor
    source_choices: torch.Tensor
    given: tuple[torch.Tensor | None, ...] = field(default=())
    expert_rows: torch.Tensor | None = None
    received: bool = False
    returned: bool = False
    combined: bool = False
    lanes: tuple[CudaMoeHandle, ...] = field(default=())
    filled: int | None = None
    late_weights: torch.Tensor | None = None
    waited: torch.Tensor | None = None
    cast: int = 0


def handle_of(number: int, epoch: int, tokens: int, output: Output) -> CudaMoeHandle:
    """Return the handle of a step that writes to `output`."""
    return CudaMoeHandle(
        number=number,
        epoch=epoch,
        tokens=tokens,
        output=output,
        rows=output.rows,
        scales=output.scales,
        tokens_per_expert=output.tokens_per_expert,
        offsets=output.offsets,
        source_ranks=output.source_ranks,
        source_tokens=output.source_tokens,
        source_choices=output.source_choices,
    )

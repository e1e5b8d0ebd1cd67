"""CudaSlotExchange: an exchange among GPUs whose experts have slots for rows, and whose weights are given to combine.

What engines that capture graphs expect (DeepEP's low-latency calls): the rows of an expert begin at a fixed place, in
tensors that are the step's own. Runs on the thread that calls it, on the current stream, as CudaMoeExchange does.
"""

from __future__ import annotations

from functools import cached_property

import torch

from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.handle import CudaMoeHandle, Output, with_slots
from asyncfabric.moe.gpu.launch import AS_THEY_ARE, POWERS_OF_TWO, RECEIVE, SEND, TO_FP8
from asyncfabric.moe.gpu.tensors import checked_weights


class CudaSlotExchange(CudaMoeExchange):
    """An open exchange with slots; made by `async with open_moe_slots(...)`.

    An expert has `ranks * max_tokens` slots: a token names it once. Rows of a token that names it more often have a
    slot while there are any; the others are left out.
    """

    def place(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        scales: torch.Tensor | None = None,
        *,
        power_of_two: bool = False,
        waited: torch.Tensor | None = None,
        halves: int = SEND | RECEIVE,
    ) -> CudaMoeHandle:
        """Send tokens to the slots of their experts; a step, or the first half of one.

        Args:
            x: as `dispatch` takes it. Where the config has float8_e4m3fn with a scale for 128 elements, also in
                bfloat16: then it is cast on its way, to the bits that `moe.fp8.to_fp8` makes.
            indices: as `dispatch` takes them.
            scales: as `dispatch` takes them; none where tokens are cast on their way.
            power_of_two: of tokens that are cast on their way: round scales up to powers of two.
            waited: int64 [ranks] on the GPU, to which the nanoseconds of waiting for each rank's routes are added.
            halves: SEND, then `dispatch_recv` does the other half; or SEND | RECEIVE.

        Raises:
            TypeError, ValueError, BusyError, MissingRankError: as `dispatch` does.
        """
        cast = AS_THEY_ARE
        if self._site.layout.casts and x.dtype == torch.bfloat16:
            cast = POWERS_OF_TWO if power_of_two else TO_FP8
        handle = self._begin(x, indices, self._ones[: x.shape[0]], scales, None, cast)
        handle.waited = waited
        return self._dispatch(halves, handle)

    def weigh(
        self,
        expert_rows: torch.Tensor,
        handle: CudaMoeHandle,
        weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        waited: torch.Tensor | None = None,
        halves: int = SEND | RECEIVE,
    ) -> torch.Tensor:
        """Send the outputs of experts back and return their weighted sums; or the first half of it.

        The weights go to the ranks of the experts first, which add up as `combine` does.

        Args:
            expert_rows: in the slots of the step's rows, of config.out_dtype.
            handle: of the step.
            weights: shape [tokens, top_k], float32; they must stay as they are until the work has run.
            out: where the sums go; None: a new tensor.
            waited: int64 [ranks] on the GPU, to which the nanoseconds of waiting for each rank's weights are added.
            halves: SEND, then `combine_recv(handle, out=...)` does the other half, into what is returned here.

        Raises:
            TypeError, ValueError, MissingRankError: as `combine` does.
        """
        checked_weights(self.config, self.device, weights, handle.tokens)
        y = self._prepare(expert_rows, handle, out)
        # Of a rank without tokens too: by their address it is known that weights are given late.
        handle.late_weights, handle.waited = weights if handle.tokens else self._ones, waited
        self._combine(halves, handle, y)
        if halves & RECEIVE:
            self._end(handle)
        return y

    def _output(self, turn: Output) -> Output:
        return with_slots(self._site.layout, self.rank, turn)

    @cached_property
    def _ones(self) -> torch.Tensor:
        return torch.ones(self.config.max_tokens, self.config.top_k, dtype=torch.float32, device=self.device)

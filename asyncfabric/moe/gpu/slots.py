"""CudaSlotExchange: an exchange among GPUs whose experts have slots for rows, and whose weights are given to combine.

What engines that capture graphs expect (DeepEP's low-latency calls): the rows of an expert begin at a fixed place, in
tensors that are the step's own. Runs on the thread that calls it, on the current stream, as CudaMoeExchange does.
"""

from __future__ import annotations

from functools import cached_property

import torch

from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.handle import CudaMoeHandle, Output, with_slots
from asyncfabric.moe.gpu.launch import RECEIVE, SEND, QuantizeWords
from asyncfabric.moe.gpu.tensors import checked_weights

FP8_BLOCK = 128


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
        waited: torch.Tensor | None = None,
        halves: int = SEND | RECEIVE,
    ) -> CudaMoeHandle:
        """Send tokens to the slots of their experts; a step, or the first half of one.

        Args:
            x: as `dispatch` takes it.
            indices: as `dispatch` takes them.
            scales: as `dispatch` takes them.
            waited: int64 [ranks] on the GPU, to which the nanoseconds of waiting for each rank's routes are added.
            halves: SEND, then `dispatch_recv` does the other half; or SEND | RECEIVE.

        Raises:
            TypeError, ValueError, BusyError, MissingRankError: as `dispatch` does.
        """
        handle = self._begin(x, indices, self._ones[: x.shape[0]], scales, None)
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
        # Of a rank without tokens too: the kernel knows by their address that weights are given late.
        handle.late_weights, handle.waited = weights if handle.tokens else self._ones, waited
        self._combine(halves, handle, y)
        if halves & RECEIVE:
            self._end(handle)
        return y

    def quantize(self, x: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (elements in float8_e4m3fn, float32 scales of 128 elements each), as `moe.fp8.to_fp8` does on a CPU.

        Args:
            x: shape [tokens, hidden] of bfloat16 on this rank's GPU, contiguous; hidden is a multiple of 128.
            power_of_two: round scales up to powers of two.

        Raises:
            TypeError, ValueError: a tensor that does not fit.
        """
        session = self._opened()
        if x.dtype != torch.bfloat16:
            raise TypeError(f"tokens are made fp8 from torch.bfloat16, got {x.dtype}")
        if x.dim() != 2 or x.shape[1] % FP8_BLOCK or not x.is_contiguous() or x.device != self.device:
            shape = f"[tokens, a multiple of {FP8_BLOCK}]"
            raise ValueError(f"x must be contiguous {shape} on {self.device}, got {list(x.shape)} on {x.device}")
        made = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(x.shape[0], x.shape[1] // FP8_BLOCK, dtype=torch.float32, device=x.device)
        if scales.numel():
            words = QuantizeWords(x.data_ptr(), made.data_ptr(), scales.data_ptr(), scales.numel(), power_of_two)
            session.kernels.quantize(words, self._stream())
        return made, scales

    def _output(self, turn: Output) -> Output:
        return with_slots(self._site.layout, self.rank, turn)

    @cached_property
    def _ones(self) -> torch.Tensor:
        return torch.ones(self.config.max_tokens, self.config.top_k, dtype=torch.float32, device=self.device)

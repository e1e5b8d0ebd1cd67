"""The loop of one trainer rank: next-token loss on text, AdamW, gradients over all ranks. Blocking.

For a worker thread. Each rank reads other parts of the text. Parameters stay where they are for the life of the
process, so memory that was registered once holds every later version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncfabric.weights.plan.holdings import Holding
from asyncfabric.weights.tensors import holdings, stored
from asyncfabric_services.trainer.parallel import Kind, spread

WINDOW = 64  # bytes of text that one sample has
SAMPLES = 4  # in the batch of one rank


class Training:
    """A model, its optimizer and its text.

    Args:
        model: a causal model of transformers over bytes, equal on all ranks.
        kind, tp: see `parallel.spread`.
        rate: learning rate.
        device: "cpu", or the GPU of this rank; the model is brought there.
    """

    def __init__(self, model: Any, kind: Kind = "fsdp", tp: int = 1, rate: float = 1e-3, device: str = "cpu") -> None:
        model.to(device)
        self.rank: int = dist.get_rank()
        self.steps: int = 0
        self.loss: float = 0.0
        self._parts = spread(model, kind, tp)
        self._seed = self.rank // tp if kind == "tp" else self.rank  # a group computes one batch together
        self._device = device
        self._model = model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        text = "".join(topics[name] for name in sorted(topics))
        self._text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() % model.config.vocab_size

    def step(self) -> None:
        """Train on one batch; all ranks do it at the same time.

        Raises RuntimeError when another rank is gone.
        """
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + self.steps)
        begins = torch.randint(len(self._text) - WINDOW, (SAMPLES,), generator=chance)
        batch = torch.stack([self._text[begin : begin + WINDOW] for begin in begins.tolist()]).to(self._device)
        loss = self._model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps, self.loss = self.steps + 1, float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Return the parameters by name, as this rank holds them."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def holdings(self) -> list[Holding]:
        """Return what this rank holds."""
        return holdings(self.state(), self.rank, self._parts)

    def arrays(self) -> Mapping[str, Any]:
        """Return the memory of what this rank holds, by name; the same in every version."""
        state = self.state()
        return {one.name: _held(state[one.name]) for one in self.holdings()}

    def whole_state(self) -> dict[str, Tensor]:
        """Return the whole state dict on the CPU, as one would save it; all ranks take part, each gets a copy."""
        whole = {}
        for name, tensor in self.state().items():
            if name in self._parts:
                found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(found, tensor)
                whole[name] = torch.cat(found)
            else:
                whole[name] = tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
        return {name: tensor.cpu() for name, tensor in whole.items()}


def _held(tensor: Tensor) -> Any:
    """Return the memory of what a rank holds of a tensor: an array, or a tensor of its GPU."""
    if tensor.device.type == "cpu":
        return stored(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The right answers to compare with: one process with one pool, and the model as transformers runs it, without pages.

The first states token for token what a cluster must answer; the second knows nothing of pages, chunks or row rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncfabric_services.runner.batch import TokenSpan
from asyncfabric_services.runner.model import ModelChoice, load_model
from asyncfabric_services.runner.runner import Runner


class PlainModel:
    """One model twice: over pages of one process, and plain."""

    def __init__(self, choice: ModelChoice, longest: int) -> None:
        torch.set_num_threads(1)
        loaded = load_model(choice, page_tokens=16)
        self._pages = loaded.shape.pages_for(longest)
        memory = torch.zeros(loaded.shape.pool_bytes(self._pages), dtype=torch.uint8)
        self._runner = Runner(loaded, loaded.shape.view(memory, self._pages))
        self._plain = load_model(choice, page_tokens=16).model

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy answer of one process, one request at a time, in chunks of 256 and pages of 16 tokens."""
        table = range(self._pages)
        stated = [int(self._runner.prefill(prompt, table, chunk_tokens=256).numpy().argmax())]
        while len(stated) < count:
            span = TokenSpan([stated[-1]], len(prompt) + len(stated) - 1, table)
            stated.append(int(self._runner.step([span])[0].numpy().argmax()))
        return stated

    def text(self, prompt: str, count: int) -> str:
        """Return the text of the greedy answer."""
        return bytes(self.answer(prompt.encode(), count)).decode(errors="replace")

    @torch.inference_mode()
    def shortfall(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return by how much the plain model likes its favourite better than the answer's token, at the worst place."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        logits = self._plain(input_ids=ids).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())

"""The same model in one process, to compare with. Blocking; for a worker thread."""

from __future__ import annotations

import torch

from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.runner.batch import TokenSpan
from asyncfabric_services.runner.model import ModelChoice, load_model
from asyncfabric_services.runner.runner import Runner


class OneProcess:
    """Prefill and decode without a cluster, one request at a time."""

    def __init__(self, choice: ModelChoice, page_tokens: int, longest: int) -> None:
        """Load the model, with pages for `longest` tokens."""
        self._loaded = load_model(choice, page_tokens=page_tokens)
        shape = self._loaded.shape
        self._pages = shape.pages_for(longest)
        memory = torch.zeros(shape.pool_bytes(self._pages), dtype=torch.uint8)
        self._runner = Runner(self._loaded, shape.view(memory, self._pages))

    def answer(self, ask: LoadRequest) -> str:
        """Return the text of the greedy answer."""
        tokenizer, table = self._loaded.tokenizer, range(self._pages)
        tokens = tokenizer.encode(ask.prompt)
        pieces, text = tokenizer.pieces(), ""
        logits = self._runner.prefill(tokens, table, chunk_tokens=256)
        for _ in range(ask.max_tokens):
            token = int(logits.numpy().argmax())
            if token in self._loaded.end_tokens:
                break
            text += pieces.feed(token)
            logits = self._runner.step([TokenSpan([token], len(tokens), table)])[0]
            tokens.append(token)
        return text + pieces.finish()

"""The runner's model with the layout of its cache. Loaded by both processes on a worker thread, for seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncfabric.kv import KvLayout
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.runner.model import LoadedModel, ModelChoice
from asyncfabric_services.runner.model import load_model as load_runner_model

LOGIT_BYTES = 4  # the context of a stream is the prompt's last logits, float32 [vocabulary]


@dataclass(frozen=True, slots=True)
class PairModel:
    """A model ready to run, with the layout of its cache."""

    inner: LoadedModel
    layout: KvLayout

    @property
    def model(self) -> Any:
        """Return the module of transformers."""
        return self.inner.model

    @property
    def name(self) -> str:
        """Describe the model in a few words."""
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        return (
            f"{type(self.model).__name__}, {self.layout.layers} layers, "
            f"{self.model.config.num_attention_heads} query heads over {self.layout.kv_heads} kv heads, "
            f"{weight_bytes / 1e6:.0f} MB of {self.layout.dtype}"
        )

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens of an answer."""
        pieces = self.inner.tokenizer.pieces()
        return "".join([*map(pieces.feed, tokens), pieces.finish()])


def load_model(settings: DemoSettings, device: str = "cpu") -> PairModel:
    """Load the checkpoint of `settings.model`, or make the random model; ValueError if its cache cannot be paged."""
    torch.set_num_threads(settings.threads)
    path = None if settings.model is None else Path(settings.model)
    choice = ModelChoice(path=path, layers=settings.layers, hidden=settings.hidden, seed=settings.seed)
    loaded = load_runner_model(choice, page_tokens=settings.page_tokens)
    config = loaded.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"the demo pages full attention only; this model has layers of {sorted(kinds)}")
    shape = loaded.shape
    layout = KvLayout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_tokens=shape.page_tokens,
        dtype=shape.dtype,
        context_bytes=config.vocab_size * LOGIT_BYTES,
        model=loaded.weights,
    )
    loaded.model.to(device)
    return PairModel(loaded, layout)

"""The model that both processes run, its tokenizer and the layout of its cache.

Without a checkpoint: a Llama-architecture model of transformers with grouped-query attention and seeded random weights,
and a tokenizer whose tokens are the bytes of the text. The weights are wide enough (see INIT_SCALE) for each
token to depend on the whole prompt: with the usual narrow initialisation greedy decoding repeats one token for ever,
and a comparison of such outputs proves nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncfabric_services.demo.pair.layout import KvLayout
from asyncfabric_services.demo.settings import Settings

QUERY_HEADS, KV_HEADS = 16, 8
BYTE_VOCABULARY = 256
INIT_SCALE = 1.36  # standard deviation times the square root of the width; 0.06 at 512

_generator = threading.Lock()  # torch's generator belongs to the process: two models made at once would share it


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""


class ByteTokenizer:
    """Tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the bytes, with U+FFFD for what is not UTF-8."""
        return bytes(token_ids).decode(errors="replace")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with the layout of its cache."""

    model: Any
    tokenizer: Tokenizer
    layout: KvLayout
    weight_bytes: int
    max_tokens: int

    @property
    def name(self) -> str:
        """Describe the model in a few words."""
        config = self.model.config.get_text_config(decoder=True)
        return (
            f"{type(self.model).__name__}, {self.layout.layers} layers, {config.num_attention_heads} query heads over "
            f"{self.layout.kv_heads} kv heads, {self.weight_bytes / 1e6:.0f} MB of {self.layout.dtype}"
        )


def load_model(settings: Settings, device: str = "cpu") -> LoadedModel:
    """Load the checkpoint of `settings.model`, or make the random model; ValueError if its cache cannot be paged."""
    torch.set_num_threads(settings.threads)
    model: Any
    tokenizer: Tokenizer
    if settings.model is None:
        model, tokenizer = _random_model(settings), ByteTokenizer()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype="auto", local_files_only=True, use_safetensors=True
        )
        checkpoint_tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
        tokenizer = checkpoint_tokenizer
    model.eval()
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"the demo pages full attention only; this model has layers of {sorted(kinds)}")
    layout = KvLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        page_tokens=settings.page_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        vocabulary=config.vocab_size,
        weights=_fingerprint(model),
    )
    model.to(device)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return LoadedModel(model, tokenizer, layout, weight_bytes, config.max_position_embeddings)


def _random_model(settings: Settings) -> Any:
    config = LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=max(8, settings.hidden // KV_HEADS),
        max_position_embeddings=32768,
        initializer_range=INIT_SCALE / settings.hidden**0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with _generator:
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def _fingerprint(model: Any) -> str:
    """Hash a sample of every weight: enough to tell two models, seeds or revisions apart, without reading them all."""
    digest = blake2b(digest_size=8)
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].float().contiguous()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()

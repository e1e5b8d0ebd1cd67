"""The model to run: a local checkpoint, or a small seeded random model when there is none. Blocking; loads for seconds.

The random model is of Llama architecture with grouped-query attention. Its weights are wide enough (INIT_SCALE)
for each token to depend on the whole prompt: with the usual narrow ones greedy decoding repeats one token for
ever, and comparing such answers proves nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncfabric_services.runner.checkpoint import checkpoint_folder
from asyncfabric_services.runner.page_shape import PageShape
from asyncfabric_services.runner.supported import refuse_unsupported
from asyncfabric_services.runner.tokenizer import BYTE_VOCABULARY, ByteTokenizer, CheckpointTokenizer, Tokenizer

INIT_SCALE = 1.36  # standard deviation times the square root of the width

_generator = threading.Lock()  # torch's generator belongs to the process: two models made at once would share it


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model to run.

    Attributes:
        path: folder of a checkpoint with safetensors; None for the random model, which the rest describes.
        layers: layers of the random model.
        hidden: its width, a multiple of 16.
        query_heads: its query heads, a multiple of `kv_heads`.
        kv_heads: its key/value heads.
        max_tokens: the longest prompt and answer together that it takes.
        seed: of its weights.
    """

    path: Path | None = None
    layers: int = 8
    hidden: int = 512
    query_heads: int = 16
    kv_heads: int = 8
    max_tokens: int = 32768
    seed: int = 0


TINY = ModelChoice(layers=3, hidden=64, query_heads=4, kv_heads=2, max_tokens=4096)
"""A model for tests: it answers in milliseconds."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        name: what the router calls it.
        model: the module of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        shape: the form of its pages.
        max_tokens: prompt and answer together.
        end_tokens: tokens that end an answer.
        weights: fingerprint: pages of another model have the right size and the wrong content.
    """

    name: str
    model: Any
    tokenizer: Tokenizer
    shape: PageShape
    max_tokens: int
    end_tokens: frozenset[int]
    weights: str


def load_model(choice: ModelChoice, *, page_tokens: int, name: str | None = None) -> LoadedModel:
    """Load the checkpoint, or make the random model; ValueError for an unsupported one, its weights unread."""
    model: Any
    tokenizer: Tokenizer
    if choice.path is None:
        model, tokenizer = _random_model(choice), ByteTokenizer()
    else:
        disable_progress_bar()  # its bars would be in the log, and it starts a thread for them
        folder = checkpoint_folder(choice.path)
        refuse_unsupported(AutoConfig.from_pretrained(folder, local_files_only=True))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, use_safetensors=True)
        tokenizer = CheckpointTokenizer(AutoTokenizer.from_pretrained(choice.path, local_files_only=True))
    model.eval()
    config = model.config
    shape = PageShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        page_tokens=page_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    ends = model.generation_config.eos_token_id
    return LoadedModel(
        name=name or (choice.path.name if choice.path is not None else "asyncfabric-random"),
        model=model,
        tokenizer=tokenizer,
        shape=shape,
        max_tokens=config.max_position_embeddings,
        end_tokens=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        weights=_fingerprint(model),
    )


def _random_model(choice: ModelChoice) -> Any:
    config = LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=choice.hidden,
        intermediate_size=4 * choice.hidden,
        num_hidden_layers=choice.layers,
        num_attention_heads=choice.query_heads,
        num_key_value_heads=choice.kv_heads,
        head_dim=max(8, choice.hidden // choice.kv_heads),
        max_position_embeddings=choice.max_tokens,
        initializer_range=INIT_SCALE / choice.hidden**0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with _generator:
        torch.manual_seed(choice.seed)
        return LlamaForCausalLM(config)


def _fingerprint(model: Any) -> str:
    """Hash a sample of every weight: enough to distinguish two models, seeds or revisions, without reading them all."""
    digest = blake2b(digest_size=8)
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].float().cpu().contiguous()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()

"""What stands in for a model under vLLM: its configuration, its layers, and arithmetic in place of attention.

Runs in each engine process; imported once by the process that they are forked from. No connector, no scheduling here.
A block holds what a function of (layer, position, token) gives, and the next token is a checksum over all blocks of a
request: text is right exactly if every byte of KvCache is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import host  # chooses the platform before the rest of vLLM is imported
import torch

host.choose()

from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor  # noqa: E402

LAYERS, HEADS, BLOCK_TOKENS, VOCABULARY = 3, 2, 16, 32000
QUERY_HEADS = 8  # of which each rank has some
DTYPE = torch.float32


class Arithmetic(torch.nn.Module):
    """The architecture that the configuration names; never run."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def register() -> None:
    """Make the architecture known to vLLM; also a plugin of engines that run in nodes."""
    ModelRegistry.register_model("ArithmeticForCausalLM", Arithmetic)


register()


class Blocks(AttentionBackend):
    """The layout of a block: (blocks, heads, tokens, key and value)."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class Layer(AttentionLayerBase):
    """A layer as connectors look it up."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Blocks

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None


def configure(
    folder: Path, transfer: dict[str, Any], blocks: int, head_size: int, step_tokens: int, ranks: int = 1
) -> VllmConfig:
    """Return vLLM's configuration of an engine over this model."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "model_type": "llama",
        "architectures": ["ArithmeticForCausalLM"],
        "hidden_size": HEADS * head_size,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "head_dim": head_size,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described))
    cache = CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.5, enable_prefix_caching=False)
    cache.num_gpu_blocks = blocks
    if "kv_cache_layout" in CacheConfig.__dataclass_fields__:  # 0.33: the engine core chooses it before workers start
        cache.kv_cache_layout = "LBHNC"
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096, enforce_eager=True
    )
    scheduling = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=step_tokens,
        max_model_len=4096,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduling,
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="external_launcher" if ranks > 1 else None
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(kv_buffer_device="cpu", kv_load_failure_policy="recompute", **transfer),
    )
    config.compilation_config.static_forward_context.update({name: Layer() for name in layer_names()})
    return config


def layer_names() -> list[str]:
    """Return the names of the layers in order."""
    return [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]


def heads_of(rank: int, ranks: int) -> range:
    """Return the heads that a rank keeps, as vLLM divides them: each by several ranks where there are more of these."""
    count = max(1, HEADS // ranks)
    return range(rank * HEADS // ranks, rank * HEADS // ranks + count)


def cache_of(
    blocks: int, head_size: int, packed: bool = False, heads: int = HEADS, order: str = "HND"
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return vLLM's description of a KvCache and the poisoned tensors of its layers.

    Packed, a block of all layers is contiguous; otherwise a layer of all blocks is. The order is that in memory.
    """
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=head_size, dtype=DTYPE)
    page, names = spec.page_size_bytes, layer_names()
    step, apart = (page * LAYERS, page) if packed else (page, page * blocks)
    if "layer_stride" in KVCacheTensor.__dataclass_fields__:  # 0.33
        tensors = [KVCacheTensor(page * blocks * LAYERS, names, layer_stride=apart, block_stride=step)]
    else:
        tensors = [KVCacheTensor(page * blocks, [name]) for name in names]
    shape = Blocks.get_kv_cache_shape(blocks, BLOCK_TOKENS, heads, head_size)
    width, content = DTYPE.itemsize, 2 * head_size
    inner = (BLOCK_TOKENS * content, content, 1) if order == "HND" else (content, heads * content, 1)
    whole = torch.full((page * blocks * LAYERS // width,), float("nan"), dtype=DTYPE)
    layers = [whole.as_strided(shape, (step // width, *inner), apart * number // width) for number in range(LAYERS)]
    if not packed:
        layers = [
            torch.full((page * blocks // width,), float("nan"), dtype=DTYPE).as_strided(each.shape, each.stride())
            for each in layers
        ]
    described = KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(names, spec)])
    if hasattr(described, "kv_cache_layout"):
        described.kv_cache_layout = "LBHNC"
    return described, dict(zip(names, layers, strict=True))


def fill(
    cache: torch.Tensor, layer: int, table: Sequence[int], first: int, tokens: Sequence[int], first_head: int = 0
) -> None:
    """Write what stands for keys and values of tokens at positions from `first` on, of heads from `first_head` on."""
    for position, token in enumerate(tokens, first):
        seed = (token * 2654435761 + position * 40503 + layer * 9973 + 1) % (1 << 20)
        block = cache[table[position // BLOCK_TOKENS]]
        heads, content = block.shape[0], block.shape[2]
        numbers = torch.arange(first_head * content, (first_head + heads) * content)
        block[:, position % BLOCK_TOKENS] = numbers.reshape(heads, content) + float(seed)


def whole_heads(caches: Sequence[torch.Tensor], table: Sequence[int], count: int) -> torch.Tensor:
    """Return all heads of the first tokens, out of a layer's tensors of all ranks; equal heads must be equal."""
    blocks, found = list(table[: -(-count // BLOCK_TOKENS)]), dict[int, torch.Tensor]()
    for rank, cache in enumerate(caches):
        for local, head in enumerate(heads_of(rank, len(caches))):
            read = cache[blocks][:, local].reshape(len(blocks) * BLOCK_TOKENS, -1)[:count]
            assert torch.equal(found.setdefault(head, read), read), f"rank {rank} has another head {head}"
    return torch.cat([found[head] for head in range(HEADS)], dim=1)


def next_token(caches: Sequence[Sequence[torch.Tensor]], table: Sequence[int], count: int) -> int:
    """Return the token after `count` tokens, from every byte of their keys and values; `caches` by layer and rank."""
    checksum = 0
    for ranks in caches:
        checksum = zlib.crc32(whole_heads(ranks, table, count).contiguous().numpy().tobytes(), checksum)
    return checksum % VOCABULARY


def generate(prompt: Sequence[int], count: int, head_size: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the tokens that one engine alone gives."""
    blocks = -(-(len(prompt) + count) // BLOCK_TOKENS)
    _, caches = cache_of(blocks, head_size)
    layers, table, tokens = list(caches.values()), range(blocks), list(prompt)
    for layer, cache in enumerate(layers):
        fill(cache, layer, table, 0, tokens)
    for _ in range(count):
        token = next_token([[each] for each in layers], table, len(tokens)) % vocabulary
        for layer, cache in enumerate(layers):
            fill(cache, layer, table, len(tokens), [token])
        tokens.append(token)
    return tokens[len(prompt) :]

"""KvLayout: how a KvCache lies in pages, and the arithmetic that both ends of a stream must agree on.

Pure values: no torch, no fabric, no clock; a msgspec struct, so that it travels in an offer. A page holds `page_tokens`
tokens of one layer: keys, then values. The layout is that of one tensor-parallel rank; what other ranks of the same
group hold follows from it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

Order = Literal["HND", "NHD", "MLA"]

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

BOUNDS = {
    "layers": (1, 4096),
    "kv_heads": (1, 65536),
    "head_dim": (1, 65536),
    "page_tokens": (1, 65536),
    "tp_size": (1, 1024),
    "context_bytes": (0, 1 << 30),
}
"""Least and most of each number: layouts come from other processes, so that no product of them may grow absurd."""

SHARED_FIELDS = ("layers", "kv_heads", "head_dim", "dtype", "order", "context_bytes", "model")
"""What two nodes must have in common. Page sizes and tensor parallelism may differ: `relayout` plans for those."""


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tensor-parallel rank keeps in a page.

    Attributes:
        layers: attention layers of the model.
        kv_heads: key/value heads of one layer of the whole model, over all ranks; 1 for MLA.
        head_dim: elements of one head; for MLA the width of the latent with its positional part.
        page_tokens: tokens of one page.
        dtype: element type, a key of DTYPE_BYTES.
        order: HND: [keys, values][heads][tokens][dim]; NHD: [keys, values][tokens][heads][dim];
            MLA: [tokens][dim], the same on every rank.
        tp_rank: this rank, 0 .. tp_size - 1.
        tp_size: ranks that share the model. More ranks than heads: each head is kept by several ranks.
        context_bytes: length of the context slot (last hidden state or first logits).
        model: fingerprint of the weights; pages of another model have the right size and the wrong content.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    order: Order = "HND"
    tp_rank: int = 0
    tp_size: int = 1
    context_bytes: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        """Check every number and name the wrong one; decoding a message does this too."""
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in {least}..{most}, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.order not in ("HND", "NHD", "MLA"):
            raise ValueError(f"order must be HND, NHD or MLA, got {self.order!r}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank must be in 0..{self.tp_size - 1} (tp_size {self.tp_size}), got {self.tp_rank}")
        if self.order == "MLA" and self.kv_heads != 1:
            raise ValueError(f"MLA keeps one latent per token: kv_heads must be 1, got {self.kv_heads}")
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} and tp_size {self.tp_size}: one must be a multiple of the other, so that"
                " each rank keeps whole heads"
            )
        if self.page_bytes > 1 << 31:
            raise ValueError(f"a page of {self.page_bytes} bytes is beyond 2 GiB; check head_dim and page_tokens")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def planes(self) -> int:
        """Tensors of a page: keys and values, or the one latent of MLA."""
        return 1 if self.order == "MLA" else 2

    @property
    def replicas(self) -> int:
        """Ranks that keep the same head: 1, or more when there are more ranks than heads."""
        return max(1, self.tp_size // self.kv_heads)

    @property
    def first_head(self) -> int:
        """First head of the model that this rank keeps."""
        return self.tp_rank * self.kv_heads // self.tp_size

    @property
    def local_heads(self) -> int:
        """Heads that this rank keeps."""
        return max(1, self.kv_heads // self.tp_size)

    @property
    def heads(self) -> range:
        """The heads of the model that this rank keeps."""
        return range(self.first_head, self.first_head + self.local_heads)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer on this rank."""
        return self.planes * self.local_heads * self.page_tokens * self.head_dim * self.itemsize

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page of one layer: (2, heads, tokens, dim), (2, tokens, heads, dim) or (tokens, dim)."""
        if self.order == "MLA":
            return self.page_tokens, self.head_dim
        if self.order == "NHD":
            return 2, self.page_tokens, self.local_heads, self.head_dim
        return 2, self.local_heads, self.page_tokens, self.head_dim

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need, the last one perhaps partly filled."""
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        return -(-tokens // self.page_tokens)

    def layer_bytes(self, pool_pages: int) -> int:
        """Return the bytes of one layer of a pool of `pool_pages` pages: where the next layer begins."""
        return pool_pages * self.page_bytes

    def pool_bytes(self, pool_pages: int) -> int:
        """Return the bytes of a pool: layer after layer, each with `pool_pages` pages."""
        return self.layers * self.layer_bytes(pool_pages)

    def page_offset(self, layer: int, page: int, pool_pages: int) -> int:
        """Return where page `page` of a layer begins in a pool; raises ValueError when there is none."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer must be in 0..{self.layers - 1}, got {layer}")
        if not 0 <= page < pool_pages:
            raise ValueError(f"page must be in 0..{pool_pages - 1}, got {page}")
        return layer * self.layer_bytes(pool_pages) + page * self.page_bytes

    def at_rank(self, rank: int) -> KvLayout:
        """Return the layout of another rank of the same group; raises ValueError when there is none."""
        return msgspec.structs.replace(self, tp_rank=rank)

    def digest(self) -> str:
        """Return the hash that both sides compare: of the fields that must be equal, see SHARED_FIELDS."""
        shared = [getattr(self, name) for name in SHARED_FIELDS]
        return blake2b(msgspec.msgpack.encode(shared), digest_size=16).hexdigest()

    def difference(self, other: KvLayout) -> str | None:
        """Name the first field that forbids moving pages between the two, with both values; None when none does."""
        for name in SHARED_FIELDS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours!r} here, {theirs!r} there"
        return None

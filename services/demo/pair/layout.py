"""How a KvCache lies in pages, and the arithmetic that both sides must agree on.

Pure: no torch, no fabric, no clock. A page holds `page_tokens` tokens of one layer, keys then values, heads outside
tokens (order HND), so that the head range of a page is contiguous. Page `p` of layer `l` is page `l * pool_pages + p`
of the registered region.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two nodes must share before pages of one may be read by the other.

    Attributes:
        layers: attention layers of the model.
        kv_heads: key/value heads of one layer.
        head_dim: elements of one head.
        page_tokens: tokens of one page.
        dtype: element type, a key of DTYPE_BYTES.
        vocabulary: logits of the context slot.
        weights: fingerprint of the model's weights: pages of another model have the right size and the wrong content.
        order: HND, heads outside tokens.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    vocabulary: int
    weights: str
    order: str = "HND"

    def __post_init__(self) -> None:
        """Check every number and name the wrong one."""
        for name in ("layers", "kv_heads", "head_dim", "page_tokens", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: keys and values."""
        return 2 * self.kv_heads * self.page_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need, the last one perhaps partly filled."""
        return -(-tokens // self.page_tokens)

    def expected_arrivals(self, tokens: int) -> int:
        """Return the count the receiver waits for: every page of every layer, and one write of the context."""
        return self.pages_for(tokens) * self.layers + 1

    def pages_to_push(self, start: int, end: int, total: int) -> range:
        """Return the pages of the block table to push once tokens `start..end` of `total` are in place.

        Only complete pages go, until the chunk that ends the prompt: so every page is pushed exactly once and
        `expected_arrivals` holds for any chunk size.
        """
        if not 0 <= start < end <= total:
            raise ValueError(f"expected 0 <= start < end <= total, got {start}, {end}, {total}")
        last = self.pages_for(end) if end == total else end // self.page_tokens
        return range(start // self.page_tokens, last)

    def digest(self) -> str:
        """Return the hash that both sides compare."""
        return blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def difference(self, other: KvLayout) -> str | None:
        """Name the first field in which `other` differs, with both values; None when there is none."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours!r} here, {theirs!r} there"
        return None

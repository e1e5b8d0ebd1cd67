"""The blocks of a prompt by their hashes: equal hashes mean equal tokens from the first one on. Pure.

Each hash covers its block and all before it, as in vLLM's prefix cache. A router compares them to know where a prompt's
beginning was computed, a prefill node to find the pages that hold it. Only whole blocks count.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4


class PromptBlocks:
    """The hashes of one prompt of `tokens` tokens, made once for each size of blocks that somebody asks for."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """Take the prompt; its tokens are below 2**32."""
        self.tokens = len(prompt)
        self._text = array("I", prompt).tobytes()
        self._hashes: dict[int, list[bytes]] = {}

    def of(self, block_tokens: int) -> list[bytes]:
        """Return the hashes of the whole blocks of `block_tokens` tokens, the first one first.

        Raises ValueError for a size that is less than 1.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        if block_tokens not in self._hashes:
            size, last = block_tokens * TOKEN_BYTES, block_tokens.to_bytes(8, "little")
            found = self._hashes[block_tokens] = list[bytes]()
            for begin in range(0, len(self._text) - size + 1, size):
                last = blake2b(self._text[begin : begin + size], key=last, digest_size=HASH_BYTES).digest()
                found.append(last)
        return self._hashes[block_tokens]

"""Tokenizers: text and chats in, token ids out, and back. No torch here; a router without a model may use them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

BYTE_VOCABULARY = 256

Chat = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`."""


class TokenPieces(Protocol):
    """Turns the tokens of one answer into text as they come; the pieces joined are the text of the whole."""

    def feed(self, token: int) -> str:
        """Return the text that is certain now, perhaps none."""

    def finish(self) -> str:
        """Return what was held back."""


class Tokenizer(Protocol):
    """What runner and router ask of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Return how many token ids there are."""

    @property
    def longest(self) -> int:
        """Return how many characters of a text one token can stand for."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the tokens of the prompt that asks for the next message of `chat`."""

    def pieces(self) -> TokenPieces:
        """Return a decoder for one answer; bytes that are no character become U+FFFD."""


def plain_chat(chat: Chat) -> str:
    """Write a chat as lines `role: content`, for models that have no template of their own."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in chat) + "assistant: "


class ByteTokenizer:
    """Tokens are the bytes of UTF-8."""

    vocabulary = BYTE_VOCABULARY
    longest = 1

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the bytes of the chat in lines `role: content`."""
        return self.encode(plain_chat(chat))

    def pieces(self) -> TokenPieces:
        """Return a decoder of UTF-8, with U+FFFD for what is not UTF-8."""
        return _BytePieces()


class _BytePieces:
    """Pieces of the byte tokenizer."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint, through transformers."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.longest = max(map(len, inner.get_vocab()))
        """Written bytewise in a vocabulary a token has more characters than in a text, never fewer."""

    @property
    def vocabulary(self) -> int:
        """Return how many token ids there are."""
        return len(self._inner)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with the special tokens that the checkpoint puts around a prompt."""
        return list(self._inner(text)["input_ids"])

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the tokens of the chat by the checkpoint's template, or in lines where it has none."""
        if self._inner.chat_template is None:
            return self.encode(plain_chat(chat))
        text = self._inner.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def pieces(self) -> TokenPieces:
        """Return a decoder of the answer's text without special tokens."""
        return _WindowPieces(self._inner)


class _WindowPieces:
    """Pieces of any tokenizer: decode a short window again with each token, hold back an unfinished character.

    The window starts one piece back, because many tokenizers write a token differently at the start of a text.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._window: list[int] = []
        self._given = 0  # tokens of the window whose text was given out

    def feed(self, token: int) -> str:
        self._window.append(token)
        return self._new(final=False)

    def finish(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._given])
        now = self._decode(self._window)
        if not final and (now.endswith("\ufffd") or len(now) <= len(before)):
            return ""
        self._window, self._given = self._window[self._given :], len(self._window) - self._given
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._inner.decode(token_ids, skip_special_tokens=True))

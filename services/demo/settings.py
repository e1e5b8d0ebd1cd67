"""What a demo runs on and what it asks: read by every demo and by the command. Pure; no torch."""

from __future__ import annotations

import msgspec


class DemoSettings(msgspec.Struct, frozen=True):
    """The same for all processes of a demo."""

    provider: str = "local"
    device: str = "cpu"
    model: str | None = None
    seed: int = 0
    layers: int = 8
    hidden: int = 512
    page_tokens: int = 16
    chunk: int = 512
    new_tokens: int = 64
    pool_tokens: int = 4096
    threads: int = 1
    deadline: float = 120.0


class Job(msgspec.Struct, tag=True, frozen=True):
    """One prompt to answer; `tokens` cuts it, 0 takes all of it."""

    id: int
    text: str
    tokens: int = 0

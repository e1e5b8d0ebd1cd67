"""What the router needs of whatever generates tokens: one protocol. No HTTP, no model, no network here.

A backend may be a runner in this process or a cluster of prefill and decode nodes; the router sees no difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncfabric_services.runner.sampling import Sampling
from asyncfabric_services.runner.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked for.

    Attributes:
        name: what requests call it.
        tokenizer: text to tokens and back, in the router.
        max_tokens: prompt and answer together.
        created: Unix time, for the list of models.
        passes_fields: whether an engine behind it takes fields of a request that the router does not know.
    """

    name: str
    tokenizer: Tokenizer
    max_tokens: int
    created: int = 0
    passes_fields: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """How busy a backend is, in requests."""

    running: int
    waiting: int
    most_running: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue.

    Attributes:
        id: unique, for logs and traces.
        model: name of a card.
        prompt: token ids.
        max_tokens: the longest answer.
        sampling: how tokens are chosen.
        deadline_seconds: how long the router will wait from now on; a backend may use it to refuse early.
        fields: of the body, that only an engine knows; empty unless the card passes them.
    """

    id: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    deadline_seconds: float
    fields: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Generates tokens."""

    def models(self) -> Sequence[ServedModel]:
        """Return the models that can be asked for now."""

    def capacity(self) -> Capacity:
        """Return how busy it is."""

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[int]]:
        """Generate the answer within a scope; the iterator ends after `max_tokens` or before an end token.

        Raises, on entry or from the iterator: BusyError when there is no room now (answered 429), ValueError for
        a request that can never be served (400), BrokenError when what computed it died (502), ClosedError when it
        is stopping (503).

        Cancellation: when the scope has been left, however, nothing of the request is left anywhere.
        """

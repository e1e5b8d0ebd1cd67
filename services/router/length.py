"""Prompts that cannot fit, found before tokens are made of them: by their characters, messages or token ids. Pure."""

from __future__ import annotations

from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.fault import ApiFault

CODE = "context_length_exceeded"


def refuse_text(card: ServedModel, characters: int, param: str) -> None:
    """Raise ApiFault for more characters than the tokens of the model can stand for."""
    longest = card.tokenizer.longest
    most = (card.max_tokens - 1) * longest
    if characters > most:
        raise _hopeless(
            card,
            f"the prompt has {characters} characters, and at most {most} can fit, as no token of this model stands for "
            f"more than {longest}",
            param,
        )


def refuse_count(card: ServedModel, count: int, what: str, param: str) -> None:
    """Raise ApiFault for more token ids, or messages of which each is a token at least, than the model has tokens."""
    if count >= card.max_tokens:
        raise _hopeless(card, f"the prompt has {count} {what}", param)


def too_long(card: ServedModel, prompt: int, wanted: int, param: str) -> ApiFault:
    """Return the answer to a prompt and an answer that do not fit together; both are counted in tokens."""
    message = (
        f"the model {card.name!r} takes {card.max_tokens} tokens in all: the prompt has {prompt} and the answer may "
        f"have {wanted}; shorten the prompt or ask for fewer tokens"
    )
    return ApiFault(400, message, param=param, code=CODE)


def _hopeless(card: ServedModel, found: str, param: str) -> ApiFault:
    message = f"the model {card.name!r} takes {card.max_tokens} tokens, prompt and answer: {found}; shorten the prompt"
    return ApiFault(400, message, param=param, code=CODE)

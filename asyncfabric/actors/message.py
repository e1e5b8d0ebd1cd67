"""Message: what actors are asked, and the names and answer types that both ends of the wire agree about.

Pure; no I/O. A message is a msgspec struct that states in its base what it is answered with: `class Add(Message[int])`.
"""

from __future__ import annotations

import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

A = TypeVar("A")


if TYPE_CHECKING:
    from msgspec import Struct as FrozenStruct  # checkers want each subclass to state `frozen=True` again; at run time
else:  # subclasses inherit it, so they are not asked to

    class FrozenStruct(msgspec.Struct, frozen=True):
        """Base whose subclasses are frozen without stating it."""


class Message(FrozenStruct, Generic[A]):
    """Base of messages: `class Add(Message[int]): a: int; b: int` is answered with an int.

    Messages are frozen. In one process the object itself is handed over, so do not change what it holds; to another
    process its fields travel as MessagePack.
    """


def kind_of(message_type: type[Message[Any]]) -> str:
    """Return the name of a message type on the wire: the name of its class."""
    return message_type.__name__


@lru_cache(maxsize=1024)
def answer_type(message_type: type[Message[Any]]) -> Any:
    """Return what a message is answered with, as its base states; Any when the base does not."""
    for cls in message_type.__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if typing.get_origin(base) is Message:
                (answer,) = typing.get_args(base)
                return Any if isinstance(answer, TypeVar) else answer
    return Any


def check_message(message: object) -> None:
    """Raise TypeError when this is no message."""
    if not isinstance(message, Message):
        raise TypeError(f"an actor is sent a Message, got {type(message).__name__} {message!r}")

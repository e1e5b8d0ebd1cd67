"""The keys of the schema by name (`http.port`), and values from text or TOML, checked. Pure.

Knows the schema's types and nothing of where values come from.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncfabric_services.quantities import format_size, parse_duration, parse_size
from asyncfabric_services.settings.schema import DURATION, KEYS, SIZE, Settings

_SECRET = re.compile(r"[!-+\--~]{16,512}")


class SettingsError(ValueError):
    """A key or a value of the configuration is wrong; the text names it, its origin and what was expected."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: section.key.
        kind: its type as annotated.
        default: its value when nobody sets it.
        text: what it is.
        least: smallest number, or None.
        most: largest number, or None.
    """

    name: str
    kind: Any
    default: Any
    text: str
    least: float | None
    most: float | None

    @property
    def variable(self) -> str:
        """Environment variable: a double underscore goes down one level."""
        return "ASYNCFABRIC_" + self.name.replace(".", "__").upper()

    @property
    def flag(self) -> str:
        """Flag of the command line; the `kind` of a section goes by the section's name."""
        return "--" + self.name.removesuffix(".kind").replace(".", "-").replace("_", "-")

    @property
    def repeated(self) -> bool:
        """Whether it has several values, its flag may be given again, and nobody is shown them."""
        return KEYS in getattr(self.kind, "__metadata__", ())

    @property
    def metavar(self) -> str:
        """The kind of its values, as help shows it."""
        if quantity := _quantity_of(self.kind):
            return quantity.upper()
        if self.repeated:
            return "TEXT"
        if get_origin(self.kind) is Literal:
            return f"[{'|'.join(get_args(self.kind))}]"
        kinds = (self.kind, *get_args(self.kind))
        return "PATH" if Path in kinds else "INTEGER" if int in kinds else "TEXT"

    @property
    def range(self) -> str:
        """Its range, as help shows it; empty for none."""
        unit = {DURATION: "s", SIZE: "B"}.get(_quantity_of(self.kind), "")
        if self.least is None or self.most is None:
            return "" if self.least is None else f"at least {self.least:g}{unit}"
        bounds = [f"{bound}" if isinstance(bound, int) else f"{bound:g}" for bound in (self.least, self.most)]
        return f"{bounds[0]}{unit} to {bounds[1]}{unit}"

    @property
    def written(self) -> str:
        """Its default, as one writes it."""
        quantity = _quantity_of(self.kind)
        if quantity == SIZE:
            return format_size(self.default).replace(" ", "")
        return f"{self.default:g}s" if quantity == DURATION else str(self.default)

    def read(self, value: Any) -> Any:
        """Return a typed value for text, or for what TOML gave; raises SettingsError stating what was expected."""
        try:
            read = _read(self.kind, value)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if self.least is not None and read is not None and read < self.least:
            raise SettingsError(f"expected at least {self.least:g}, got {value!r}")
        if self.most is not None and read is not None and read > self.most:
            raise SettingsError(f"expected at most {self.most:g}, got {value!r}")
        return read


@cache
def all_keys() -> Mapping[str, Key]:
    """Return every key by name, in the order of the schema."""
    found = {}
    for section_name, section in get_type_hints(Settings).items():
        hints = get_type_hints(section, include_extras=True)
        for one in fields(section):
            name = f"{section_name}.{one.name}"
            stated = one.metadata
            found[name] = Key(name, hints[one.name], one.default, stated["text"], stated["least"], stated["most"])
    return found


def nearest(name: str, names: list[str]) -> str:
    """Return `; did you mean ...?` for the nearest of the names, nothing when none is near."""
    near = get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _quantity_of(kind: Any) -> str:
    return next((one for one in getattr(kind, "__metadata__", ()) if one in (DURATION, SIZE)), "")


def _read(kind: Any, value: Any) -> Any:
    if quantity := _quantity_of(kind):
        return _quantity(value, parse_duration if quantity == DURATION else parse_size)
    if KEYS in getattr(kind, "__metadata__", ()):
        return _secrets(value)
    if get_origin(kind) is Literal:
        return _one_of(value, get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
        return None if value in ("", None) else _read(kind, value)
    if kind is int:
        return _integer(value)
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {value!r}")
    return Path(value).expanduser() if kind is Path else value


def _quantity(value: Any, parse: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a number with a unit, got {value!r}")
    return parse(str(value))


def _secrets(value: Any) -> tuple[str, ...]:
    given = value.split(",") if isinstance(value, str) else value
    keys = tuple(given) if isinstance(given, list | tuple) else ()
    if not keys or not all(isinstance(one, str) and _SECRET.fullmatch(one) for one in keys):
        raise ValueError("expected keys of 16 to 512 printable ASCII characters without blanks and commas")
    return keys


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"expected an integer, got {value!r}") from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected an integer, got {value!r}")
    return value

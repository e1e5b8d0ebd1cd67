"""Reading one field of a request's JSON body: presence, type and range, each mistake answered by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from asyncfabric_services.router.fault import ApiFault


def wrong(param: str, message: str, code: str | None = None) -> ApiFault:
    """Return the fault of a field."""
    return ApiFault(400, f"{param}: {message}", param=param, code=code)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """Return an integer in least..most, None when it is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, f"expected an integer, got {_shown(value)}", "invalid_type")
    if not least <= value <= most:
        raise wrong(name, f"expected {least}..{most}, got {value}", "invalid_value")
    return value


def number(body: Mapping[str, Any], name: str, least: float, most: float, default: float) -> float:
    """Return a number in least..most, `default` when it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(name, f"expected a number, got {_shown(value)}", "invalid_type")
    if not least <= value <= most:
        raise wrong(name, f"expected {least:g}..{most:g}, got {value}", "invalid_value")
    return float(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean, False when it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, f"expected true or false, got {_shown(value)}", "invalid_type")
    return bool(value)


def string(body: Mapping[str, Any], name: str) -> str:
    """Return a string that must be there."""
    value = body.get(name)
    if value is None:
        raise wrong(name, "this field is required", "missing_required_parameter")
    if not isinstance(value, str):
        raise wrong(name, f"expected a string, got {_shown(value)}", "invalid_type")
    return value


def strings(body: Mapping[str, Any], name: str, most: int, most_characters: int) -> tuple[str, ...]:
    """Return the non-empty strings, none longer than `most_characters`, of a string or of a list of at most `most`."""
    value = body.get(name)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise wrong(name, f"expected a string or a list of strings, none empty, got {_shown(value)}", "invalid_type")
    if len(values) > most:
        raise wrong(name, f"expected at most {most} strings, got {len(values)}", "invalid_value")
    longest = max(map(len, values), default=0)
    if longest > most_characters:
        raise wrong(name, f"expected at most {most_characters} characters each, got {longest}", "invalid_value")
    return tuple(values)


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields of the API that this server has not, unless their value asks for nothing."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            raise wrong(name, f"{_shown(value)} is not supported by this server", "unsupported_parameter")


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that nobody knows, with the nearest that somebody does."""
    names = list(known)
    for name in body:
        if name not in names:
            near = get_close_matches(name[:60], names, 1)  # it takes seconds over megabytes
            hint = f"; did you mean {near[0]}?" if near else ""
            raise wrong(name, f"unknown field{hint}", "unknown_parameter")

"""Objects of Kubernetes as YAML: maps and lists in blocks, scalars as JSON or plain where YAML reads them as text.

Pure. Writes what the printing needs and no more, so that printing needs no package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*")
_NOT_TEXT = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null)")
"""Words that some reader of YAML 1.1 takes for something else than text."""


class Template(str):
    """An expression of a template language, written as it is."""

    __slots__ = ()


def yaml_text(value: Any, *, quoted: Callable[[str], str] = str) -> str:
    """Return one document; `quoted` is applied to each written scalar that is no Template.

    Raises TypeError for a value that is none of JSON.
    """
    return "".join(f"{line}\n" for line in _lines(value, quoted))


def yaml_documents(values: Iterable[Any]) -> str:
    """Return a stream of documents, as `kubectl apply -f` reads it."""
    return "---\n".join(map(yaml_text, values))


def _lines(value: Any, quoted: Callable[[str], str]) -> list[str]:
    if isinstance(value, Mapping) and value:
        found = []
        for key, inner in value.items():
            found += _below(f"{quoted(_scalar(str(key)))}:", inner, quoted)
        return found
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        found = []
        for inner in value:
            first, *rest = _lines(inner, quoted)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [_leaf(value, quoted)]


def _below(key: str, value: Any, quoted: Callable[[str], str]) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence) or not value:
        return [f"{key} {_leaf(value, quoted)}"]
    return [key, *(f"  {line}" for line in _lines(value, quoted))]


def _leaf(value: Any, quoted: Callable[[str], str]) -> str:
    if isinstance(value, Template):
        return str(value)
    if isinstance(value, str):
        return quoted(_scalar(value))
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text  # 1.0e-07: YAML wants it


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(one: str) -> str:
    """Return a character of a quoted scalar; JSON halves those beyond U+FFFF, which YAML reads as two."""
    return f"\\U{ord(one):08x}" if ord(one) > 0xFFFF else json.dumps(one)[1:-1]

"""Write docs/reference/index.md from the docstrings of what `asyncfabric` exports. Needs no build; run by `make docs`.

The page is checked in, so that it reads without tools; tests/architecture fails when it is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("index.md")
GROUPS = (
    ("Opening", ("open_fabric", "FabricConfig", "RailSpec")),
    (
        "What you hold",
        ("Fabric", "Region", "RegionSlice", "RegionKey", "FabricAddress", "Peer", "PeerGroup", "Transfer"),
    ),
    ("Counting", ("ImmCounter", "WatchWord")),
)

BESIDE = """\
`from asyncfabric import blocking`; [the guide](../guide/blocking.md) has an example. Below is what differs; all else
is as of the class of the same name above."""


def signature(member: object) -> str:
    """Return a signature as people write it, without quotes round annotations."""
    try:
        text = str(inspect.signature(member))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"<factory>|<object object at 0x[0-9a-f]+>", "...", text)
    text = re.sub(r"\b(Transfer|BoxTransfer)T\b", r"\1", text).replace("AnyRegion", "Region")
    return re.sub(r"\bself, |\(self\)", lambda found: "()" if found[0] == "(self)" else "", text).replace("'", "")


def prose(docstring: str) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    out: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        section = re.fullmatch(r"(Attributes|Args|Raises|Returns|Yields):", line)
        entry = re.match(r"    (\w[\w., ]*): (.*)", line)
        if section:
            out += ["", f"*{section[1]}*", ""]
        elif entry:
            out.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            out.append(line if line.startswith("        ") else line.strip())
    return "\n".join(out).strip()


def members(cls: type, *, alone: bool) -> Iterator[tuple[str, object]]:
    """Yield the public members that a class defines, in source order; its own, then those of what both faces share."""
    seen = set()
    for base in cls.__mro__[: 1 if alone else None]:
        if base is not cls and not re.match(r"Any[A-Z]|.*Ops$", base.__name__):
            continue
        for name, member in vars(base).items():
            public = callable(member) or isinstance(member, property | classmethod | staticmethod)
            if not name.startswith("_") and public and name not in seen:
                seen.add(name)
                yield name, member


def entry(name: str, thing: object, *, alone: bool = False) -> Iterator[str]:
    """Yield the lines of one exported thing; `alone` leaves out what it inherits."""
    yield f"### {name}"
    yield ""
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            yield f"`{name}{signature(thing).replace(' -> None', '')}`"
            yield ""
        yield prose(thing.__doc__ or "")
        for member_name, member in members(thing, alone=alone):
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            doc = inspect.getdoc(function)
            if doc is None:
                continue
            mark = "async " if inspect.iscoroutinefunction(function) else ""
            yield ""
            yield f"**`{mark}{name}.{member_name}{'' if isinstance(member, property) else signature(function)}`**"
            yield ""
            yield prose(doc)
    elif callable(thing):
        yield f"`{name}{signature(thing)}`"
        yield ""
        yield prose(thing.__doc__ or "")
    else:
        yield f"`{name} = {thing!r}`" if isinstance(thing, int) else f"A name for a type: `{thing}`."
    yield ""


def page() -> str:
    """Return the whole page."""
    import asyncfabric
    from asyncfabric import blocking

    exported = set(asyncfabric.__all__)
    named = {name for _, names in GROUPS for name in names}
    errors = sorted(name for name in exported if name.endswith("Error") or name == "ActorDied")
    rest = sorted(exported - named - set(errors))
    lines = ["# Public API", "", "Generated from docstrings by `make docs`. `import asyncfabric as af`.", ""]
    for title, names in (*GROUPS, ("Values", rest), ("Errors", errors)):
        lines += [f"## {title}", ""]
        for name in names:
            if name in exported:
                lines += entry(name, getattr(asyncfabric, name))
    lines += ["## Without an event loop", "", (blocking.__doc__ or "").splitlines()[0], "", BESIDE, ""]
    for name in blocking.__all__:
        lines += entry(f"blocking.{name}", getattr(blocking, name), alone=True)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())).rstrip() + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {len(PAGE.read_text().splitlines())} lines")

"""Write the pages of docs/reference, one for each public package, from docstrings. Needs no build; run by `make docs`.

The pages are checked in, so that they read without tools; tests/architecture fails when one is out of date. index.md,
rails.md and pitfalls.md in the same folder are written by hand.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PACKAGES: dict[str, tuple[str, ...]] = {  # page: the packages whose `__all__` it lists
    "kv": ("asyncfabric.kv",),
    "weights": (
        "asyncfabric.weights",
        "asyncfabric.weights.sessions",
        "asyncfabric.weights.blocking",
        "asyncfabric.weights.update",
    ),
    "moe": ("asyncfabric.moe", "asyncfabric.moe.gpu"),
    "control": ("asyncfabric.control",),
    "actors": ("asyncfabric.actors",),
    "observe": ("asyncfabric.observe",),
    "sim": ("asyncfabric.sim",),
    "testing": ("asyncfabric.testing",),
}
GENERATED = "Generated from docstrings by `make docs`."
# Public by name so that the completion dispatcher can call them; no program of a user does.
NOT_FOR_USERS = {"abandon", "complete", "engine_bytes", "interrupted", "open_for"}
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
    text = re.sub(r"<factory>|<[^<>]* at 0x[0-9a-f]+>", "...", text)
    text = re.sub(r"\bTransferT\b", "Transfer", text).replace("AnyRegion", "Region")
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
            if not name.startswith("_") and public and name not in seen | NOT_FOR_USERS:
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
        text = repr(thing)
        if isinstance(thing, int | float | str):
            yield f"`{name} = {text}`"
        elif "typing" in type(thing).__module__ or type(thing).__module__ == "types":
            yield f"A name for a type: `{thing}`."
        else:
            yield f"A `{type(thing).__name__}`" + (f": `{text}`." if len(text) < 200 and " at 0x" not in text else ".")
    yield ""


def tidy(lines: list[str]) -> str:
    """Return the text of a page: no blanks at ends of lines, one empty line between parts."""
    text = "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def core_page() -> str:
    """Return the page of `asyncfabric` itself."""
    import asyncfabric

    exported = set(asyncfabric.__all__)
    named = {name for _, names in GROUPS for name in names}
    errors = sorted(name for name in exported if name.endswith("Error") or name == "ActorDied")
    rest = sorted(exported - named - set(errors))
    lines = ["# asyncfabric", "", GENERATED, "", "`import asyncfabric as af`", ""]
    for title, names in (*GROUPS, ("Values", rest), ("Errors", errors)):
        lines += [f"## {title}", ""]
        for name in names:
            if name in exported:
                lines += entry(name, getattr(asyncfabric, name))
    return tidy(lines)


def blocking_page() -> str:
    """Return the page of `asyncfabric.blocking`, which has only what differs from the core."""
    from asyncfabric import blocking

    lines = ["# asyncfabric.blocking", "", GENERATED, "", (blocking.__doc__ or "").splitlines()[0], "", BESIDE, ""]
    for name in blocking.__all__:
        lines += entry(f"blocking.{name}", getattr(blocking, name), alone=True)
    return tidy(lines)


def package_page(packages: tuple[str, ...]) -> str:
    """Return the page of one or more packages: functions first, then classes, then values."""
    lines: list[str] = []
    for name in packages:
        package = importlib.import_module(name)
        head = ["", GENERATED] if not lines else []
        lines += [f"{'##' if lines else '#'} {name}", *head, "", prose(package.__doc__ or ""), ""]
        things = [(each, getattr(package, each)) for each in package.__all__]
        kinds = [0 if inspect.isroutine(thing) else 1 if inspect.isclass(thing) else 2 for _, thing in things]
        for _, (each, thing) in sorted(zip(kinds, things, strict=True), key=lambda pair: (pair[0], pair[1][0])):
            lines += entry(each, thing)
    return tidy(lines)


def pages() -> dict[Path, str]:
    """Return the generated pages by their paths."""
    texts = {"core": core_page(), "blocking": blocking_page()}
    texts |= {page: package_page(packages) for page, packages in PACKAGES.items()}
    return {FOLDER / f"{page}.md": text for page, text in texts.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, text in pages().items():
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")

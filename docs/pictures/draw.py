"""Draw the pictures of the pages: the layers, and the GPU figures beside NIXL, read from the tables of the guide.

    python docs/pictures/draw.py

Figures have one source, the tables: a test compares each picture with what is drawn from them. Light and dark: each
picture has a background of its own and follows the reader's preference. Pure but for the files; needs no build.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
GUIDE = FOLDER.parent / "guide"
STYLE = """<style>
svg { --page: #ffffff; --ink: #1d2733; --soft: #5b6776; --line: #c9ced6; --box: #eef2f7;
      --ours: #2c6fbb; --bare: #7fb0e6; --other: #b4532a }
@media (prefers-color-scheme: dark) { svg { --page: #161b22; --ink: #e6edf3; --soft: #9aa7b4; --line: #3d4652;
      --box: #212a35; --ours: #58a6ff; --bare: #2f6fb8; --other: #f0883e } }
text { fill: var(--ink); font-family: ui-sans-serif, sans-serif; font-size: 13px }
.title { font-size: 16px; font-weight: bold } .soft { fill: var(--soft); font-size: 12px }
</style>"""
LAYERS = (
    ("services", "programs: serve, demo, bench, doctor", 0),
    ("integrations", "vLLM, NIXL, Ray, DeepEP, torch", 1),
    ("kv   weights   moe", "KvCache pages, weights, experts", 1),
    ("asyncfabric, blocking", "Fabric, Region, Transfer, ImmCounter", 2),
    ("bridge", "completions become awaiting tasks", 2),
    ("native engine", "worker thread: stripes, counts, drains (C++20)", 2),
    ("providers", "local, cuda, tcp, verbs, efa: one rail for each device", 2),
    ("memory and NICs", "shared memory, NVLink, TCP, RDMA", 2),
)


def document(width: int, height: int, title: str, body: list[str]) -> str:
    """Return an SVG document with a title."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'{STYLE}\n<rect width="{width}" height="{height}" rx="8" style="fill: var(--page)"/>\n'
        f'<text class="title" x="20" y="30">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a rectangle in a colour of STYLE."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" style="fill: var({colour})"/>'
    )


def arrow(x: float, top: float, bottom: float, colour: str) -> list[str]:
    """Return a line with a head at each end, since calls go down and completions come up."""
    heads = (
        f"M{x - 5} {top + 9} L{x} {top} L{x + 5} {top + 9}",
        f"M{x - 5} {bottom - 9} L{x} {bottom} L{x + 5} {bottom - 9}",
    )
    return [
        f'<path d="M{x} {top} V{bottom} {" ".join(heads)}" style="fill: none; stroke: var({colour}); stroke-width: 2"/>'
    ]


def architecture() -> str:
    """Draw the layers with the data path beside them, and what control goes by."""
    left, width, row, gap, top = 150, 520, 40, 8, 50
    body = []
    for index, (name, what, _) in enumerate(LAYERS):
        y = top + index * (row + gap)
        body += [
            box(left, y, width, row, "--box"),
            text(left + 14, y + 25, name),
            text(left + 180, y + 25, what, "soft"),
        ]
    line = [top + index * (row + gap) for index in range(len(LAYERS) + 1)]
    body += arrow(left - 24, line[3] + 4, line[8] - gap - 4, "--ours")
    body += [
        text(left - 36, line[5] + 10, "data path:", anchor="end"),
        text(left - 36, line[5] + 28, "calls go down,", "soft", "end"),
    ]
    body += [text(left - 36, line[5] + 44, "completions up", "soft", "end")]
    right = left + width + 24
    body += arrow(right, line[0] + 4, line[3] - gap - 4, "--other")
    body += [text(right + 12, line[1] + 6, "control path:"), text(right + 12, line[1] + 24, "control, actors:", "soft")]
    body += [text(right + 12, line[1] + 40, "messages", "soft")]
    return document(820, line[8] + 12, "Data goes down one straight path; control goes by messages", body)


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the rows of a table of a guide page, whose head starts with `heading`, the head first."""
    lines = (GUIDE / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading}"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip("| ").split(" | ")])
    return [rows[0], *rows[2:]]


def number(cell: str) -> float:
    """Return the number that a cell starts with."""
    return float(re.sub(r"[^\d.].*", "", cell.replace(",", "")))


def bars(title: str, unit: str, groups: list[tuple[str, list[float]]], names: list[tuple[str, str]]) -> str:
    """Draw groups of bars over a logarithmic axis; `names` has what each bar of a group is, and its colour."""
    left, width, row, top = 230, 500, 15, 74
    lowest = 10 ** math.floor(math.log10(min(min(values) for _, values in groups)))
    decades = math.log10(max(max(values) for _, values in groups) / lowest)
    body, x = [], 20.0
    for name, colour in names:
        body += [box(x, 43, 12, 12, colour), text(x + 18, 54, name, "soft")]
        x += 40 + 6.6 * len(name)
    y = top
    for label, values in groups:
        body.append(text(left - 12, y + row * len(values) / 2 + 4, label, anchor="end"))
        for value, (_, colour) in zip(values, names, strict=True):
            length = math.log10(value / lowest) / decades * width
            body += [
                box(left, y, length, row - 3, colour),
                text(left + length + 6, y + 11, f"{value:,g} {unit}", "soft"),
            ]
            y += row
        y += 12
    body.append(text(left, y + 8, "logarithmic; shorter is faster", "soft"))
    return document(840, y + 24, title, body)


def nixl() -> str:
    """Draw what the guide's table of one Hopper GPU has of pages and of large reads."""
    head, *rows = rows_of("nixl.md", "one Hopper GPU")
    groups = []
    for row in rows:
        kind, _, sizes = row[0].partition(": ")
        parts = sizes.split("; ")
        if "noted" not in kind or len(parts) != 3:
            continue
        tail = "" if "GiB" in parts[0] or "KiB" in parts[0] else parts[-1].partition(" ")[2]
        for index, size in enumerate(parts):
            amount = size if not tail or index == 2 else f"{size} {tail}"
            groups.append((f"{kind.split(',')[0]} {amount}", [number(cell.split("; ")[index]) for cell in row[1:]]))
    names = list(
        zip(("asyncfabric, as nixl", "asyncfabric, bare", "NIXL 1.5.1"), ("--ours", "--bare", "--other"), strict=True)
    )
    assert len(head) == len(names) + 1
    return bars("GPU to GPU of another process, until the target answered", "us", groups, names)


def vllm() -> str:
    """Draw the guide's table of the first token at decode."""
    head, stock, face, connector, *_ = rows_of("vllm.md", "prompt tokens")
    groups = [
        (f"{tokens} prompt tokens", [number(row[at]) for row in (stock, face, connector)])
        for at, tokens in enumerate(head)
        if at
    ]
    what = ("NixlConnector over NIXL", "NixlConnector over asyncfabric", "asyncfabric's connector")
    return bars(
        "vLLM on one H100: first token at decode",
        "ms",
        groups,
        list(zip(what, ("--other", "--bare", "--ours"), strict=True)),
    )


PICTURES = {"architecture.svg": architecture, "nixl.svg": nixl, "vllm.svg": vllm}


def main() -> None:
    """Write the pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()

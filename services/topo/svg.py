"""The drawing as a picture: nested boxes in SVG, written by hand so that nothing needs to be installed. Pure.

Layout: a box is as tall as what it holds; leaves are one line. Nodes stand beside each other, two in a row.
"""

from __future__ import annotations

from html import escape

from asyncfabric.observe.nvlink import NvLinks
from asyncfabric.observe.topology import Topology
from asyncfabric_services.topo.labels import headline
from asyncfabric_services.topo.outline import OutlineBox, outline

LINE, PAD, GAP, LETTER = 22, 8, 6, 7.3  # pixels; LETTER: width of a monospaced letter of 12 pixels
FILLS = {"machine": "#ffffff", "node": "#f2f4f8", "bridge": "#e3e8f1", "gpu": "#c9e7cb", "nic": "#cfe0f7"}
STROKES = {"machine": "#9aa5b8", "node": "#9aa5b8", "bridge": "#9aa5b8", "gpu": "#3f8f4f", "nic": "#3b6fb5"}


def draw_svg(topology: Topology, links: NvLinks) -> str:
    """Return a complete SVG document."""
    machine = outline(topology, links)
    machine.label = headline(topology)
    width, height = _size(machine)
    body = "\n".join(_drawn(machine, 1, 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="0 0 {width + 2:.0f} {height + 2:.0f}" font-family="ui-monospace, monospace" font-size="12">\n'
        f"<title>{escape(machine.label)}</title>\n{body}\n</svg>\n"
    )


def _text(box: OutlineBox) -> str:
    return f"{box.label}  ↔ {box.partners}" if box.partners else box.label


def _rows(box: OutlineBox) -> list[list[OutlineBox]]:
    """Return the children in rows: NUMA nodes stand two in a row, everything else below each other."""
    step = 2 if box.kind == "machine" else 1
    return [box.children[at : at + step] for at in range(0, len(box.children), step)]


def _size(box: OutlineBox) -> tuple[float, float]:
    width, height = len(_text(box)) * LETTER + 2 * PAD, float(LINE)
    for row in _rows(box):
        sizes = [_size(child) for child in row]
        width = max(width, sum(size[0] for size in sizes) + GAP * (len(row) - 1) + 2 * PAD)
        height += max(size[1] for size in sizes) + GAP
    return width, height + (PAD if box.children else 0)


def _drawn(box: OutlineBox, x: float, y: float) -> list[str]:
    width, height = _size(box)
    out = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{FILLS[box.kind]}" stroke="{STROKES[box.kind]}"/>',
        f'<text x="{x + PAD:.1f}" y="{y + 15:.1f}" xml:space="preserve">{escape(_text(box))}</text>',
    ]
    top = y + LINE
    for row in _rows(box):
        left = x + PAD
        for child in row:
            out += _drawn(child, left, top)
            left += _size(child)[0] + GAP
        top += max(_size(child)[1] for child in row) + GAP
    return out

"""The drawing as text: branches, then who serves whom, then NVLinks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from asyncfabric.observe.nvlink import NvLinks
from asyncfabric.observe.topology import Topology
from asyncfabric_services.topo.labels import distances_of, headline, link_lines, names_of, worker_label
from asyncfabric_services.topo.outline import OutlineBox, outline


def draw_text(topology: Topology, links: NvLinks) -> str:
    """Return the whole drawing."""
    lines = [headline(topology)]
    lines += _branches(outline(topology, links).children, "")
    lines += ["", "who serves whom"]
    for group in topology.groups:
        name = f"GPU {group.gpu}" if group.gpu >= 0 else "host"
        parts = [names_of(topology, group.nics) or "no NIC", distances_of(topology, group), worker_label(group)]
        lines.append(f"  {name:<6}  " + "; ".join(part for part in parts if part))
    if topology.spare_nics:
        lines.append(f"  spare   {names_of(topology, topology.spare_nics)}")
    if linked := link_lines(topology, links):
        lines += ["", "NVLinks", *linked]
    lines += [f"note: {note}" for note in topology.notes]
    return "\n".join(lines)


def _branches(boxes: list[OutlineBox], indent: str) -> Iterator[str]:
    for index, box in enumerate(boxes):
        last = index == len(boxes) - 1
        arrow = f"  <-> {box.partners}" if box.partners else ""
        yield f"{indent}{'└─' if last else '├─'} {box.label}{arrow}"
        yield from _branches(box.children, indent + ("   " if last else "│  "))

"""What nodes reported, as tables for people. Pure but for printing; JSON is printed by the commands themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncfabric_services.closing import wide_console
from asyncfabric_services.look.reports import NodeReport
from asyncfabric_services.terminal import plain

Column = tuple[str, Callable[[NodeReport], str]]
PIPE_WIDTH = 180  # of a table that goes into a file or a pipe


def in_bytes(value: float | None, unit: str = "B") -> str:
    """Return bytes as people read them, three digits and a decimal unit; empty for None."""
    if value is None:
        return ""
    for factor, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {name}{unit}"
    return f"{value:.3g} {unit}"


def in_time(seconds: float | None) -> str:
    """Return a duration as people read it; empty for None."""
    if seconds is None:
        return ""
    for least, factor, name in ((3600, 3600, "h"), (60, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if seconds >= least:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def number(value: float | None) -> str:
    """Return a number, empty for None."""
    return "" if value is None else f"{value:.6g}"


WHY: tuple[Column, ...] = (
    ("node", lambda row: row["node"]),
    ("who", lambda row: row["what"]),
    ("waits for", lambda row: row["waits_for"]),
    ("have", lambda row: f"{row['have']} of {row['need']}"),
    ("from", lambda row: ", ".join(row["missing_from"])),
    ("since", lambda row: in_time(row["for_s"])),
)
PEERS: tuple[Column, ...] = (
    ("node", lambda row: row["node"]),
    ("plane", lambda row: row["plane"]),
    ("peer", lambda row: row["peer"]),
    ("state", lambda row: row["state"]),
    ("carried by", lambda row: row.get("provider", "")),
    ("sent", lambda row: in_bytes(row.get("bytes_sent"))),
    ("in flight", lambda row: number(row.get("ops_in_flight"))),
    ("silent", lambda row: in_time(row.get("silent_s"))),
)
REGIONS: tuple[Column, ...] = (
    ("node", lambda row: row["node"]),
    ("region", lambda row: f"{row['id']:x}"),
    ("owner", lambda row: row["owner"]),
    ("bytes", lambda row: f"{row['length_bytes']:,}"),
    ("on", lambda row: row["device"]),
    ("peers may", lambda row: row["access"]),
    ("generation", lambda row: number(row["generation"])),
    ("age", lambda row: in_time(row["age_s"])),
    ("registered in", lambda row: in_time(row["cost_s"])),
    ("quarantined", lambda row: "yes" if row["quarantined"] else ""),
)
TOP: tuple[Column, ...] = (
    ("node", lambda row: row["node"]),
    ("role", lambda row: row["role"]),
    ("state", lambda row: row["state"]),
    ("peers", lambda row: number(row["peers"])),
    ("sent", lambda row: in_bytes(row["sent_bytes_per_s"], "B/s")),
    ("ops/s", lambda row: number(row["ops_per_s"])),
    ("tokens/s", lambda row: number(row["tokens_per_s"])),
    ("version", lambda row: number(row["version"])),
    ("behind", lambda row: number(row["versions_behind"])),
    ("requests", lambda row: number(row["requests"])),
    ("waits", lambda row: number(row["waits"])),
    ("pages held", lambda row: number(row["held_pages"])),
    ("free", lambda row: number(row["free_pages"])),
    ("quarantined", lambda row: number(row["quarantined_pages"])),
)


def update_line(node: str, row: NodeReport) -> str:
    """Return what became of an update of weights, for people."""
    ended = f"{node}: version {row['version']} was {row['outcome']} {in_time(row['ago_s'])} ago"
    if row["outcome"] != "committed":
        return f"{ended}: {row['reason']}"
    stages = ", ".join(f"{name} {in_time(row[f'{name}_s'])}" for name in ("prepare", "write", "verify", "decide"))
    saved = f", {in_bytes(row['saved_bytes'])} saved by codings" if row["saved_bytes"] else ""
    sent = f"{in_bytes(row['sent_bytes'])} sent{saved}"
    count = len(row["receivers"])
    return f"{ended}: {count} receiver{'s' * (count != 1)} in {in_time(row['seconds'])} ({stages}), {sent}"


def table_of(columns: Sequence[Column], rows: Sequence[NodeReport]) -> Table:
    """Return the rows as a table; what nodes report is neither markup nor commands of the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, _ in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(shown(row))) for _, shown in columns))
    return table


def console() -> Console:
    """Return where tables are printed: standard output as it is now."""
    return wide_console(PIPE_WIDTH)

"""How a demo closes: one object as JSON, or a table of figures, a word of judgement, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.table import Table

WIDTH = 100  # columns where stdout is no terminal


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What every closing object has."""

    seconds: float
    errors: list[str]

    @property
    def fine(self) -> bool:
        """Return whether nothing went wrong."""
        return not self.errors


def print_object(summary: Closing) -> None:
    """Print the closing object of `--json`."""
    print(msgspec.json.encode(summary).decode(), flush=True)


def print_table(summary: Closing, title: str, caption: str | None, rows: Mapping[str, str], note: str = "") -> None:
    """Print the figures, a note below them, and whether all is fine."""
    console = wide_console()
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, figure in rows.items():
        table.add_row(name, figure)
    console.print(table)
    if note:
        console.print(note, highlight=False, markup=False)
    word = "[bold green]fine[/bold green]" if summary.fine else "[bold red]WRONG[/bold red]"
    console.print(f"{word} after {summary.seconds:.1f} s", highlight=False)
    for error in summary.errors:
        console.print(error, style="red", highlight=False, markup=False)


def wide_console(columns: int = WIDTH) -> Console:
    """Return a console on standard output, so many columns wide where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=columns)

"""Where rows go: JSON lines or a table on stdout, progress on stderr, a picture when asked for.

The progress bar draws only between two measurements: a bar that animates takes a part of a core from what it reports
on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asyncfabric.bench.rows import Point
from asyncfabric_services.bench.report.table import WIDE, row_table


class BenchReport:
    """Collects the points of one command."""

    def __init__(self, *, as_json: bool, plot: Path | None, title: str) -> None:
        """Open the progress bar; `finish` must follow."""
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._notes: list[str] = []
        self._as_json = as_json
        self._plot = plot
        self._title = title
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._progress.add_task(title, total=0)
        self._progress.start()

    def expect(self, steps: int) -> None:
        """Announce that so many more steps will come."""
        self._progress.update(self._task, total=(self._progress.tasks[0].total or 0) + steps, refresh=True)

    def step(self, text: str) -> None:
        """Announce that one step is done and what is measured next."""
        self._progress.update(self._task, description=text, advance=1, refresh=True)

    def row(self, point: Point) -> None:
        """Publish one point."""
        row = point.as_row()
        self.rows.append(row)
        if self._as_json:
            click.echo(json.dumps(row))
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note about a row below the table; rows of JSON have it as keys."""
        self._notes.append(text)

    def check(self, what: str, verdict: str) -> bool:
        """Note a check; `verdict` is "" when all is well. Returns whether it was."""
        if verdict:
            self.failures.append(f"{what}: {verdict}")
        return not verdict

    def close(self) -> None:
        """End the progress bar; idempotent."""
        self._progress.stop()

    def finish(self) -> None:
        """Print the table and write the picture."""
        self.close()
        if not self._as_json:
            # A pipe has no width of its own: whoever reads it wants every column.
            console = Console(width=None if sys.stdout.isatty() else WIDE + 20)
            console.print(row_table(self._title, self.rows, console.width))
            for note in self._notes:
                click.echo(note)
        if self._plot is not None:
            from asyncfabric_services.bench.report.plot import write_plot

            write_plot(self._plot, self._title, self.rows)
        for failure in self.failures:
            click.echo(f"wrong: {failure}", err=True)

"""What people and scripts get to see: progress, the closing table, one summary line, or JSON objects."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median, quantiles

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from asyncfabric_services.closing import wide_console
from asyncfabric_services.demo.pair.overlap import Figures
from asyncfabric_services.demo.pair.protocol import PairHello, PairProgress
from asyncfabric_services.demo.settings import DemoSettings, Job

PIPED_WIDTH = 110  # columns where stdout is no terminal


class Summary(msgspec.Struct, frozen=True):
    """The closing object of `--json`."""

    demo: str
    provider: str
    model: str
    requests: int
    wrong_answers: int
    lost: int
    retries: int
    leaked_pages: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_gap_p50_ms: float
    gbytes_per_s: float
    hidden_share: float
    seconds: float
    error: str = ""

    @property
    def fine(self) -> bool:
        """Return whether every prompt was answered, identically, and nothing leaked."""
        return not (self.wrong_answers or self.lost or self.leaked_pages or self.error)


def summarize(
    settings: DemoSettings,
    rows: Sequence[Figures],
    *,
    model: str,
    requests: int,
    leaked_pages: int,
    seconds: float,
    error: str,
) -> Summary:
    """Put the rows of all prompts together; rates and shares are weighted by bytes and by busy time."""
    busy = sum(row.busy_ms for row in rows)
    streamed = [row.ttft_streamed_ms for row in rows] or [0.0]
    gaps = [row.ttft_streamed_ms - row.ttft_one_process_ms for row in rows] or [0.0]
    return Summary(
        demo="kv",
        provider=settings.provider,
        model=model,
        requests=requests,
        wrong_answers=sum(not row.identical for row in rows),
        lost=requests - len(rows),
        retries=0,
        leaked_pages=leaked_pages,
        ttft_p50_ms=median(streamed),
        ttft_p99_ms=quantiles(streamed, n=100, method="inclusive")[98] if len(streamed) > 1 else streamed[0],
        ttft_gap_p50_ms=median(gaps),
        gbytes_per_s=sum(row.bytes for row in rows) / busy / 1e6 if busy else 0.0,
        hidden_share=sum(row.hidden_share * row.busy_ms for row in rows) / busy if busy else 0.0,
        seconds=seconds,
        error=error,
    )


class JsonView:
    """One object per prompt on stdout."""

    model = ""

    def hello(self, role: str, hello: PairHello) -> None:
        """Keep the name of the model."""
        self.model = hello.model

    def progress(self, progress: PairProgress) -> None:
        """Show nothing."""

    def answered(self, figures: Figures) -> None:
        """Print the figures of one prompt."""
        print(msgspec.json.encode(figures).decode(), flush=True)

    def close(self, summary: Summary, rows: Sequence[Figures]) -> None:
        """Print the closing object."""
        print(msgspec.json.encode(summary).decode(), flush=True)
        if summary.error:
            print(summary.error, file=sys.stderr)


class TableView:
    """Bars while it runs (lines where stdout is no terminal), a table at the end."""

    def __init__(self, jobs: Sequence[Job], settings: DemoSettings) -> None:
        """Start drawing."""
        self.model = ""
        self._console = wide_console(PIPED_WIDTH)
        self._begin = time.monotonic()
        self._settings = settings
        self._jobs = len(jobs)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bars.start()
        self._tasks: dict[tuple[int, str], TaskID] = {}

    def hello(self, role: str, hello: PairHello) -> None:
        """State what a child runs on."""
        self.model = hello.model
        page_kib = hello.layout.page_bytes // 1024
        self._console.print(
            f"[bold]{role}[/bold] ready after {time.monotonic() - self._begin:.1f} s: {hello.model}; "
            f"{hello.pool_pages} pages per layer of {page_kib} KiB; rail {', '.join(hello.rails)}",
            highlight=False,
        )

    def progress(self, progress: PairProgress) -> None:
        """Move the bar of one stage of one prompt."""
        key = (progress.id, progress.stage)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"prompt {progress.id} {progress.stage}", total=progress.total)
        self._bars.update(self._tasks[key], completed=progress.done)

    def answered(self, figures: Figures) -> None:
        """Replace the bars of one prompt by a line."""
        for key in [key for key in self._tasks if key[0] == figures.id]:
            self._bars.remove_task(self._tasks.pop(key))
        verdict = "[green]identical[/green]" if figures.identical else f"[red]{'; '.join(figures.differences)}[/red]"
        self._console.print(
            f"prompt {figures.id + 1} of {self._jobs}: {figures.prompt_tokens} tokens, "
            f"{figures.bytes / 1e6:.1f} MB, {verdict}",
            highlight=False,
        )

    def close(self, summary: Summary, rows: Sequence[Figures]) -> None:
        """Stop the bars and draw the table."""
        self._bars.stop()
        if rows:
            self._console.print(_table(self._settings, rows))
        word = "[bold green]fine[/bold green]" if summary.fine else "[bold red]WRONG[/bold red]"
        same = len(rows) - summary.wrong_answers
        self._console.print(
            f"{word}: {same} of {summary.requests} prompts identical to one process, {summary.lost} lost, "
            f"{summary.leaked_pages} pages leaked, {summary.gbytes_per_s:.2f} GB/s, "
            f"{summary.hidden_share:.0%} of the transfer hidden, {summary.seconds:.1f} s",
            highlight=False,
        )
        if summary.error:
            self._console.print(summary.error, style="red", highlight=False, markup=False)


def _table(settings: DemoSettings, rows: Sequence[Figures]) -> Table:
    table = Table(
        title=f"KvCache over {settings.provider}: {settings.new_tokens} tokens decoded greedily for each prompt",
        caption="stream: first push to last arrival. transfer: time in which something was on the way. "
        "hidden: share of it before prefill's computation ended. TTFT: time to first token.",
        caption_justify="left",
    )
    for name in ("tokens", "pages", "MB", "stream\nms", "transfer\nms", "GB/s", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT ms\n1 process", "TTFT ms\nstreamed", "decode\nms/token", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.prompt_tokens),
            str(row.pages),
            f"{row.bytes / 1e6:.2f}",
            f"{row.stream_ms:.1f}",
            f"{row.busy_ms:.2f}",
            f"{row.gbytes_per_s:.2f}",
            f"{row.hidden_share:.0%}",
            f"{row.ttft_one_process_ms:.0f}",
            f"{row.ttft_streamed_ms:.0f}",
            f"{row.decode_step_ms:.1f}",
            "[green]yes[/green]" if row.identical else "[red]NO[/red]",
        )
    return table

"""From what became of the answers to the closing table and the closing object. Pure but for printing."""

from __future__ import annotations

import msgspec
from rich.table import Table

from asyncfabric_services.demo.protocol import Settings
from asyncfabric_services.demo_cluster.report import wide_console
from asyncfabric_services.demo_moe.story import NODES, VICTIM, Told

Answers = list[list[int]]


class Summary(msgspec.Struct, frozen=True):
    """The closing object of `--json`.

    Attributes:
        left_out: ranks that the others went on without.
        because: what they said of them.
        noticed_seconds: from the question until the others had gone on; most of it is the answer before the kill.
    """

    demo: str
    provider: str
    answers: int
    wrong_answers: int
    tokens_per_s: float
    left_out: list[int]
    because: str
    noticed_seconds: float
    seconds: float
    errors: list[str]

    @property
    def fine(self) -> bool:
        """Return whether every answer was right, and exactly the killed node was left out."""
        return self.answers > 0 and not self.wrong_answers and self.left_out == [VICTIM] and not self.errors


def summarize(settings: Settings, told: Told, whole: Answers, masked: Answers, seconds: float) -> Summary:
    """Judge the answers; `whole` and `masked` are those of one process with all experts, and without some.

    Answers of the second half that were complete before the kill have all experts, the others have the mask.
    """
    wrong = sum(said != right for said, right in zip(told.before, whole, strict=True))
    wrong += sum(said not in (right, fewer) for said, right, fewer in zip(told.after, whole, masked, strict=True))
    masked_answers = sum(said == fewer != right for said, right, fewer in zip(told.after, whole, masked, strict=True))
    errors = [f"{name} did not end in good order" for name in told.dirty_ends]
    if not masked_answers:
        errors.append("no answer was given with the mask")
    return Summary(
        demo="moe",
        provider=settings.provider,
        answers=len(told.before) + len(told.after),
        wrong_answers=wrong,
        tokens_per_s=told.tokens_per_s,
        left_out=sorted({rank for departure in told.departures for rank in departure.ranks}),
        because="; ".join(departure.because for departure in told.departures),
        noticed_seconds=sum(departure.seconds for departure in told.departures),
        seconds=seconds,
        errors=errors,
    )


def show(summary: Summary, *, as_json: bool) -> None:
    """Print the closing object, or a table."""
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
        return
    console = wide_console()
    table = Table(title=f"The experts of a model in {NODES} processes over {summary.provider}, one of them killed")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("answers", f"{summary.answers}")
    table.add_row("wrong answers", f"{summary.wrong_answers}")
    table.add_row("tokens per second, all nodes", f"{summary.tokens_per_s:.0f}")
    table.add_row("left out", ", ".join(f"rank {rank}" for rank in summary.left_out))
    table.add_row("from the question until the others had gone on", f"{summary.noticed_seconds:.1f} s")
    console.print(table)
    console.print(f"the others said: {summary.because}", highlight=False, markup=False)
    word = "[bold green]fine[/bold green]" if summary.fine else "[bold red]WRONG[/bold red]"
    console.print(f"{word} after {summary.seconds:.1f} s", highlight=False)
    for error in summary.errors:
        console.print(error, style="red", highlight=False, markup=False)

"""From what became of the answers to the closing table and the closing object. Pure but for printing."""

from __future__ import annotations

from asyncfabric_services.closing import Closing, print_object, print_table
from asyncfabric_services.demo.moe.scenario import NODES, VICTIM, MoeObserved
from asyncfabric_services.demo.settings import DemoSettings

Answers = list[list[int]]


class MoeSummary(Closing, frozen=True, kw_only=True):
    """The closing object of `--json`.

    Attributes:
        left_out: ranks that the others went on without.
        because: what they reported of them.
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

    @property
    def fine(self) -> bool:
        """Return whether every answer was right, and exactly the killed node was left out."""
        return self.answers > 0 and not self.wrong_answers and self.left_out == [VICTIM] and not self.errors


def summarize(
    settings: DemoSettings, observed: MoeObserved, whole: Answers, masked: Answers, seconds: float
) -> MoeSummary:
    """Judge the answers; `whole` and `masked` are those of one process with all experts, and without some.

    Answers of the second half that were complete before the kill have all experts, the others have the mask.
    """
    wrong = sum(given != right for given, right in zip(observed.before, whole, strict=True))
    wrong += sum(given not in (right, fewer) for given, right, fewer in zip(observed.after, whole, masked, strict=True))
    masked_answers = sum(
        given == fewer != right for given, right, fewer in zip(observed.after, whole, masked, strict=True)
    )
    errors = [f"{name} did not end in good order" for name in observed.dirty_ends]
    if not masked_answers:
        errors.append("no answer was given with the mask")
    return MoeSummary(
        demo="moe",
        provider=settings.provider,
        answers=len(observed.before) + len(observed.after),
        wrong_answers=wrong,
        tokens_per_s=observed.tokens_per_s,
        left_out=sorted({rank for departure in observed.departures for rank in departure.ranks}),
        because="; ".join(departure.because for departure in observed.departures),
        noticed_seconds=sum(departure.seconds for departure in observed.departures),
        seconds=seconds,
        errors=errors,
    )


def show(summary: MoeSummary, *, as_json: bool) -> None:
    """Print the closing object, or a table."""
    if as_json:
        print_object(summary)
        return
    rows = {
        "answers": f"{summary.answers}",
        "wrong answers": f"{summary.wrong_answers}",
        "tokens per second, all nodes": f"{summary.tokens_per_s:.0f}",
        "left out": ", ".join(f"rank {rank}" for rank in summary.left_out),
        "from the question until the others had gone on": f"{summary.noticed_seconds:.1f} s",
    }
    title = f"The experts of a model in {NODES} processes over {summary.provider}, one of them killed"
    print_table(summary, title, None, rows, f"the others reported: {summary.because}")

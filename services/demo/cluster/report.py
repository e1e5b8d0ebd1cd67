"""From what became of the requests to the closing table and the closing object. Pure but for printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from asyncfabric_services.closing import Closing, print_object, print_table
from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.scenario import Observed
from asyncfabric_services.demo.settings import DemoSettings


class ClusterSummary(Closing, frozen=True, kw_only=True):
    """The closing object of `--json`. Times per token are means of one request each."""

    demo: str
    provider: str
    requests: int
    wrong_answers: int
    lost: int
    retries: int
    leaked_pages: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    per_token_p50_ms: float
    per_token_p99_ms: float
    gbytes_per_s: float
    hidden_share: float

    @property
    def fine(self) -> bool:
        """Return whether every answer came and was right, and nothing leaked."""
        return self.requests > 0 and not (self.wrong_answers or self.lost or self.leaked_pages or self.errors)


def summarize(
    settings: DemoSettings, observed: Observed, expected: Mapping[LoadRequest, str], seconds: float
) -> ClusterSummary:
    """Judge the answers; `expected` are those of one process."""
    whole = [outcome for outcome in observed.outcomes if not outcome.error]
    ttft_p50, ttft_p99 = _percentiles([outcome.ttft_seconds for outcome in whole])
    token_p50, token_p99 = _percentiles([outcome.per_token_seconds for outcome in whole])
    errors = [outcome.error for outcome in observed.outcomes if outcome.error]
    return ClusterSummary(
        demo="kv",
        provider=settings.provider,
        requests=len(observed.outcomes),
        wrong_answers=sum(outcome.text != expected[outcome.ask] for outcome in whole),
        lost=len(errors),
        retries=observed.retries,
        leaked_pages=observed.leaked_pages,
        ttft_p50_ms=ttft_p50,
        ttft_p99_ms=ttft_p99,
        per_token_p50_ms=token_p50,
        per_token_p99_ms=token_p99,
        gbytes_per_s=observed.sent_bytes / observed.open_seconds / 1e9 if observed.open_seconds else 0.0,
        hidden_share=1 - observed.exposed_seconds / observed.open_seconds if observed.open_seconds else 0.0,
        seconds=seconds,
        errors=[*sorted(set(errors)), *(f"{name} did not end in good order" for name in observed.dirty_ends)],
    )


def show(summary: ClusterSummary, *, as_json: bool) -> None:
    """Print the closing object, or a table."""
    if as_json:
        print_object(summary)
        return
    rows = {
        "requests": f"{summary.requests}",
        "wrong answers": f"{summary.wrong_answers}",
        "lost": f"{summary.lost}",
        "retries": f"{summary.retries}",
        "leaked pages": f"{summary.leaked_pages}",
        "time to first token, p50 / p99": f"{summary.ttft_p50_ms:.0f} / {summary.ttft_p99_ms:.0f} ms",
        "time per token, p50 / p99": f"{summary.per_token_p50_ms:.1f} / {summary.per_token_p99_ms:.1f} ms",
        "streamed": f"{summary.gbytes_per_s:.3f} GB/s",
        "hidden": f"{summary.hidden_share:.0%}",
    }
    title = f"A cluster over {summary.provider}, scaled and hurt under load"
    caption = (
        "GB/s: over the time in which streams were open. hidden: share of that time before the end of the "
        "prompt's computation."
    )
    print_table(summary, title, caption, rows)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return median and 99th percentile in milliseconds."""
    if not seconds:
        return 0.0, 0.0
    last = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    return median(seconds) * 1e3, last * 1e3

"""`bench ttft`: time to the first token with a prefill and a decode process, against the same prompt in one process.

Both are measured in the decode process, in turn, in one run; what is compared are medians of the pairs.
`best_gap_ms` compares the best repeats of both: on a machine that others use too, the figure that they disturb least.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from asyncfabric.bench.measure import paired_ratio, percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.report.report import BenchReport

PREFILL_SHARE = 0.05
"""Of the prefill, what streaming may add to one step of decoding."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How the two nodes are set.

    Attributes:
        layers, hidden: of the random model.
        chunk_tokens: prompt tokens of one pass.
        page_tokens: tokens of one page.
    """

    layers: int = 8
    hidden: int = 512
    chunk_tokens: int = 256
    page_tokens: int = 16

    def settings(self, options: Options, longest: int) -> dict[str, str]:
        """Return the settings of a node, with pages for a prompt of `longest` tokens."""
        # Keys and values of each layer, in 4 bytes: as wide as the model, or 8 heads of at least 8.
        token_bytes = self.layers * 2 * max(self.hidden, 64) * 4
        return {
            "model.layers": str(self.layers),
            "model.hidden": str(self.hidden),
            "model.max_tokens": str(longest + self.page_tokens),
            "cache.page_tokens": str(self.page_tokens),
            "cache.prefixes": "drop",  # each prompt is computed whole
            "cache.memory": str(token_bytes * (longest + 2 * self.page_tokens)),
            "batch.chunk_tokens": str(self.chunk_tokens),
            "batch.most_waiting": "1",
            "cluster.rails": ",".join(options.rail_texts),
        }


def run_ttft(options: Options, report: BenchReport, lengths: tuple[int, ...], serving: Serving) -> None:
    """Measure each prompt length."""
    report.expect(len(lengths))
    with BenchPair("ttft", options.deadline_at) as pair:
        prefill, decode = pair.initiator, pair.target
        settings = serving.settings(options, max(lengths))
        prefill.start("serve", role="prefill", settings=settings)
        node = decode.call("serve", role="decode", settings=settings)
        source = prefill.finish()
        decode.call("source", address=source["address"], layout=source["layout"])
        for number, tokens in enumerate(lengths):
            report.step(f"a prompt of {tokens} tokens")
            _prompt(options, report, serving, decode, node, tokens, options.seed + 1000 * number)


def _prompt(
    options: Options, report: BenchReport, serving: Serving, decode: Any, node: dict[str, Any], tokens: int, seed: int
) -> None:
    alone: list[dict[str, Any]] = []
    streamed: list[dict[str, Any]] = []
    for turn in range(options.repeats + 1):
        if turn == 1:
            alone.clear()  # the first turn connected, and warmed both up
            streamed.clear()
        for ways in ((alone, "alone"), (streamed, "streamed"))[:: 1 if turn % 2 else -1]:
            ways[0].append(decode.call(ways[1], tokens=tokens, seed=seed + turn))
    wrong = sum(one["digest"] != other["digest"] for one, other in zip(alone, streamed, strict=True))
    ours, limits = ([one["seconds"] for one in many] for many in (streamed, alone))
    gap = statistics.median(mine - limit for mine, limit in zip(ours, limits, strict=True))
    step = statistics.median(one["step_seconds"] for one in alone)
    allowed = step + PREFILL_SHARE * statistics.median(limits)
    pages = -(-tokens // serving.page_tokens) * serving.layers
    gbytes_per_s, ops_per_s = rates(ours, 1, pages * node["page_bytes"])
    p50, p99 = percentiles_us([seconds * 1e9 for seconds in ours])
    report.row(
        Point(
            bench="ttft",
            figure=f"{tokens} tokens, {gap * 1e3:+.1f} of {allowed * 1e3:.1f} ms",
            provider=options.provider,
            bytes=node["page_bytes"],
            pages=pages,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=report.check(f"{tokens} tokens", f"{wrong} of {len(alone)} logits differ" if wrong else ""),
            limit="one_process",
            ratio=paired_ratio(ours, limits),
            detail={
                "prompt_tokens": tokens,
                "chunk_tokens": serving.chunk_tokens,
                "layers": serving.layers,
                "one_process_ms": significant(statistics.median(limits) * 1e3),
                "streamed_ms": significant(statistics.median(ours) * 1e3),
                "gap_ms": significant(gap * 1e3),
                "best_gap_ms": significant((min(ours) - min(limits)) * 1e3),
                "step_ms": significant(step * 1e3),
                "allowed_ms": significant(allowed * 1e3),
                "within": gap <= allowed,
                **{name: node[name] for name in ("library", "version") if node[name]},
            },
        )
    )

"""From what became of the versions to the closing table and the closing object. Pure but for printing."""

from __future__ import annotations

from statistics import median

from asyncfabric_services.closing import Closing, print_object, print_table
from asyncfabric_services.demo.weights.scenario import Scenario, WeightsObserved
from asyncfabric_services.demo.weights.verdict import Usual


class WeightsSummary(Closing, frozen=True, kw_only=True):
    """The closing object of `--json`. Seconds are medians over the committed versions."""

    demo: str
    provider: str
    form: str
    versions: int
    aborted: int
    torn: int
    wrong_bits: int
    compared: int
    tokens: int
    gbytes_per_s: float
    update_bytes: int
    update_s: float
    prepare_s: float
    write_s: float
    verify_s: float
    decide_s: float

    @property
    def fine(self) -> bool:
        """Return whether versions were served, all of them whole and right."""
        return self.compared > 0 and not (self.torn or self.wrong_bits or self.errors)


def summarize(scenario: Scenario, observed: WeightsObserved, usual: Usual, seconds: float) -> WeightsSummary:
    """Judge every version that a rollout served."""
    rows = [row for each in observed.served.values() for row in each]
    committed = [row for row in observed.updates if row["outcome"] == "committed"]
    sent: dict[int, int] = {}
    for each in observed.published.values():
        for row in each:
            if "stages" in row:
                sent[row["version"]] = sent.get(row["version"], 0) + row["stages"]["bytes"]
    rates = [sent[row["version"]] / row["seconds"] / 1e9 for row in committed if row["version"] in sent]
    errors = [f"{name} did not end in good order" for name in observed.dirty_ends]
    errors += [f"{name} served nothing" for name, each in observed.served.items() if not each]

    def middle(name: str) -> float:
        return round(median(row[name] for row in committed), 6) if committed else 0.0

    return WeightsSummary(
        demo="weights",
        provider=scenario.provider,
        form=scenario.form,
        versions=len(committed),
        aborted=len(observed.updates) - len(committed),
        torn=sum(bool(row["torn"]) for row in rows),
        wrong_bits=sum(usual.wrong(row) for row in rows),
        compared=len(rows),
        tokens=sum(row["tokens"] for row in rows),
        gbytes_per_s=round(median(rates), 4) if rates else 0.0,
        update_bytes=int(median(sent.values())) if sent else 0,
        update_s=middle("seconds"),
        prepare_s=middle("prepare_s"),
        write_s=middle("write_s"),
        verify_s=middle("verify_s"),
        decide_s=middle("decide_s"),
        seconds=round(seconds, 3),
        errors=errors,
    )


def show(summary: WeightsSummary, *, as_json: bool) -> None:
    """Print the closing object, or a table."""
    if as_json:
        print_object(summary)
        return
    rows = {
        "versions committed / aborted": f"{summary.versions} / {summary.aborted}",
        "served and compared": f"{summary.compared}",
        "torn": f"{summary.torn}",
        "wrong bits": f"{summary.wrong_bits}",
        "tokens generated meanwhile": f"{summary.tokens}",
        "bytes of an update": f"{summary.update_bytes:,}",
        "an update": f"{summary.update_s * 1e3:.1f} ms, {summary.gbytes_per_s:.3f} GB/s",
        "of it: memory opened": f"{summary.prepare_s * 1e3:.1f} ms",
        "of it: written": f"{summary.write_s * 1e3:.1f} ms",
        "of it: verified": f"{summary.verify_s * 1e3:.1f} ms",
        "of it: decision on the disk": f"{summary.decide_s * 1e3:.1f} ms",
    }
    title = f"Weights of a training over {summary.provider}, served in {summary.form}"
    caption = (
        "Bytes and logits of each version that served, against its checkpoint loaded the usual way. GB/s: over "
        "the whole update. Times are medians; writing and verifying overlap."
    )
    print_table(summary, title, caption, rows)

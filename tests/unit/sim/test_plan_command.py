"""`asyncfabric plan weights`: its object, its files, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncfabric.weights.plan.cards import card
from asyncfabric_services.plan.command import plan
from asyncfabric_services.plan.layout import cluster
from asyncfabric_services.plan.published import Published, published_of

TINY = ["weights", "--model", "tiny", "--train", "4", "--infer", "4"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments), standalone_mode=True)


def test_the_object_has_what_scripts_rely_on() -> None:
    result = run(*TINY, "--json", "--assume", "commit_s=0.5", "--assume", "offloaded=false")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    keys = {
        "predicted_seconds",
        "plan_seconds",
        "floor_seconds",
        "sender_imbalance",
        "receiver_imbalance",
        "assumptions",
    }
    assert keys <= set(found)
    assert found["assumptions"]["commit_s"] == 0.5 and found["assumptions"]["offloaded"] is False
    assert found["predicted_seconds"] > 0.5


def test_trainers_begin_spread_over_the_skew() -> None:
    found = [json.loads(run(*TINY, "--json", "--skew", skew).stdout.splitlines()[-1]) for skew in ("200ms", "0")]
    assert [each["assumptions"]["skew_s"] for each in found] == [0.2, 0.0]
    assert found[0]["predicted_seconds"] > found[1]["predicted_seconds"] + 0.15


def test_a_published_update_stands_beside_its_shape_only() -> None:
    def published(infer: int, *, fp8: bool = True) -> Published | None:
        chosen = card("kimi-k2")
        free: dict[str, Any] = dict.fromkeys(("stages", "fsdp", "ep", "replica_ranks", "tp"))
        return published_of(chosen, cluster(chosen, train=256, infer=infer, fp8=fp8, **free))

    found = published(128)
    assert found is not None and published(64) is None and published(128, fp8=False) is None
    assert found.summary()["seconds_without_waiting"] == 0.876
    (_, whole), (_, rest) = found.lines()
    assert "1.233 s" in whole and "357 ms of it waiting: like --skew 357ms" in whole
    assert rest == "0.876 s: like --skew 10ms"
    assert json.loads(run(*TINY, "--json").stdout.splitlines()[-1])["published"] is None


def test_the_skew_and_the_rates_have_published_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def assumed(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(*TINY, "--json", *arguments).stdout.splitlines()[-1])["assumptions"]
        return found

    assert (assumed()["skew_s"], assumed()["rail_efficiency"], assumed()["message_us"]) == (0.01, 0.925, 0.15)
    efa = assumed("--nic", "efa", "--assume", "message_us=0.7")
    assert (efa["rail_efficiency"], efa["message_us"]) == (0.84, 0.7)
    tiny = Published("tiny", 4, 4, 1.0, 0.25, "here")
    monkeypatch.setattr("asyncfabric_services.plan.published.PUBLISHED", (tiny,))
    assert assumed()["skew_s"] == 0.25
    assert assumed("--skew", "10ms")["skew_s"] == assumed("--assume", "skew_s=0.01")["skew_s"] == 0.01


def test_tables_and_pictures(tmp_path: Path) -> None:
    svg, trace = tmp_path / "timeline.svg", tmp_path / "trace.json"
    result = run(*TINY, "--svg", str(svg), "--perfetto", str(trace))
    assert result.exit_code == 0, result.output
    assert "with a skew of 10 ms between trainers" in result.output
    assert "predicted" in result.output and "rail_gbits_per_s" in result.output
    picture = ElementTree.parse(svg).getroot()
    assert picture.tag.endswith("svg") and len(picture.findall("{*}rect")) > 10
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"bring", "convert", "write", "receive"}
    assert {"trainer 3", "replica 1 rank 1"} <= {event["args"]["name"] for event in events if event["ph"] == "M"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--infer", "3", "--replica-ranks", "2"], "no multiple of 2 ranks of a replica"),
        (["--fsdp", "3"], "no multiple of"),
        (["--assume", "speed=3"], "expected NAME=VALUE"),
        (["--assume", "rail_efficiency=3"], "at most 1"),
        (["--assume", "commit_s=soon"], "--assume"),
        (["--tp", "3"], "tp must divide ranks"),
        (["--skew", "1 fortnight"], "is not a duration"),
        (["--skew", "1s", "--assume", "skew_s=1"], "are the same: give one of them"),
    ],
)
def test_numbers_that_do_not_fit_are_usage_errors(arguments: list[str], text: str) -> None:
    result = run(*TINY, *arguments)
    assert result.exit_code == 2
    assert text in result.output

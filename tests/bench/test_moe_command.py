"""Ring 7, as smoke: `bench moe` with few tokens between real processes, verified and counted. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")


def test_the_table_names_what_each_ratio_compares_with(capsys: pytest.CaptureFixture[str]) -> None:
    from asyncfabric_services.bench.moe.run import named
    from asyncfabric_services.bench.report.report import BenchReport

    report = BenchReport(as_json=False, plot=None, title="mixture of experts")
    report.note(named({"ratio": 0.41, "payload_ratio": 0.8, "exchange_ratio": 4.6}, 128, 4, 2))
    report.finish()
    text = capsys.readouterr().out
    assert "128 tokens, 4 processes on 2 cores: 0.41 of the speed of gloo's all_to_all of the same rows" in text
    assert "0.80 of that of one row for each choice" in text and "4.60 of the same job over gloo" in text


@pytest.mark.slow
def test_rows_are_whole_and_compared_with_gloo() -> None:
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "moe",
        "--json",
        "--processes",
        "2",
        "--tokens",
        "16",
        "--hidden",
        "128",
        "--top-k",
        "3",
        "--experts",
        "5",
        "--private",
        "4",
        "--count",
        "3",
        "--repeats",
        "2",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = [json.loads(line) for line in run.stdout.splitlines()]
    assert (row["bench"], row["tokens"], row["processes"], row["verified"]) == ("moe", 16, 2, True)
    assert row["limit"] == "gloo" and row["ratio"] > 0 and row["payload_ratio"] > 0 and row["exchange_ratio"] > 0
    assert row["cores"] >= 1
    assert row["payload_bytes"] > row["bytes"], "without sending a token once to each rank there is more"
    assert row["requests_per_step"] == [3, 3], "a record, the rest, and one write back"
    for rate in (row["gbytes_per_s"], row["ops_per_s"]):
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]


def test_shapes_follow_the_options_and_where_they_run() -> None:
    from asyncfabric_services.bench.moe.shapes import shapes_of

    (host,) = shapes_of((64,), ("bf16",), None, None, 4, None, 7, on_gpu=False)
    assert (host["ranks"], host["hidden"], host["num_experts"], host["private_tokens"]) == (4, 2048, 32, 7)
    gpus = shapes_of((128, 4096), (), 2, None, 8, 64, None, on_gpu=True)
    assert [(each["max_tokens"], each["in_dtype"], each.get("in_flight")) for each in gpus] == [
        (128, "float8_e4m3fn", None),
        (128, "bfloat16", None),
        (4096, "float8_e4m3fn", 1),
        (4096, "bfloat16", 1),
    ]
    assert {(each["ranks"], each["hidden"], each["num_experts"]) for each in gpus} == {(2, 7168, 64)}
    with pytest.raises(ValueError, match="9 distinct experts, there are 8"):
        shapes_of((128,), (), 2, None, 9, 8, None, on_gpu=True)


def test_floors_of_gpus_are_bytes_over_rates() -> None:
    from asyncfabric.moe import MoeConfig
    from asyncfabric_services.bench.moe.gpu_run import floors_of

    config = MoeConfig(
        num_experts=8, top_k=2, hidden=64, max_tokens=10, ranks=2, in_dtype="float8_e4m3fn", scale_block=16
    )
    rates = {"wire": 100.0, "memory": 1000.0, "pcie": 10.0}
    near, apart = (floors_of(config, 6, rates, each) for each in (False, True))
    row, back = 64 + 4 * 4, 128
    assert near["dispatch"] == (6 * row / 100, (10 + 12 + 20) * row / 1000)
    assert near["combine"] == (6 * back / 100, (20 + 12 + 10) * back / 1000)
    assert near["both"][0] == near["dispatch"][0] + near["combine"][0]
    assert apart["dispatch"] == (6 * row / 10, near["dispatch"][1])


@pytest.mark.parametrize("option", [["--apart"], ["--dtype", "fp8"]])
def test_options_of_gpus_are_refused_without_them(option: list[str]) -> None:
    command = [sys.executable, "-m", "asyncfabric_services", "bench", "moe", *option]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 2 and "are for --device cuda" in run.stderr

"""Ring 7, as smoke: every bench command with tiny counts, real processes, whole rows. Speed is not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

PROMISED_KEYS = {
    "bench",
    "provider",
    "bytes",
    "pages",
    "window",
    "processes",
    "gbytes_per_s",
    "ops_per_s",
    "p50_us",
    "p99_us",
    "verified",
}
SMALL = ("--repeats", "2", "--count", "8", "--region", "4MiB", "--deadline", "60s")


def asyncfabric(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncfabric_services", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environment,
    )


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    run = asyncfabric("bench", *arguments, *SMALL, "--json")
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert rows, run.stderr
    for row in rows:
        assert row.keys() >= PROMISED_KEYS
        assert row["verified"] is True
        for rate in (row["gbytes_per_s"], row["ops_per_s"]):
            assert rate.keys() == {"min", "median", "max"}
            assert 0 <= rate["min"] <= rate["median"] <= rate["max"]
    return rows


@pytest.mark.slow
def test_limits_gives_every_ceiling() -> None:
    rows = rows_of("limits", "--size", "64KiB,1MiB", "--page-bytes", "4KiB", "--pages", "64")
    assert {row["bench"] for row in rows} == {"limits"}
    assert {row["limit"] for row in rows} >= {
        "memcpy",
        "memcpy_nt",
        "memcpy_pages",
        "cma",
        "tcp_stream",
        "eventfd",
        "trio_eventfd",
    }
    assert all(row["cores"] in ("near", "far") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["allocated", "foreign"])
@pytest.mark.parametrize("level", [(), ("--engine-level",)])
def test_write_names_the_limit_it_is_compared_with(memory: str, level: tuple[str, ...]) -> None:
    rows = rows_of("write", "--size", "64KiB,1MiB", "--window", "4", "--memory", memory, *level)
    through = [row for row in rows if row["figure"] == "throughput"]
    assert [row["bytes"] for row in through] == [65536, 1 << 20]
    assert all(row["limit"] in (("cma",) if memory == "foreign" else ("memcpy", "memcpy_nt")) for row in through)
    assert all(row["ratio"] > 0 and row["memory"] == memory for row in through)


@pytest.mark.slow
def test_write_over_two_rails_and_under_a_fault_provider() -> None:
    rows = rows_of("write", "--size", "1MiB", "--provider", "fault+local", "--rails", "2", "--polling", "busy")
    assert {(row["provider"], row["rails"], row["polling"]) for row in rows} == {("fault+local", 2, "busy")}


@pytest.mark.slow
def test_an_engine_without_a_worker_is_driven_by_the_loop() -> None:
    (row,) = rows_of("write", "--size", "64KiB", "--engine-level", "--polling", "manual")
    assert (row["level"], row["polling"]) == ("engine", "manual")
    assert asyncfabric("bench", "write", "--polling", "manual").returncode == 2


@pytest.mark.slow
def test_unawaited_writes_state_how_memory_grew() -> None:
    (row,) = rows_of("write", "--unawaited", "64")
    assert row["figure"] == "unawaited" and row["window"] == 64
    assert len(row["resident_bytes"]) == 2


@pytest.mark.slow
def test_pages_are_compared_with_the_copy_loop_over_the_same_list() -> None:
    rows = rows_of("pages", "--page-bytes", "4KiB,16KiB", "--pages", "64")
    lists = [row for row in rows if row["figure"] == "scattered-pages"]
    assert [(row["bytes"], row["pages"]) for row in lists] == [(4096, 64), (16384, 64)]
    assert all(row["limit"] in ("memcpy_pages", "memcpy_nt_pages") and row["ratio"] > 0 for row in lists)
    (long_call,) = [row for row in rows if row["figure"] == "call-keeps-loop"]
    assert long_call["call_us"] > 0


@pytest.mark.slow
def test_lists_in_flight_have_no_page_in_common() -> None:
    rows = rows_of("pages", "--page-bytes", "64KiB", "--pages", "64", "--window", "3")
    (lists,) = [row for row in rows if row["figure"] == "scattered-pages"]
    assert (lists["pages"], lists["window"]) == (21, 3), "64 pages of the region, shared by three lists"


@pytest.mark.slow
def test_gpus_that_are_not_there_are_missed_by_name() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU: `make gpu` runs the benches on it")
    run = asyncfabric("bench", "write", "--device", "cuda", "--deadline", "60s")
    assert run.returncode == 3 and "torch sees no GPU" in run.stderr
    assert asyncfabric("bench", "write", "--device", "cuda", "--provider", "tcp").returncode == 2


@pytest.mark.slow
def test_notify_has_all_figures() -> None:
    rows = rows_of("notify")
    figures = {row["figure"]: row for row in rows}
    assert figures.keys() == {
        "native-round-trip",
        "native-write-round-trip",
        "write-seen-by-spin",
        "spin-round-trip",
        "await-round-trip",
        "awaited-together",
        "blocking-write",
        "idle",
    }
    assert figures["await-round-trip"]["limit"] == "trio_eventfd" and figures["await-round-trip"]["ratio"] > 0
    assert 0 <= figures["idle"]["core_share"] <= 2


@pytest.mark.slow
def test_messages_are_compared_with_signals() -> None:
    figures = {row["figure"]: row for row in rows_of("messages")}
    assert figures.keys() >= {
        "signal-await-round-trip",
        "message-await-round-trip",
        "signal-spin-round-trip",
        "message-spin-round-trip",
        "message-await-one-way",
        "message-spin-one-way",
    }
    for way in ("await", "spin"):
        trip = figures[f"message-{way}-round-trip"]
        assert trip["limit"] == "signal" and trip["ratio"] > 0 and trip["p50_us"] > 0


@pytest.mark.slow
def test_scatter_reaches_every_target() -> None:
    rows = rows_of("scatter", "--targets", "1,3,8")
    assert [row["targets"] for row in rows] == [1, 3, 8]
    assert all(row["us_per_target"] > 0 for row in rows)


@pytest.mark.slow
def test_table_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "rows.png"
    run = asyncfabric("bench", "write", "--size", "64KiB", *SMALL, "--plot", str(picture))
    assert run.returncode == 0, run.stderr
    assert "throughput" in run.stdout and "ratio" in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_wrong_use_is_status_2_and_a_late_run_is_status_124() -> None:
    assert asyncfabric("bench", "write", "--size", "64XiB").returncode == 2
    assert asyncfabric("bench", "fly").returncode == 2
    late = asyncfabric("bench", "write", "--deadline", "1ms")
    assert late.returncode == 124 and "deadline" in late.stderr


@pytest.mark.slow
def test_a_region_that_is_too_small_is_wrong_use() -> None:
    run = asyncfabric("bench", "write", "--size", "1MiB", "--region", "64KiB")
    assert run.returncode == 2 and "64 KiB" in run.stderr


def test_version_needs_no_numpy() -> None:
    program = (
        "import sys\n"
        "from asyncfabric_services.cli import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'numpy', 'torch', 'trio', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)

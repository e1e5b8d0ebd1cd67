"""The dashboard of 200 simulated nodes: how long a moment takes at the server and in a browser, what looking costs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

for needed in ("hypercorn", "selenium"):
    pytest.importorskip(needed, reason=f"the directory and its browser need {needed}")

from page_browser import PHONE, WIDE, Browser  # noqa: E402
from page_checks import check_page  # noqa: E402
from simulated_nodes import EVIL, look, name_of, role_of  # noqa: E402

from asyncfabric_services.dashboard.feed import DashboardFeed  # noqa: E402
from asyncfabric_services.dashboard.history import NodeHistory  # noqa: E402
from asyncfabric_services.dashboard.rows import rows_of  # noqa: E402
from asyncfabric_services.look.rates import Sample  # noqa: E402
from asyncfabric_services.look.reports import LOOK  # noqa: E402

COUNT = 200
MOST_S = 0.1
IDLE_S = 4.0
MOMENTS = 16
PROGRAM = Path(__file__).parent / "simulated_nodes.py"


@contextmanager
def crowd(folder: Path) -> Iterator[str]:
    """Run the simulation; gives where its dashboard is."""
    folder.chmod(0o700)
    command = [sys.executable, "-P", str(PROGRAM), str(folder), str(COUNT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        yield child.stdout.readline().strip()
        child.stdin.close()


def times(page: str) -> dict[str, float]:
    with urlopen(f"{page}/times") as answer:
        return dict(json.load(answer))


def test_a_browser_shows_all_of_them_in_time_and_nobody_pays_for_nobody(browser: Browser, tmp_path: Path) -> None:
    with crowd(tmp_path) as page:
        before = times(page)
        time.sleep(IDLE_S)
        idle = times(page)
        assert idle["times"] == before["times"] == 0
        share = (idle["cpu_s"] - before["cpu_s"]) / IDLE_S
        assert share < 0.01, f"{share:.2%} of a core while nobody looks"
        browser.view(WIDE, "light")
        browser.driver.get(page)
        busy_s, applied = browser.busy_s(), 0
        deadline = time.monotonic() + 60
        while applied < MOMENTS:
            assert time.monotonic() < deadline, applied
            time.sleep(0.2)
            applied = len(browser.run("performance.getEntriesByName('apply')"))
        cpu_ms = 1e3 * (browser.busy_s() - busy_s) / applied
        wall_ms = statistics.median(browser.run("performance.getEntriesByName('apply').map((one) => one.duration)"))
        print(
            f"a moment of {COUNT} nodes takes a browser {cpu_ms:.1f} ms of its main thread, {wall_ms:.1f} ms to apply"
        )
        print(f"the directory uses {share:.3%} of a core while nobody looks")
        assert len(browser.texts(".tile .name")) == COUNT + 1
        assert any(text.startswith(EVIL) for text in browser.texts("#waits .for")), "what a node reports is text"
        assert browser.run("document.querySelectorAll('#waits img, #detail img, td img').length") == 0
        for size, scheme in ((PHONE, "dark"), (WIDE, "light")):
            browser.view(size, scheme)
            time.sleep(1.0)
            check_page(browser)
        browser.picture("200")
        assert browser.complaints() == []
        assert cpu_ms < 1e3 * MOST_S, "style and layout included"
        browser.driver.get("about:blank")


def test_a_moment_is_built_and_encoded_in_time() -> None:
    members = [
        {
            "name": name_of(number),
            "role": role_of(number),
            "state": "ready",
            "http": "http://x:1",
            "incarnation": str(number),
        }
        for number in range(COUNT)
    ]
    histories = {str(number): NodeHistory() for number in range(COUNT)}
    feed, took = DashboardFeed(), []

    def sample(number: int, at: float) -> Sample:
        seen = LOOK.decode(json.dumps(look(number, COUNT, at)))
        return Sample(at, seen.health, seen.metrics, seen.why, seen.peers, seen.updates)

    for moment in range(7):
        samples: list[Any] = [sample(number, 1 + moment / 2) for number in range(COUNT)]
        began = time.process_time()
        for number, one in enumerate(samples):
            histories[str(number)].take(one)
        feed.publish(rows_of(members, histories))
        due, _ = feed.due(moment)
        took.append(time.process_time() - began)
    print(f"a moment of {COUNT} nodes is built and encoded in {1e3 * statistics.median(took):.1f} ms: {len(due)} bytes")
    assert statistics.median(took) < MOST_S, took

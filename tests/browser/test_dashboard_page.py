"""The dashboard in a real browser, over a real cluster that answers requests: a node is killed, one drains, all end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

for needed in ("torch", "transformers", "hypercorn", "selenium"):
    pytest.importorskip(needed, reason=f"the cluster and its browser need {needed}")

import trio  # noqa: E402
from page_browser import PHONE, WIDE, Browser  # noqa: E402
from page_checks import check_page  # noqa: E402

from asyncfabric_services.demo.nodes import open_nodes, plan_of  # noqa: E402
from asyncfabric_services.launch.local import LocalLauncher  # noqa: E402

MODEL = {"MODEL__LAYERS": "3", "MODEL__HIDDEN": "64", "MODEL__QUERY_HEADS": "4", "MODEL__KV_HEADS": "2"}
SETTINGS = {f"ASYNCFABRIC_{key}": value for key, value in (MODEL | {"CACHE__MEMORY": "16MiB"}).items()}
NODES = ("prefill-1", "prefill-2", "decode-1", "decode-2", "router")
PATIENCE_S = 60.0
SEEN_S = 2.0
BUSY = "document.querySelectorAll('#lines .rail:not(.idle)').length"
STATES = """Object.fromEntries([...document.querySelectorAll('.tile')]
  .map((one) => [one.firstChild.textContent, one.dataset.state]))"""


async def until(seen: Callable[[], Any], seconds: float = PATIENCE_S) -> float:
    """Wait until the browser shows something; return how long that took."""
    began = time.monotonic()
    while not await trio.to_thread.run_sync(seen):
        assert time.monotonic() < began + seconds, "the page does not show it"
        await trio.sleep(0.02)
    return time.monotonic() - began


async def ask(router: str, number: int) -> None:
    """Ask for one answer after the other."""
    ask = {"model": "asyncfabric-random", "prompt": f"{number} A page is written once. " * 60, "max_tokens": 24}
    body = json.dumps(ask | {"temperature": 0, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    while True:
        async with await trio.open_tcp_stream("127.0.0.1", int(router.rpartition(":")[2])) as stream:
            await stream.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            async for _ in stream:
                pass


async def play(browser: Browser) -> None:
    async with open_nodes(SETTINGS) as launcher:
        directory = await launcher.start(plan_of("directory"))
        async with trio.open_nursery() as starting:
            for name in NODES:
                starting.start_soon(launcher.start, plan_of(name))
        async with trio.open_nursery() as clients:
            for number in range(4):
                clients.start_soon(ask, launcher.running["router"].http, number)
            await watch(browser, directory.http, launcher)
            clients.cancel_scope.cancel()
        assert await trio.to_thread.run_sync(browser.complaints) == []
        await launcher.end("directory")
        await until(lambda: browser.texts("#link") == ["reconnecting"])


async def watch(browser: Browser, page: str, launcher: LocalLauncher) -> None:
    browser.view(WIDE, "light")
    await trio.to_thread.run_sync(browser.driver.get, page)
    await until(lambda: set(browser.run(STATES).values()) == {"ready"} and len(browser.run(STATES)) == 1 + len(NODES))
    await until(lambda: browser.run(BUSY))
    await until(lambda: "none lately" not in browser.texts("#totals .remark"))
    for name, size, scheme in (("dark", WIDE, "dark"), ("phone", PHONE, "light"), ("light", WIDE, "light")):
        browser.view(size, scheme)
        await trio.sleep(0.7)  # a moment passes, and is drawn anew at this size
        await trio.to_thread.run_sync(check_page, browser)
        await until(lambda: browser.run(BUSY) > 1)
        await trio.to_thread.run_sync(browser.picture, name)
    await trio.to_thread.run_sync(by_keyboard, browser)
    await launcher.kill("decode-2")
    took = await until(lambda: browser.run(STATES).get("decode-2") != "ready", SEEN_S)
    print(f"the page shows a killed node after {took:.2f} s")
    await until(lambda: "decode-2" not in browser.run(STATES))
    assert ("lost", "decode-2") in zip(browser.texts("#events .pill"), browser.texts("#events strong"), strict=True)
    await launcher.end("prefill-2")
    await until(lambda: "prefill-2" not in browser.run(STATES))
    kinds = list(zip(browser.texts("#events .pill"), browser.texts("#events strong"), strict=True))
    assert ("draining", "prefill-2") in kinds and ("left", "prefill-2") in kinds
    assert browser.texts("#announce") != [""], "screen readers are notified"


def by_keyboard(browser: Browser) -> None:
    """A node is chosen and let go without a mouse."""
    from selenium.webdriver.common.keys import Keys

    browser.run("document.querySelector('.tile[aria-label^=decode-1]').focus()")
    keyboard = browser.driver.switch_to.active_element
    keyboard.send_keys(Keys.ENTER)
    assert browser.texts("#h-detail") == ["decode-1"]
    assert not browser.run("document.getElementById('detail').hidden")
    assert "decode" in browser.texts("#detail dd")
    keyboard.send_keys(Keys.ESCAPE)
    assert browser.run("document.getElementById('detail').hidden")


def test_the_page_shows_what_becomes_of_a_cluster(browser: Browser) -> None:
    trio.run(partial(play, browser))

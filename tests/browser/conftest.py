"""A real browser without a window; `--pictures FOLDER` writes what docs/guide/dashboard.md shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from page_browser import Browser

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", help="A folder for the pictures of the guide.")


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="NO BROWSER TEST RAN: selenium is missing")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(programs.values()):
        pytest.skip(f"NO BROWSER TEST RAN: {programs}; `make browser` installs tests/browser/packages.txt")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    try:
        yield Browser(driver, request.config.getoption("--pictures"))
    finally:
        driver.quit()

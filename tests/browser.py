"""Headless Chromium for tests of pages; as a program it writes the screenshots of the documentation to FOLDER."""

from __future__ import annotations

import base64
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from observed import Still, snapshot
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from memreclaim.service.app import RankApp
from memreclaim.service.client import Client
from memreclaim.service.desk import Desk
from memreclaim.service.head import Head
from memreclaim.service.settings import ServiceSettings
from memreclaim.service.thread import HttpThread

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
]


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A fresh browser that keeps its console's messages."""
    with TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def look(driver: webdriver.Chrome, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
    """Choose window and colours."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def loaded(driver: webdriver.Chrome, url: str, seconds: float = 30.0) -> None:
    """Open a page and wait until its figures are there."""
    driver.get(url)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if driver.find_element(By.ID, "age").text == "live" and driver.find_element(By.ID, "net").text.strip():
            return
        time.sleep(0.05)
    message = f"{url} shows {driver.find_element(By.ID, 'age').text!r}"
    raise AssertionError(message)


def picture(driver: webdriver.Chrome, path: Path) -> None:
    """The whole page as PNG."""
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def made_up(mismatch_on: int | None = 2, ranks: int = 4) -> Iterator[tuple[str, list[str]]]:
    """A head node with made-up ranks of V4.1 at TP4; gives its URL and theirs."""
    with ExitStack() as stack:
        urls = []
        for index in range(ranks):
            rank = Still(snapshot(index, mismatch=11 if index == mismatch_on else None))
            settings = ServiceSettings(port=0)
            served = HttpThread(RankApp(rank, Desk({}, rank.journal), settings).asgi, settings)  # type: ignore[arg-type]
            served.start()
            stack.callback(served.close)
            urls.append(served.url)
        head = Head(urls, ServiceSettings(port=0), expected=ranks, client=Client())
        head.start()
        stack.callback(head.close)
        yield head.url, urls


def main(folder: str) -> None:
    """Write the screenshots."""
    shots = (
        ("status-head-light.png", True, 1200, 1240, False, False),
        ("status-head-dark.png", True, 1200, 1240, True, False),
        ("status-rank-phone.png", False, 390, 1690, False, True),
        ("status-rank-phone-dark.png", False, 390, 1690, True, True),
    )
    with made_up() as (head, ranks), chromium() as driver:
        for name, of_head, width, height, dark, mobile in shots:
            look(driver, width, height, dark=dark, mobile=mobile)
            loaded(driver, head if of_head else ranks[2])
            cell = driver.find_element(By.CSS_SELECTOR, ".cell.mismatch[data-key]")
            driver.execute_script("arguments[0].focus({preventScroll: true})", cell)
            picture(driver, Path(folder) / name)


if __name__ == "__main__":
    main(sys.argv[1])

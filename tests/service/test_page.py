"""The status page in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from observed import QUIET, SCRAPE_TOKEN, engine, plant
from service_calls import get, until

from memreclaim.service import page

selenium = pytest.importorskip("selenium", reason="needs selenium")
import browser  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from observed import Engine
    from selenium.webdriver import Chrome

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (browser.CHROMIUM.exists() and browser.DRIVER.exists()),
        reason="needs Debian's chromium and chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    """One browser."""
    with browser.chromium() as made:
        yield made


@pytest.fixture(scope="module")
def planted(checkpoint: Path) -> Iterator[Engine]:
    """A rank whose second layer has no exact twin."""
    with engine(str(checkpoint), reclaim=False) as made:
        plant(made.model)
        made.service.reclaim_at_start()
        yield made


def text(driver: Chrome, identifier: str) -> str:
    """What an element shows."""
    return driver.find_element(By.ID, identifier).text


def signs(driver: Chrome) -> list[str]:
    """The sign on each cell, read at one moment, since the page redraws itself."""
    found: list[str] = driver.execute_script(
        "return [...document.querySelectorAll('#map button')].map((cell) => cell.textContent)"
    )
    return found


def test_page_shows_the_planted_mismatch_in_words(driver: Chrome, planted: Engine) -> None:
    """State, notice, legend and cell say it, not only a colour; what was gained is there."""
    browser.look(driver, 1200, 1000)
    browser.loaded(driver, planted.service.url)
    assert text(driver, "state") == "≠ serving, a layer does not match"
    assert "layers.1.attn.wo_a" in text(driver, "notice")
    assert "no exact twin 1" in text(driver, "legend")
    assert text(driver, "net") == "32.7 kB gained"
    cells = driver.find_elements(By.CSS_SELECTOR, "#map button")
    assert [cell.text for cell in cells] == ["✓", "≠", "✓"]
    assert "reclaimed" in (cells[0].get_attribute("aria-label") or "")


def test_map_works_by_keyboard(driver: Chrome, planted: Engine) -> None:
    """Tab reaches the map, arrows move in it, and the layer in focus is explained with its first element."""
    browser.loaded(driver, planted.service.url)
    driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    first = driver.switch_to.active_element
    assert first.get_attribute("data-key") == "TP0/target/layers.0.attn.wo_a"
    first.send_keys(Keys.ARROW_RIGHT)
    assert driver.switch_to.active_element.get_attribute("data-key") == "TP0/target/layers.1.attn.wo_a"
    detail = text(driver, "detail")
    assert "layers.1.attn.wo_a · TP0 · no exact twin" in detail
    assert re.search(r"1 element differs\. First at \(0, 0\): weight 0x[0-9a-f]{4}, twin 0x[0-9a-f]{4}", detail)
    driver.switch_to.active_element.send_keys(Keys.END)
    assert "draft" in text(driver, "detail")


def test_pointing_explains_too(driver: Chrome, planted: Engine) -> None:
    """Hovering shows the same words."""
    from selenium.webdriver import ActionChains

    browser.loaded(driver, planted.service.url)
    cell = driver.find_element(By.CSS_SELECTOR, "#map .mismatch")
    ActionChains(driver).move_to_element(cell).perform()
    assert "no exact twin" in text(driver, "detail")


def test_page_is_live_without_reload(driver: Chrome, checkpoint: Path) -> None:
    """A restore changes the map and the figures of an open page."""
    with engine(str(checkpoint)) as made:
        browser.loaded(driver, made.service.url)
        assert signs(driver) == ["✓"] * 3
        made.reclaimer.restore(made.model)
        until(lambda: signs(driver) == ["↺"] * 3)
        until(lambda: text(driver, "net").startswith("0 kB"))
    until(lambda: "no answer" in text(driver, "age"))
    driver.get_log("browser")  # the connection that was refused is the point of the last line


def test_token_is_asked_for_once(driver: Chrome, checkpoint: Path) -> None:
    """A guarded service shows nothing until the token was given."""
    with engine(str(checkpoint), replace(QUIET, scrape_token=SCRAPE_TOKEN)) as made:
        driver.get(made.service.url)
        until(lambda: driver.find_elements(By.ID, "token"))
        assert text(driver, "net").strip() == ""
        driver.find_element(By.ID, "token").send_keys(SCRAPE_TOKEN + Keys.ENTER)
        until(lambda: text(driver, "state") == "✓ ready")
        driver.execute_script("sessionStorage.clear()")
    driver.get_log("browser")  # 401 is what was tested


@pytest.mark.parametrize(("width", "mobile"), [(360, True), (390, True), (768, False), (1600, False)])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_at_any_width(driver: Chrome, width: int, *, mobile: bool, dark: bool) -> None:
    """43 layers on 4 ranks fit a phone and a desk, light and dark, without scrolling sideways or a console message."""
    with browser.made_up() as (head, _):
        browser.look(driver, width, 900, dark=dark, mobile=mobile)
        driver.get_log("browser")
        browser.loaded(driver, head)
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        assert len(driver.find_elements(By.CSS_SELECTOR, "#map button")) == 4 * 43
        assert driver.get_log("browser") == []


@pytest.mark.parametrize("dark", [False, True])
def test_words_have_contrast(driver: Chrome, *, dark: bool) -> None:
    """Text and cells reach WCAG's 4.5 to 1 against what is behind them, light and dark."""
    with browser.made_up() as (head, _):
        browser.look(driver, 1200, 900, dark=dark)
        browser.loaded(driver, head)
        low = driver.execute_script(_CONTRAST)
    assert low == []


_CONTRAST = """
const parse = (c) => c.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const f = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
const behind = (node) => {
  for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
const low = [];
const words = "h1, h2, .badge, .who, dt, dd, .lead, .big, .bar span, .cell, .notice, .log q, time, em, footer span";
for (const node of document.querySelectorAll(words)) {
  if (!node.textContent.trim()) continue;
  const a = light(parse(getComputedStyle(node).color)), b = light(behind(node));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) low.push(`${node.className || node.tagName}: ${node.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
}
return [...new Set(low)];
"""


def test_page_is_small_and_needs_nothing_from_outside(planted: Engine) -> None:
    """Under 100 KB, and no address in it but its own and two names of XML and SVG."""
    code, body = get(planted.service.url, "/")
    assert code == 200
    assert len(body) < 100_000
    assert set(re.findall(r"https?://[^'\"\s)]+", page.HTML)) == {"http://www.w3.org/2000/svg"}

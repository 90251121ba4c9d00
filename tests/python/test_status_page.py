"""The status page as a browser shows it: light and dark, narrow and wide, with many parameters."""

import os
from pathlib import Path

import dmuond
import needs
import pytest
from browser import Browser
from daemons import Daemons, free_port
from ten_thousand import PARAMETERS, register
from test_core_client import scalars
from test_metrics import published
from test_programs import wait_for

needs.program("chromium", "apt: chromium")

WINDOWS = {"narrow": (390, 844), "wide": (1280, 900)}
# A folder: the windows are kept there as pictures, for the documents.
PICTURES = os.environ.get("DMUOND_PICTURES")

# Lists texts whose contrast with what lies behind them is below 4.5, as WCAG 2.1 (1.4.3) counts it.
FAINT = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = numbers(color).slice(0, 3).map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (numbers(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.closest("svg")) continue;
    const a = light(getComputedStyle(element).color), b = light(behind(element));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(element.tagName + " " + element.textContent.slice(0, 40));
  }
  return faint;
})()"""
# Tells how large the smallest letters of the page are, in pixels.
SMALLEST = """Math.min(...[...document.body.querySelectorAll("*")]
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => !e.closest("title"))
  .map((e) => parseFloat(getComputedStyle(e).fontSize)))"""
# Lists bars that reach beyond their picture.
OUTSIDE = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("rect")].filter((rect) => {
    const r = rect.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 ||
        r.bottom > box.bottom + 1;
  }).map((rect) => rect.outerHTML);
})"""


@pytest.fixture(scope="module")
def page():
    """Address of the pages of a daemon whose job has many parameters and has made some steps."""
    metrics = f"127.0.0.1:{free_port()}"
    with Daemons() as daemons:
        (address,) = daemons.start(1, 4, f"--metrics_address={metrics}")
        with dmuond.Session(address, job="pretrain", rank=0, world_size=1) as session:
            register(session)
            for _ in range(20):
                session.step(scalars())
            wait_for(lambda: published(metrics, 20))
            yield f"http://{metrics}"


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["statusz", "routing"])
def test_a_page_can_be_read_in_any_window(page, browser, name, window, scheme) -> None:
    width, height = WINDOWS[window]
    browser.show(f"{page}/{name}", width, height, scheme)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(FAINT) == []
    assert browser.value(SMALLEST) >= 11
    assert browser.value(OUTSIDE) == []
    # Nothing comes from elsewhere, nor is anything wrong.
    assert browser.requested() == [f"{page}/{name}"]
    assert browser.complaints() == []
    if PICTURES is not None:
        browser.picture(Path(PICTURES) / f"{name}-{window}-{scheme}.png")


def test_whether_all_is_right_is_seen_at_once(page, browser) -> None:
    for width, height in WINDOWS.values():
        browser.show(f"{page}/statusz", width, height, "light")
        verdict = "document.getElementById('verdict')"
        assert browser.value(f"{verdict}.getBoundingClientRect().bottom") <= height / 2
        assert browser.value(f"{verdict}.textContent").startswith("All right.")
        assert browser.value("document.title") == "all right, step 20, node 0"


def test_a_picture_has_a_bar_for_each_part_of_each_step_or_each_lane(page, browser) -> None:
    browser.show(f"{page}/statusz", *WINDOWS["wide"], "light")
    steps, lanes = "document.querySelectorAll('svg')[0]", "document.querySelectorAll('svg')[1]"
    # The first weights are a step without an update.
    assert browser.value(f"{steps}.querySelectorAll('g').length") == 1 + 20
    assert browser.value(f"{steps}.querySelectorAll('rect').length") == 4 * (1 + 20)
    assert browser.value(f"{lanes}.querySelectorAll('rect').length") == 4


def test_the_table_of_routes_has_every_parameter(page, browser) -> None:
    browser.show(f"{page}/routing", *WINDOWS["wide"], "light")
    assert browser.value("document.querySelectorAll('tr').length") == PARAMETERS + 1

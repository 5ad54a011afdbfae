"""The dashboard in a real browser. Skipped where there is none: `apt-get install chromium` and the `dev` extra."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from serve_cases import QUESTION, MakeApp, running

from slipstream.serve.service import Service

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = os.environ.get("SLIPSTREAM_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path, and SLIPSTREAM_CHROMIUM names none"
)

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
EVIL = "<img src=x onerror=alert(1)>"

# The least contrast between a text and what it stands on, over all elements that hold text themselves.
LEAST_CONTRAST = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
    }
  };
  let least = 21;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(element instanceof SVGElement ? style.fill : style.color), light(behind(element))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
}"""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens the dashboard of a server; the page must have no error and send no request to another server."""
    faults: list[str] = []
    contexts: list[Any] = []

    def open_(address: str, after: str = "", **options: Any) -> Any:
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((address, "data:")) else faults.append(f"asked {request.url}")
            ),
        )
        page.goto(f"{address}/dashboard{after}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert faults == []


def ask(address: str, **body: Any) -> None:
    asked = {"prompt": QUESTION, "max_tokens": 40, "ignore_eos": True, "seed": 1, **body}
    httpx2.post(f"{address}/v1/completions", json=asked, timeout=60).raise_for_status()


@contextmanager
def served(make_app: MakeApp, **config: Any) -> Iterator[tuple[str, Service]]:
    app = make_app(**config)
    with running(app) as (address, _):
        yield address, app.state.service


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_figures_appear(make_app: MakeApp, open_page: Open, viewport: dict[str, int], scheme: str) -> None:
    with served(make_app) as (address, _):
        for task in ("sql", "chat", ""):
            ask(address, task=task)
        page = open_page(address, viewport=viewport, color_scheme=scheme)
        page.wait_for_selector("#tasks tbody tr:nth-child(3)")
        assert page.inner_text("#state") == "live"
        tiles = dict(
            page.eval_on_selector_all(
                ".tile",
                "tiles => tiles.map((tile) => [tile.children[0].innerText, tile.children[1].innerText])",
            )
        )
        assert tiles["Acceptance α"].endswith("%")
        assert float(tiles["Acceptance length τ"]) > 1
        assert tiles["Answers under way"] == "0"
        assert page.locator("#positions .track").count() == 4
        assert "draft" in page.inner_text("#shares")
        assert "learning (1 of 100)" in page.inner_text("#tasks")
        assert page.locator("#recent .blocks i").count() == 120
        assert 0 < page.locator("#recent .blocks i.draft").count() < 120
        assert page.is_hidden("#empty")
        assert page.is_hidden("#locked")
        page.wait_for_selector("#rate svg path", state="attached", timeout=10_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 300) == (scheme == "dark")


def test_figures_follow_the_server(make_app: MakeApp, open_page: Open) -> None:
    with served(make_app) as (address, _):
        page = open_page(address, viewport=DESKTOP)
        page.wait_for_selector("#empty:not([hidden])")
        assert f"curl {address}/v1/chat/completions" in page.inner_text("#try")
        assert page.is_hidden("#figures")
        ask(address, task="sql")
        page.wait_for_selector("#figures:not([hidden])", timeout=10_000)
        assert page.is_hidden("#empty")


def test_what_clients_send_is_text(make_app: MakeApp, open_page: Open) -> None:
    with served(make_app, dashboard_texts=True) as (address, _):
        ask(address, task=EVIL, prompt="Say " + EVIL)
        page = open_page(address, viewport=PHONE)
        page.wait_for_selector("#recent .text span.draft")
        assert EVIL in page.inner_text("#tasks")
        assert EVIL in page.inner_text("#recent")
        assert page.locator("img").count() == 0


def test_an_alarm_is_seen_and_noted(make_app: MakeApp, open_page: Open) -> None:
    with served(make_app) as (address, service):
        fields = service.observer._facts
        service.observer._facts = lambda job, output, num: fields(job, output, num + 1)  # type: ignore[method-assign]
        ask(address)
        page = open_page(address, viewport=PHONE)
        page.wait_for_selector(".alarm button")
        assert "Tokens do not add up: a request's streams gave out 41 tokens" in page.inner_text("#alarms")
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        page.click(".alarm button")
        page.wait_for_selector("#cleared-card:not([hidden])")
        assert page.locator(".alarm").count() == 0
        assert service.observer.alarms.raised == []


def test_a_key_is_asked_for_and_kept_to_the_tab(make_app: MakeApp, chromium: Any) -> None:
    with served(make_app, api_key=("secret",)) as (address, _):
        page = chromium.new_context().new_page()  # browsers log a 401 as an error
        page.goto(f"{address}/dashboard")
        page.wait_for_selector("#locked:not([hidden])")
        assert page.is_hidden("#wrong-key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.get_by_text("locked", exact=True).wait_for()
        page.wait_for_selector("#wrong-key:not([hidden])")
        page.fill("#key", "secret")
        page.click("#key-form button")
        page.wait_for_selector("#locked", state="hidden")
        page.wait_for_selector("#empty:not([hidden])")
        page.reload()
        page.wait_for_selector("#empty:not([hidden])")
        assert page.evaluate("localStorage.length") == 0
        other = page.context.new_page()
        other.goto(f"{address}/dashboard#key=secret")
        other.wait_for_selector("#empty:not([hidden])")
        assert other.url == f"{address}/dashboard"
        page.context.close()


def test_a_server_that_is_gone(make_app: MakeApp, chromium: Any) -> None:
    with served(make_app) as (address, _):
        page = chromium.new_context().new_page()  # browsers log a refused connection as an error
        page.goto(f"{address}/dashboard")
        page.wait_for_selector("#state.live")
    told = page.get_by_text("the server cannot be reached")
    told.wait_for(timeout=15_000)
    assert told.is_visible()
    page.context.close()

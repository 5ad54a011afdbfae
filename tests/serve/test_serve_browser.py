"""The dashboard in a real browser. Skipped where there is none: `apt-get install chromium` and the `dev` extra."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from serve_cases import QUESTION, MakeApp, running

from slipstream.control.types import ControlReport, MethodReport, TaskReport
from slipstream.serve.dashboard.latency import LATENCIES
from slipstream.serve.observer import EngineObserver
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


def new_context(chromium: Any, **options: Any) -> Any:
    """A context in which a wait ends for what is waited for, however slow the machine is; pytest ends what hangs."""
    context = chromium.new_context(**options)
    context.set_default_timeout(0)
    return context


def is_fault(line: Any) -> bool:
    """Whether the browser complains of the page; not that it asks once more when the test has ended its server."""
    return line.type in ("error", "warning") and "ERR_CONNECTION_REFUSED" not in line.text


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens the dashboard of a server; the page must have no error and send no request to another server."""
    faults: list[str] = []
    contexts: list[Any] = []

    def open_(address: str, after: str = "", **options: Any) -> Any:
        contexts.append(new_context(chromium, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if is_fault(line) else None)
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
        page.wait_for_selector("#rate svg path", state="attached")
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
        page.wait_for_selector("#figures:not([hidden])")
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
        fields = service.observer._info
        service.observer._info = lambda job, output, num: fields(job, output, num + 1)  # type: ignore[method-assign]
        ask(address)
        page = open_page(address, viewport=PHONE)
        page.wait_for_selector(".alarm button")
        assert "Tokens do not add up: a request's streams sent 41 tokens" in page.inner_text("#alarms")
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        page.click(".alarm button")
        page.wait_for_selector("#cleared-card:not([hidden])")
        assert page.locator(".alarm").count() == 0
        assert service.observer.alarms.raised == []


def test_a_key_is_asked_for_and_kept_to_the_tab(make_app: MakeApp, chromium: Any) -> None:
    with served(make_app, api_key=("secret",)) as (address, _):
        page = new_context(chromium).new_page()  # browsers log a 401 as an error
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
        page = new_context(chromium).new_page()  # browsers log a refused connection as an error
        page.goto(f"{address}/dashboard")
        page.wait_for_selector("#state.live")
    told = page.get_by_text("the server cannot be reached")
    told.wait_for()
    assert told.is_visible()
    page.context.close()


WIDE = {"width": 1440, "height": 900}
TENTH = {"num": 40, "p50": 0.0123, "p90": 8.765, "p99": 5000.0}
FEW = TaskReport("sql", "draft_model", 3.0, 0.85, 3.4, 0.98, 1.0, None, num_requests=10)
ENOUGH = replace(FEW, break_even=0.31, estimated_speedup=1.8, num_requests=40, num_pairs=2)


def reports(service: Service, monkeypatch: pytest.MonkeyPatch, *tasks: TaskReport, wait_s: float) -> None:
    """Have the engine report these tasks, an estimate of all that is another one, and when the next probe comes."""
    num_pairs = max(task.num_pairs for task in tasks)
    method = MethodReport("draft_model", 0.85, (0.9, 0.8, 0.7), 40, 0, False)
    told = ControlReport(
        True, True, False, 1.33, None, 0.005, (method,), tasks, (), num_pairs=num_pairs, next_probe_s=wait_s
    )
    monkeypatch.setattr(EngineObserver, "report", property(lambda _: told))
    monkeypatch.setattr(service.observer.latency, "as_json", lambda: dict.fromkeys(LATENCIES, TENTH))


def row(page: Any, table: str, number: int = 1) -> dict[str, str]:
    """A row of a table, by its columns' names as they are read out."""
    cells = page.locator(f"#{table} tbody tr:nth-child({number}) td")
    return {cell.get_attribute("data-column"): cell.inner_text() for cell in cells.all()}


def test_with_too_few_requests_nothing_is_estimated(
    make_app: MakeApp, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(make_app) as (address, service):
        ask(address, task="sql")
        reports(service, monkeypatch, FEW, wait_s=12.0)
        page = open_page(address, viewport=WIDE)
        page.wait_for_selector("#tasks tbody tr")
        told = row(page, "tasks")
        assert (told["estimated"], told["pays from"]) == ("too few requests yet (10)", "–")
        assert told["realised"] == "first probe after 12 s of decoding"
        tile = page.inner_text(".tile:nth-child(2)")
        assert "estimated: too few requests yet (10)" in tile
        assert "first probe after 12 s of decoding" in tile


def test_the_tile_says_what_the_rows_say(
    make_app: MakeApp, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(make_app) as (address, service):
        for task in ("sql", "sql", "chat"):
            ask(address, task=task)
        chat = replace(ENOUGH, task="chat", estimated_speedup=1.2, num_pairs=0)
        reports(service, monkeypatch, ENOUGH, chat, wait_s=0.0)
        page = open_page(address, viewport=WIDE)
        page.wait_for_selector("#tasks tbody tr:nth-child(2)")
        told = {number["task"]: number for number in (row(page, "tasks", 1), row(page, "tasks", 2))}
        assert (told["sql"]["estimated"], told["sql"]["pays from"]) == ("1.80×", "31 %")
        assert told["sql"]["realised"] == "2 of 3 pairs, next probe when eight steps in a row are alike"
        assert told["chat"]["realised"] == "next probe when eight steps in a row are alike"
        tile = page.inner_text(".tile:nth-child(2)")
        assert "estimated 1.60×" in tile, "two of three answers are sql's; they are the same"
        assert "2 of 3 pairs" in tile


def test_no_figure_is_cut_off(make_app: MakeApp, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """p99 is within its card at every width; on a phone every column of the tables is in sight."""
    inside = "(card) => card.scrollWidth <= card.clientWidth"
    with served(make_app) as (address, service):
        ask(address, task="sql")
        reports(service, monkeypatch, FEW, wait_s=12.0)
        page = open_page(address, viewport=WIDE)
        page.wait_for_selector("#tasks tbody tr")
        assert row(page, "tasks").keys() >= {"pays from", "realised"}
        assert row(page, "methods").keys() >= {"failures", "state"}
        for width in (1440, 1180, 1179, 900, 899, 620, 619, 390, 320):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_function(
                "document.documentElement.scrollWidth <= innerWidth"
            )  # charts are drawn anew
            assert width < 390 or page.eval_on_selector("#latency", inside), width
            for table in ("tasks", "methods"):
                assert 620 <= width < 1440 or page.eval_on_selector(f"#{table}", inside), width
        name = "getComputedStyle(document.querySelector('#tasks td:last-child'), '::before').content"
        assert page.evaluate(name) == '"realised"'

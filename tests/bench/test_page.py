"""The page stands alone, and says no more than there is."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from bench_cases import answer, result_of, run, two_tasks

from slipstream.core.metrics.step import StepReport
from slipstream.tools.bench.engine.measure import BenchRun
from slipstream.tools.bench.report.engine_report import render
from slipstream.tools.bench.report.plots import Estimate, estimates, lines, stacks
from slipstream.tools.bench.statistics import Interval


def long_drafts() -> list[BenchRun]:
    """Enough steps for a curve of acceptance, at two concurrencies."""
    step = StepReport(1, 1, 10, 2, 2, 0.2, 0.5)
    made: list[BenchRun] = []
    for concurrency in (1, 2):
        for batch in range(2):
            made += [
                run(0, [answer(0, [1] * 40, 2.0)], 2.0, batch=batch, concurrency=concurrency),
                run(
                    1,
                    [answer(0, [1] * 40, 1.0, [(2, 1)] * 20)],
                    1.0,
                    batch=batch,
                    concurrency=concurrency,
                    step=step,
                ),
            ]
    return made


@pytest.fixture(scope="module")
def page() -> str:
    return render(result_of(long_drafts()))


class _Assets(HTMLParser):
    """Everything that a browser would fetch, and every id."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "data", "action", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")
        if tag in ("script", "link", "iframe", "img", "object"):
            self.fetched.append(tag)


def test_nothing_is_fetched_and_ids_are_unique(page: str) -> None:
    found = _Assets()
    found.feed(page)
    assert found.fetched == []
    assert len(found.ids) == len(set(found.ids)) > 0
    assert "http" not in page
    assert "@import" not in page
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(found.ids)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(found.ids)


def test_it_suits_dark_light_and_phones(page: str) -> None:
    assert 'name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    defined = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= defined
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        stated = re.findall(r"(?:fill|stroke): ?(#[0-9a-f]+)", drawing)
        assert stated == []  # colours of the page's alone


def test_four_plots_where_there_is_data(page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>\s*(?:<ul|<svg)", page)
    assert titles == ["Speedup by task", "Acceptance by position", "Throughput", "Where the time goes"]


def test_without_data_there_are_no_plots() -> None:
    page = render(result_of([], complete=False))
    assert "<svg" not in page
    assert '<p class="warning">interrupted before anything was measured</p>' in page
    one = render(result_of(two_tasks()[:1], complete=False))
    assert re.findall(r"<h2>(.*?)</h2>\s*(?:<ul|<svg)", one) == ["Where the time goes"]


def test_texts_are_escaped(page: str) -> None:
    assert "<b>model</b>" not in page
    assert "&lt;b&gt;model&lt;/b&gt;" in page
    assert "a &lt;CPU&gt;" in page


def test_the_page_says_what_the_figures_allow() -> None:
    page = render(result_of(two_tasks()))
    assert (
        "No conclusion: draft γ=2 ran at 1.73 times the speed of speculation off, but 3 prompts are too few for an "
        "interval. 2 of 3 texts are identical." in page
    )


def test_drawings_are_well_formed_and_same_again() -> None:
    interval = Interval(0.9, 1.2, 0.95, 4)
    drawings = [
        estimates({"a & b": {1: Estimate(1.1, interval), 9: Estimate(2.0)}}, "times", 1.0),
        lines({0: {1: 5.0, 2: 9.0}, 3: {4: 1.0}}, "x", "y", logarithmic=True),
        stacks({"off": [0, 1, 2]}, "ms"),
    ]
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
        assert "width" not in root.attrib
        assert "#01010" not in drawing
        assert "#0501" not in drawing
    assert "a &amp; b" in drawings[0]
    assert estimates({"a & b": {1: Estimate(1.1, interval), 9: Estimate(2.0)}}, "times", 1.0) == drawings[0]

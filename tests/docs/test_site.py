"""The site builds with strict links, loads nothing from the net, and has the public interface in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
    "form": "action",
}
"""Attributes whose address a browser opens by itself, by element."""
NOT_LOADED = {"canonical", "prev", "next", "alternate"}
"""Values of `rel` that are only told."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Addresses(HTMLParser):
    """What a browser loads for a page, and the ids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids.add(given.get("id", ""))
        told = tag == "link" and set(given.get("rel", "").split()) <= NOT_LOADED
        if tag in LOADED and not told:
            self.loaded.append(given.get(LOADED[tag], ""))
        self.loaded += re.findall(r"url\(([^)]*)\)", given.get("style", ""))


def read(page: Path) -> Addresses:
    addresses = Addresses()
    addresses.feed(page.read_text(encoding="utf-8"))
    return addresses


def is_remote(address: str) -> bool:
    return re.match(r"([a-z]+:)?//", address.strip("'\" ")) is not None


def test_no_page_loads_anything_from_the_net(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 35
    for page in pages:
        loaded = read(page).loaded
        assert any("bundle" in address for address in loaded) or page.name == "404.html"
        assert [address for address in loaded if is_remote(address)] == [], page


def test_no_style_loads_anything_from_the_net(site: Path) -> None:
    styles = sorted(site.rglob("*.css"))
    assert styles
    for style in styles:
        text = style.read_text(encoding="utf-8")
        loaded = re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+(\S+)", text)
        assert [address for address in loaded if is_remote(address)] == [], style


def test_the_public_names_are_in_the_reference(site: Path) -> None:
    ids = set[str]().union(*(read(page).ids for page in site.glob("reference/api/*.html")))
    for name in slipstream.__all__:
        assert f"slipstream.{name}" in ids, f"docs/reference/api/index.md lacks {name}"
    for name in (
        "draft.base.Drafter.propose",
        "draft.base.Observation",
        "draft.base.DraftContext",
        "verify.base.Verifier.verify",
        "testing.conformance.check_drafter",
        "errors.ConfigError",
    ):
        assert f"slipstream.{name}" in ids, name


def test_the_pages_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert {"index.html", "guides/serve.html", "reference/config.html", "project/changelog.html"} <= found


def test_make_docs_builds_it() -> None:
    rule = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
    assert "docs/generate.py" in rule
    assert "mkdocs build" in rule


def test_every_link_leads_to_a_file_of_the_site(site: Path) -> None:
    pages = [
        page for page in sorted(site.rglob("*.html")) if page.name != "404.html"
    ]  # it is served from any folder
    for page in pages:
        links = re.findall(r'<a [^>]*?href="([^"#]+)', page.read_text(encoding="utf-8"))
        local = [link for link in links if not re.match(r"[a-z]+:", link)]
        assert local
        assert [link for link in local if not (page.parent / link).exists()] == [], page

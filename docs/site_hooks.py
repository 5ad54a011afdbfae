"""What the site needs besides the pages in docs/: the project's files outside that folder, and links to them.

The README is the front page, and links between pages stay those that work on GitHub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "project/examples.md",
    "benchmarks/peers/README.md": "project/peers.md",
    "src/slipstream/assets/pair/README.md": "project/model-card.md",
    "src/slipstream/assets/smollm2/README.md": "project/smollm2-head.md",
}
"""Files of the repository that become pages, and where."""
STATIC = {
    "LICENSE": "project/LICENSE.txt",
    "NOTICE": "project/NOTICE.txt",
    **{f"examples/{path.name}": f"project/{path.name}.txt" for path in (ROOT / "examples").glob("*.py")},
}
"""Files of the repository that are copied as they are."""

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, place in STATIC.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    place = page.file.src_uri
    homes = {target: source for source, target in PAGES.items()}
    source = ROOT / homes[place] if place in homes else DOCS / place

    def relinked(match: re.Match[str]) -> str:
        return match[1] + _relink(match[2], source, place) + match[3]

    return _LINK.sub(relinked, markdown)


def _relink(link: str, source: Path, place: str) -> str:
    """The link on the page at `place` to what `link` leads to from the file `source`."""
    file, hash_, anchor = link.partition("#")
    if not file or "://" in file or file.startswith("mailto:"):
        return link
    target = (source.parent / file).resolve()
    if target.is_relative_to(DOCS):
        found = target.relative_to(DOCS).as_posix()
    elif target.is_relative_to(ROOT):
        name = target.relative_to(ROOT).as_posix()
        found = PAGES.get(name) or STATIC.get(name) or link
    else:
        found = link
    return os.path.relpath(found, Path(place).parent).replace(os.sep, "/") + hash_ + anchor

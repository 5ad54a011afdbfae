"""The frame of a picture of results: SVG text, so that equal results give equal files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from benchmarks.peers.results import Results


def framed(
    parts: Iterable[str], results: Results, *, title: str, about: str, style: str, width: int, height: int
) -> str:
    """The SVG around `parts`: its title, what it is `about`, and the machine and day of the last session."""
    session = results.sessions[-1]
    about = f"{about}; {session['cores']} cores, {session['cpu']}, {session['date']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escape(title)}">',
            f"  <style>\n{style}\n  </style>",
            f'  <rect class="page" width="{width}" height="{height}" rx="6"/>',
            f'  <text class="title" x="16" y="26">{escape(title)}</text>',
            f'  <text class="small" x="16" y="45">{escape(about)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )

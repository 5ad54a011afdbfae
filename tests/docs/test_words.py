"""Text that users see is in the field's words, and the pages' lines are short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from slipstream.cli.main import app
from slipstream.serve.accounts import TaskLabels
from slipstream.serve.metrics.metrics import Metrics

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/slipstream"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
MAX_LINE = 125

PRIVATE_WORDS = {
    r"guess(es|ed|ing)?": "draft token, or to draft",
    r"stands?(?! for\b)|stood|standing": "accepted; is; a cached plan",
    r"books?": "accounting, invariants, overhead",
    r"pay-?offs?": "break-even",
    r"in vain": "rejected",
    r"whoever|whom(ever)?|who names": "say who: the request, the client, the operator",
    r"accidents?": "outlier",
    r"(the|its|of|and|no|more|some|cost of) tries": "exploration",
    r"gives? way|place given up|places given up": "preemption, or dropped",
    r"leave .{1,40} away": "omit",
    r"throws? (other )?coins|coins": "random numbers",
    r"by heart|nobody looks": "say it plainly",
    r"(has|had|have) it (so|all)": "say it plainly",
    r"no before|what is no |well where it is": "say it plainly",
    r"riddles?": "say it plainly",
}
"""Words that mean something here only, as expressions, and what to say instead."""

RETIRED_WORDS = {
    r"lanes?": "version (of weights), scope (tenant or task)",
    r"floors?": "base drafter; roofline",
    r"shadows?": "offline evaluation; the inner sequence",
    r"anchors?": "older answers, old-data holdout",
    r"rehears\w*": "replay, a replay engine",
    r"contest(ant)?s?": "shortlist",
    r"posed": "cache adapter",
    r"company": "batch; parallel-sample group",
    r"settl\w*": "resolve",
    r"foreign": "unsupported parameter; other vocabulary",
    r"borrow\w*|lenders?|lent|lend": "shared keys and values; reuse",
    r"\w*facts": "info, status",
    r"\w*writer_in_package|step_writers?": "step drafter",
    r"nobody": "none, no request, no caller; NO_DRAFTER",
}
"""Words that the source, its names included, has no more: neither by themselves nor between underscores."""
KEPT = [
    (r"", r"(?:math|np|torch|\))\.floor"),
    (r"models/cpu/", r"lanes?"),
    (r"config\.py", r"(learn_|num_)?lanes"),
    (r"learn/storage/(state|folder)\.py", r"lanes"),
    (r"learn/served_versions\.py", r"\"lane\""),
    (r"serve/learning\.py", r"own_lanes|\"floor\""),
    (r"cli/measure\.py", r"(memory|compute)_floor_s|floor_ratio"),
    (r"learn/decisions/(replay|by_hand)\.py", r"\"floor|floor is now"),
    (r"learn/versions/store\.py", r"floor_hash"),
    (r"config\.py", r"\"anchors"),
    (r"models/attention/registry\.py", r"\"posed\""),
    (r"deploy/protocol\.py", r"\"facts\""),
    (r"(?!learn/|config)", r"anchors?"),  # what all block drafters call the token that a block begins with
]
"""Where a retired word is something else, or the old name of what users may have, which is still read."""
_WORD = {re.compile(rf"\b({word})\b", re.IGNORECASE): instead for word, instead in PRIVATE_WORDS.items()}


def complaints(where: str, text: str) -> Iterator[str]:
    """What is wrong with a text outside its code spans."""
    prose = re.sub(r"`[^`]*`", "``", " ".join(text.split()))
    for word, instead in _WORD.items():
        for found in word.finditer(prose):
            around = prose[max(0, found.start() - 40) : found.end() + 40]
            yield f"{where}: …{around}… ({instead})"


def without_code(page: Path) -> str:
    return re.sub(r"^(```|~~~).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    assert list(complaints(page.name, without_code(page))) == []


def test_help_of_the_command_line() -> None:
    found = [one for where, text in _helps(get_command(app), "slipstream") for one in complaints(where, text)]
    assert found == []


def _helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for verb, below in getattr(command, "commands", {}).items():
        yield from _helps(below, f"{name} {verb}")


def test_help_of_the_metrics() -> None:
    lines = Metrics("model", TaskLabels([], 0), "vllm").exposition().decode().splitlines()
    helps = [line for line in lines if line.startswith("# HELP")]
    assert len(helps) > 60
    assert [one for line in helps for one in complaints(line.split()[2], line)] == []


@pytest.mark.parametrize("page", ["serve/dashboard/dashboard.html", "tools/bench/report/page.html.j2"])
def test_web_pages(page: str) -> None:
    assert list(complaints(page, (SOURCES / page).read_text(encoding="utf-8"))) == []


def test_messages() -> None:
    messages = _messages()
    found = [one for where, text in messages for one in complaints(where, text)]
    assert found == []


@pytest.mark.parametrize("word", RETIRED_WORDS)
def test_retired_words_do_not_come_back(word: str) -> None:
    pattern = re.compile(rf"(?<![a-z])({word})(?![a-z])", re.IGNORECASE)
    found = [
        f"{file.relative_to(SOURCES)}: {hit.group(1)} ({RETIRED_WORDS[word]})"
        for file in sorted(SOURCES.rglob("*.py"))
        for hit in pattern.finditer(_without_kept(file))
    ]
    assert found == []


def _without_kept(file: Path) -> str:
    """The text of a source file without the words that stay in it."""
    text = file.read_text(encoding="utf-8")
    for place, words in KEPT:
        if re.match(place, str(file.relative_to(SOURCES))):
            text = re.sub(rf"(?<![A-Za-z])({words})(?![A-Za-z])", "", text)
    return text


def _messages() -> Iterator[tuple[str, str]]:
    """Texts of errors and log lines, and help of flags and fields, with where they are."""
    seen = 0
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _is_told(node.func):
                text = " ".join(_texts(node))
                seen += bool(text)
                yield f"{file.relative_to(SOURCES)}:{node.lineno}", text
    assert seen > 500


def _is_told(function: ast.expr) -> bool:
    """True for what makes an error, writes a log line or prints."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.endswith("Error") or name in (
        "warning",
        "error",
        "info",
        "exception",
        "print",
        "Option",
        "Argument",
    )


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts in it; what is filled in is `…`."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for below in ast.iter_child_nodes(node):
            yield from _texts(below)


def long_lines(page: Path) -> Iterator[str]:
    """Lines of prose over the limit; tables, code and lines that are one link cannot be broken."""
    for number, line in enumerate(without_code(page).splitlines(), start=1):
        alone = re.fullmatch(r"\s*(- |\d+\. )?!?\[[^\]]*\]\([^)]*\)[.,]?", line)
        if len(line) > MAX_LINE and not line.lstrip().startswith("|") and alone is None:
            yield f"{page.relative_to(ROOT)}, line {number} of its prose: {len(line)} characters"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    assert list(long_lines(page)) == []


def test_private_words_are_found() -> None:
    assert list(complaints("a", "Draft tokens that were checked in vain."))
    assert list(complaints("a", "a\nguess that stands"))
    assert not list(complaints("a", "α stands for the acceptance rate; `guess` is a name; it is understood."))

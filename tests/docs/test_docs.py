"""The documentation is executed: its programs and commands run, its numbers are right, its links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import slipstream
from recipes import demo
from slipstream import errors, vllm_names
from slipstream.cli.main import app
from slipstream.engine.llm import LLM
from slipstream.train.options import MaskOptions

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])
SPECULATION = ROOT / "docs/concepts/speculation.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_programs_run(page: Path, shared_engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{name(page)}, block {number}", "exec", dont_inherit=True), namespace)
    assert len(namespace) > 2, "a program names something: its page's blocks ran in one namespace"


def test_the_readme_script_is_short_and_reads_eight_metrics(
    shared_engines: None, capsys: pytest.CaptureFixture[str]
) -> None:
    [script] = blocks(ROOT / "README.md", "python")
    assert len(script.splitlines()) <= 15
    exec(script, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    for line in lines:
        assert re.match(r"α \d\.\d\d  τ \d\.\d\d  \d+ tokens/s '", line)


REAL_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""As pages call it: a file in the reader's folder."""


def marks_of(command: str) -> list[pytest.MarkDecorator]:
    """Commands that load a real model take long, but for one that generates with it."""
    return [pytest.mark.long] if REAL_MODEL in command and command.startswith(("bench", "info")) else []


COMMANDS = [
    pytest.param(
        line.removeprefix("$ slipstream "),
        id=f"{name(page)}: {line}",
        marks=marks_of(line.removeprefix("$ slipstream ")),
    )
    for page in PAGES
    for block in blocks(page, "console")
    for line in block.splitlines()
    if line.startswith("$ slipstream ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(
    command: str,
    shared_engines: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    for name in {REAL_MODEL, "smollm2"}.intersection(words):
        words[words.index(name)] = request.getfixturevalue("smollm2")
    if words[0] == "train":  # leaves nothing in the checkout, and finds nothing of an earlier test
        words[words.index("--output") + 1] = str(tmp_path / "output")
    if words[0] == "quantize":
        words[2] = str(tmp_path / "output")
    result = CliRunner().invoke(app, [*words, *_less_work(command)])
    assert result.exit_code == 0, result.output


def _less_work(command: str) -> list[str]:
    if command.startswith("info ") and "--measure" in command and "--quick" not in command:
        return ["--quick"]
    fewer = ["--repeats", "1"] if "--compare" in command and "--repeats" not in command else []
    if command.startswith("generate") and "--max-tokens" not in command:
        fewer += ["--max-tokens", "16"]
    return fewer


@pytest.mark.parametrize("command", [demo.REAL, demo.EMBEDDED])
def test_the_demo_is_what_the_quickstart_shows(command: str) -> None:
    assert (ROOT / command.split("--file ")[1]).is_file()
    page = (ROOT / "docs/start/quickstart.md").read_text()
    _, _, shown = page.partition(f"$ slipstream {command}\n")
    assert "texts identical      yes" in shown.split("$ slipstream")[0]
    assert "\t$(BIN)/python -m recipes.demo\n" in (ROOT / "Makefile").read_text()


def test_the_readme_is_short_and_opens_with_the_two_commands_and_one_picture() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 120
    opening = page.split("\n## ")[0]
    assert re.findall(r"^make \w+", opening, flags=re.MULTILINE) == ["make demo", "make test"]
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page) == ["docs/benchmarks/cpu_peers.svg"]
    assert "docs/benchmarks/cpu_peers.svg" in opening


def test_every_key_of_json_is_documented(shared_engines: None) -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    section = page.split("## What `--json` prints")[1].split("\n## ")[0]
    args = ["generate", "hi", "--max-tokens", "2", "--logprobs", "1", "--compare", "--repeats", "1", "--json"]
    answer = json.loads(CliRunner().invoke(app, args).stdout)
    request, comparison = answer["requests"][0], answer["comparison"]
    output = request["outputs"][0]
    for keys in (answer, request, output, output["logprobs"][0], comparison, comparison["pairs"][0]):
        for key in keys:
            assert f"`{key}`" in section, key


def test_the_command_line_pages_print_a_shared_flag_once_and_lose_nothing() -> None:
    pages = [(ROOT / f"docs/reference/{name}.md").read_text() for name in ("cli", "cli-train")]
    assert len(pages[0].encode()) <= 50_000
    assert len(pages[1].encode()) <= 17_000
    for field in fields(MaskOptions):
        assert pages[1].count(f"\n| `--{field.name.replace('_', '-')}` |") == 1, (
            "one table has the flags of masks"
        )
    sections: dict[str, str] = {}
    groups: dict[str, str] = {}
    for page in pages:
        verbs, shared = page.split("\n## Shared flags\n")
        here = (part for part in verbs.split("\n## ") if "`slipstream " in part.split("\n")[0])
        sections |= {part.split("`")[1].split(" [")[0]: part for part in here}
        mine = {part.split("\n")[0]: part for part in shared.split("\n### ")[1:]}
        assert not mine.keys() & groups.keys(), "a group is on one page"
        groups |= mine
    for name, command in commands(get_command(app)):
        section = sections[f"slipstream {name}"]
        taken = "\n".join(
            groups[group]
            for group in re.findall(r"\[([^\]]+)\]\((?:cli\.md)?#[\w-]+\)", " ".join(section.split()))
            if group in groups
        )
        for parameter in command.params:
            text = " ".join(parameter.help.split()).replace("|", "\\|")
            flag = parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0]
            rows = (line for line in f"{section}\n{taken}".splitlines() if f"`{flag}`" in line)
            assert any(text in row for row in rows), (name, flag)


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def test_vllms_server_flags_are_what_the_page_says() -> None:
    page = (ROOT / "docs/guides/from-vllm.md").read_text()
    section = page.split("\n## Server flags\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", section, flags=re.MULTILINE)
    assert len(rows) >= 30
    command: Any = get_command(app)
    ours = {name for parameter in command.commands["serve"].params for name in parameter.opts}
    for flag, here in rows:
        assert (flag in ours) == here.startswith("the same"), flag
        assert ours.issuperset(re.findall(r"`(--[\w-]+)", here)), flag


def test_every_key_of_vllms_is_in_the_page() -> None:
    page = (ROOT / "docs/guides/from-vllm.md").read_text()
    for names in (vllm_names.ENGINE, vllm_names.SAMPLING, vllm_names.SPECULATIVE, vllm_names.CALL):
        for name in names:
            assert f"`{name}`" in page, name
    for name in [*vllm_names.METHODS, *vllm_names.METHODS_ELSEWHERE]:
        assert f"`{name}()`" in page or f"`{name}`" in page, name


def literals_of(package: Path) -> str:
    """Every text in the sources, a line each; what is filled in is `…`."""
    found = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdgr]|%\.\d[fg]", "…", node.value))
    return "\n".join(found)


def test_the_messages_that_troubles_quotes_are_the_programs_own() -> None:
    page = (ROOT / "docs/guides/troubles.md").read_text()
    symptoms = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    sources = literals_of(ROOT / "src/slipstream")
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom) if " " in text]
    assert len(quoted) >= 15
    for text in quoted:
        for part in text.split("…"):
            assert part.strip(" :;,?") in sources, f"{text!r}: no message says {part!r}"


def test_the_worked_numbers_are_right() -> None:
    rows = re.findall(
        r"^\| (\d\.\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        SPECULATION.read_text(),
        re.M,
    )
    assert len(rows) >= 5
    for row in rows:
        alpha, gamma, c, v, tau, speedup = (float(cell) for cell in row)
        exact = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert f"{exact:.2f}" == f"{tau:.2f}", row
        assert f"{exact / (gamma * c + v):.2f}" == f"{speedup:.2f}", row


def test_break_even_is_what_the_page_says() -> None:
    for alpha in (0.05, 0.3, 0.5, 0.8, 0.95):
        for c in (0.0, 0.1, 0.3, 0.6, 0.9):
            for v in (1.0, 1.3):
                pays = []
                for gamma in range(1, 9):
                    speedup = sum(alpha**k for k in range(gamma + 1)) / (gamma * c + v)
                    claimed = sum(alpha**k for k in range(1, gamma + 1)) > gamma * c + v - 1
                    assert (speedup > 1) == claimed
                    pays.append(claimed)
                if v == 1.0:
                    assert any(pays) == pays[0] == (alpha > c)


def test_the_pooled_rate_of_full_chains() -> None:
    assert "at α = 0.8, γ = 5 it is 0.54" in " ".join(SPECULATION.read_text().split())
    assert round((sum(0.8**k for k in range(6)) - 1) / 5, 2) == 0.54


def test_generated_pages_are_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs/generate.py"))
    for file, page in generator["PAGES"].items():
        assert (ROOT / "docs" / file).read_text() == page(), f"docs/{file}: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_error_has_its_line() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    for cls in [errors.SlipstreamError, *_subclasses(errors.SlipstreamError)]:
        if cls.__module__.startswith("slipstream.") and not cls.__name__.startswith("_"):
            assert f"| `{cls.__name__}` |" in page


def _subclasses(cls: type) -> list[type]:
    return [found for sub in cls.__subclasses__() for found in (sub, *_subclasses(sub))]


def test_every_room_is_in_the_architecture() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "src/slipstream"
    rooms = {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    for room in rooms - {"__init__"}:
        assert f"`{room}`" in page, room


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {slipstream.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_exports_are_there() -> None:
    for exported in slipstream.__all__:
        assert getattr(slipstream, exported) is not None
    assert slipstream.LLM is LLM
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        slipstream.LMM  # noqa: B018


def test_every_group_of_entry_points_has_its_line() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/slipstream").rglob("*.py"))
    groups = set(re.findall(r'entry-points\."(slipstream\.\w+)"', sources))
    assert len(groups) >= 5
    page = (ROOT / "docs/reference/api/extending.md").read_text()
    assert set(re.findall(r"^\| `(slipstream\.\w+)` \|", page, flags=re.MULTILINE)) == groups


def test_the_workflow_calls_what_contributors_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    makefile = (ROOT / "Makefile").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for target in ("check", "test", "test-long", "docs"):
        assert f"make {target}" in steps
        assert re.search(rf"^make {target}\b", contributing, flags=re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_contributing_names_every_kind_of_test() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in (ROOT / "tests").iterdir():
        if list(folder.glob("test_*.py")):
            assert f"| `tests/{folder.name}` |" in page, folder.name


def test_issue_forms_can_be_read() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 3
    for form in forms:
        written = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            assert written.keys() >= {"name", "description", "body"}
            assert all(part["attributes"]["label"] for part in written["body"])

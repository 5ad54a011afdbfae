"""Writes `docs/reference/cli.md` and `docs/reference/config.md` from the code: `python docs/generate.py`.

A test compares the pages with what this program would write, so they cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from slipstream.cli.flags import field_help
from slipstream.cli.main import app
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.registry import validate
from slipstream.sampling.params import SamplingParams

FOLDER = Path(__file__).parent / "reference"

CLI_INTRODUCTION = """\
# Command line

Written from the code by `make docs`; do not edit.

Answers and reports that were asked for go to standard output, everything else to standard error. A request that cannot
be served costs one line, `error: …`, and exit code 2; a fault of Slipstream's own exits with 1 (`slipstream --debug …`
shows where it happened); Ctrl-C with 130. Colours appear on terminals only; `NO_COLOR` turns them off and `FORCE_COLOR`
on. `HF_HOME`, `HF_HUB_OFFLINE` and the other variables of the Hugging Face hub are honoured.

## Which drafter runs

At most one of `--spec`, `--draft` and `--speculative-config` may be given. Without any, the embedded pair speculates
with its own draft model, and a model named with `--model` decodes without speculation: nothing is guessed about what
would suit it.

## What `--file` may hold

A `.jsonl` file has one JSON object a line, with exactly one of `prompt` (text), `messages` (a conversation; assistant
messages at its end are dropped, so that recorded conversations are answered anew) and `token_ids`. `task` or `id`
labels the answer; other keys are ignored. All lines are answered in one batch. Any other file, and standard input, is
one prompt.

## What `--compare` measures

Each prompt is answered with and without speculation, one after the other, on one engine, from empty caches, with the
same seed, after a warm-up of both ways. The order alternates from pair to pair; each prompt has `--repeats` pairs. The
ratio of a pair is tokens a second with speculation over tokens a second without, the prompt's computation included. The
median ratio of all pairs is printed with its range, and the median speed of each side.
"""

CONFIG_INTRODUCTION = """\
# Configuration

Written from the code by `make docs`; do not edit.

All configurations are frozen and checked when they are made. An unknown key raises an error that names the nearest
valid one. `LLM(model, speculative_config=…, **engine)` takes the keys of `EngineConfig` as keywords.
"""

NO_OPTIONS = {"off": {}, "ngram": {}, "suffix": {}, "draft_model": {"model": "draft"}}
"""The built-in drafters with the options that have no default."""


def cli_page() -> str:
    """Every verb with its flags, panel by panel."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([CLI_INTRODUCTION, *(_verb(name, command) for name, command in commands.items())])


def config_page() -> str:
    """Every configuration class with its fields."""
    parts = [CONFIG_INTRODUCTION]
    parts += [_class(cls) for cls in (EngineConfig, SamplingParams, SpeculativeConfig)]
    parts.append(
        "## Options of the drafters\n\nThey stand beside `method` and `verifier` in `speculative_config`.\n"
    )
    for method, options in NO_OPTIONS.items():
        _, made = validate(SpeculativeConfig(method, options=options))
        parts.append(_class(type(made), title=f"### `method: {method}`"))
    return "\n".join(parts)


def _verb(name: str, command: Any) -> str:
    arguments = "".join(f" [{p.name.upper()}]" for p in command.params if p.param_type_name == "argument")
    lines = [f"## `slipstream {name}{arguments}`", "", command.help, ""]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        panels.setdefault(panel, []).append(_row(_flag(parameter), _default(parameter), parameter.help))
    for panel, rows in panels.items():
        lines += [f"**{panel}**", "", "| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _flag(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _default(parameter: Any) -> str:
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    return "" if shown is None or shown is False else f"`{shown}`"


def _class(cls: type, title: str | None = None) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    lines = [title or f"## `{cls.__name__}`", "", " ".join(doc.split()), ""]
    rows = list(_fields(cls))
    if rows:
        lines += ["| key | type | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _fields(cls: type) -> Iterator[str]:
    help_ = field_help(cls)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()!r}`"
        else:
            default = "required"
        yield _row(f"`{field.name}`", f"`{field.type}`", default, help_[field.name])


def _row(*cells: str) -> str:
    escaped = [re.sub(r"\s+", " ", cell or "").replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


PAGES = {"cli.md": cli_page, "config.md": config_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")

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

from slipstream.cli.flags.flags import field_help
from slipstream.cli.main import app
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.engine.speculation import validate
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput

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
would suit it. All options of a drafter go through `--speculative-config`; for the embedded pair `draft_model` needs no
`model` there, so this is a tree of the embedded draft:

```console
$ slipstream generate "Show me the command tar." --speculative-config '{"method": "draft_model", "tree_top_k": 3}'
```

## Values that are more than a word

`--logit-bias` takes a JSON object of token ids and numbers, `--stop-token-ids` and `--allowed-token-ids` take token ids
separated by commas, and `--stop` and `--bad-words` are given once for each text:

```console
$ slipstream generate "Write a SQL query." --logit-bias '{"5": 1.5, "6": -100}' --stop-token-ids 7,8 --stop END
```

## The chat template

A prompt is wrapped in the model's chat template as a user's message, where the model has one; `--raw` leaves it as it
is. In Python it is the other way round: `LLM.chat` applies the template and `LLM.generate` does not.

## What `--file` may hold

A `.jsonl` file has one JSON object a line, with exactly one of `prompt` (text), `messages` (a conversation; assistant
messages at its end are dropped, so that recorded conversations are answered anew) and `token_ids`. `task` or `id`
labels the answer; other keys are ignored. All lines are answered in one batch. Any other file, and standard input, is
one prompt.

## What `--compare` measures

Each prompt is answered with and without speculation, one after the other, on one engine, from empty caches, with the
same seed, after a warm-up of both ways. The order alternates from pair to pair; each prompt has `--repeats` pairs. The
ratio of a pair is tokens a second with speculation over tokens a second without, the prompt's computation included. The
median ratio of all pairs is printed with its quartiles, and the median speed of the runs of each side; with several
prompts the ratio is not that of the two speeds, whose medians may come from different prompts. Where standard
error is not a terminal, a line a pair shows the progress.

The `speed` among the notes is another one: all tokens of a run over its whole time. Without `--compare` all prompts run
in one batch; with it, that line is about the first run of each prompt.

## What `--logprobs` prints

A table below the answer, a token a line: its text, its log-probability under the target's unprocessed distribution, and
as many alternatives as were asked for. `--prompt-logprobs` adds such a table of the prompt.

## What `--json` prints

One object:

- `slipstream`: the version; `model`: as named, or `embedded pair`
- `speculation`: `method`, `verifier` and all options of the drafter
- `labels`: what must be said beside these results, such as that a model is cost-expanded
- `requests`: one a prompt, each with
  - `label`, `prompt` (null for messages and token ids), `prompt_token_ids` and `prompt_logprobs`
  - `outputs`: one an answer, with `index`, `text`, `token_ids`, `from_draft` (one a token), `finish_reason`,
    `stop_reason`, `seed`, `logprobs` and `metrics`
- `logprobs`, of prompt or answer: one a token, with `token_id`, `logprob`, `rank` and `top`, pairs of token id and
  log-probability; null where not asked for
- `metrics`: counts and times of the answer, and what follows from them: `acceptance_rate`, `conditional_acceptance`,
  `acceptance_length`, `tokens_per_s`
- `summary`: counts of all answers together, rates of the sums, `tokens_per_s` over `wall_s`, `seeds`, and
  `reproducible`, whether they give the answers again
- `comparison`: null without `--compare`; else `ratio_median`, `ratio_quartiles`, `ratio_interval` (95 % of the
  median; null below six pairs), `conclusion`, `ratio_min`, `ratio_max`,
  `tokens_per_s_off`, `tokens_per_s_on`, `identical`, `differing_prompts`, and `pairs`, each with `prompt_index`,
  `ratio`, `identical`, `off_s` and `on_s`

`slipstream info --json` prints its facts as one object too, the memory plan in bytes. Its `measured` is null, or the
profile that `--measure` took or saved earlier: [what its keys mean](../guides/floors.md#in-json).

```console
$ slipstream generate "Can you help me to buy movie tickets?" --temperature 0 --logprobs 2 --json
$ slipstream info --json
```
"""

CONFIG_INTRODUCTION = """\
# Configuration

Written from the code by `make docs`; do not edit.

All configurations are frozen and checked when they are made. An unknown key raises an error that names the nearest
valid one. `LLM(model, speculative_config=…, **engine)` takes the keys of `EngineConfig` as keywords.
"""

MODEL = {"model": "draft"}
NO_OPTIONS: dict[str, dict[str, Any]] = {
    **{"off": {}, "ngram": {}, "suffix": {}, "token_recycling": {}, "lookahead": {}, "jacobi": {}},
    **{"draft_model": MODEL, "tli": MODEL, "slem": MODEL},
    **{"self": {}, "layer_skip": {}, "cascade": {"draft": {"method": "off"}}},
    **{"eagle": MODEL, "eagle3": MODEL, "medusa": MODEL, "hydra": MODEL},
    "ensemble": {"members": [{"method": "suffix"}, {"method": "ngram"}]},
}
"""The built-in drafters with the options that have no default."""


def cli_page() -> str:
    """Every verb with its flags, panel by panel."""
    return "\n".join([CLI_INTRODUCTION, *(_verb(*verb) for verb in _verbs(get_command(app)))])


def _verbs(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each verb's full name and command, those of groups included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{above}{name} ")
        else:
            yield above + name, command


def config_page() -> str:
    """Every configuration class with its fields."""
    parts = [CONFIG_INTRODUCTION]
    parts += [_class(cls) for cls in (EngineConfig, SamplingParams, StructuredOutput, SpeculativeConfig)]
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

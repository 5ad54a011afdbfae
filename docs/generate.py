"""Writes the generated pages, from the code and the tests: `python docs/generate.py`.

A test compares the pages with what this program would write, so they cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging
from typer.main import get_command

from slipstream.cli.flags.flags import field_help
from slipstream.cli.main import app
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.methods import METHODS, MethodSpec
from slipstream.engine.speculation import validate
from slipstream.models.cpu.families import FAMILIES as FUSED
from slipstream.models.text_tower import text_tower
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput

FOLDER = Path(__file__).parent
FROM_VLLM = "guides/from-vllm.md"

CLI_INTRODUCTION = """\
# Command line

Written from the code by `make docs`; do not edit.

Answers and reports that were asked for go to standard output, everything else to standard error. A request that
cannot be served costs one line, `error: …`, and exit code 2; a fault of Slipstream's own exits with 1
(`slipstream --debug …` shows where it happened); Ctrl-C with 130. Colours appear on terminals only; `NO_COLOR`
turns them off and `FORCE_COLOR` on. `HF_HOME`, `HF_HUB_OFFLINE` and the other variables of the Hugging Face hub are
honoured.

## Which drafter runs

At most one of `--spec`, `--draft` and `--speculative-config` may be given. Without any, the embedded pair
speculates with its own draft model, and a model named with `--model` decodes without speculation: no
drafter is assumed to suit it. All options of a drafter go through `--speculative-config`; for the embedded pair
`draft_model` needs no `model` there, so this is a tree of the embedded draft:

```console
$ slipstream generate "Show me the command tar." --speculative-config '{"method": "draft_model", "tree_top_k": 3}'
```

## Values that are more than a word

`--logit-bias` takes a JSON object of token ids and numbers, `--stop-token-ids` and `--allowed-token-ids` take token
ids separated by commas, and `--stop` and `--bad-words` are given once for each text:

```console
$ slipstream generate "Write a SQL query." --logit-bias '{"5": 1.5, "6": -100}' --stop-token-ids 7,8 --stop END
```

## The chat template

A prompt is wrapped in the model's chat template as a user's message, where the model has one; `--raw` leaves it as
it is. In Python it is the other way round: `LLM.chat` applies the template and `LLM.generate` does not.

## What `--file` may hold

A `.jsonl` file has one JSON object a line, with exactly one of `prompt` (text), `messages` (a conversation;
assistant messages at its end are dropped, so that recorded conversations are answered anew) and `token_ids`. `task`
or `id` labels the answer; other keys are ignored. All lines are answered in one batch. Any other file, and standard
input, is one prompt.

## What `--compare` measures

Each prompt is answered with and without speculation, one after the other, on one engine, from empty caches, with
the same seed, after a warm-up of both ways. The order alternates from pair to pair; each prompt has `--repeats`
pairs. The ratio of a pair is tokens a second with speculation over tokens a second without, the prompt's
computation included. The median ratio of all pairs is printed with its quartiles, and the median speed of the runs
of each side; with several prompts the ratio is not that of the two speeds, whose medians may come from different
prompts. Where standard error is not a terminal, a line a pair shows the progress.

The `speed` among the notes is another one: all tokens of a run over its whole time. Without `--compare` all prompts
run in one batch; with it, that line is about the first run of each prompt.

## What `--logprobs` prints

A table below the answer, a token a line: its text, its log-probability under the target's unprocessed distribution,
and as many alternatives as were asked for. `--prompt-logprobs` adds such a table of the prompt.

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
- `metrics`: counts and times of the answer, and what follows from them: `acceptance_rate`,
  `conditional_acceptance`, `acceptance_length`, `tokens_per_s`
- `summary`: counts of all answers together, rates of the sums, `tokens_per_s` over `wall_s`, `seeds`, and
  `reproducible`, whether they give the answers again
- `comparison`: null without `--compare`; else `ratio_median`, `ratio_quartiles`, `ratio_interval` (95 % of the
  median; null below six pairs), `conclusion`, `ratio_min`, `ratio_max`, `tokens_per_s_off`, `tokens_per_s_on`,
  `identical`, `differing_prompts`, and `pairs`, each with `prompt_index`, `ratio`, `identical`, `off_s` and `on_s`

`slipstream info --json` prints its facts as one object too, the memory plan in bytes. Its `measured` is null, or
the profile that `--measure` took or saved earlier: [what its keys mean](../guides/floors.md#in-json).

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

TESTED_INTRODUCTION = """\
# Tested models

Written from the parity tests by `make docs`; do not edit.

A model is loaded exactly or refused with the reason. A family that is not listed may still work: when a model is
loaded, a dozen tokens are compared with what Transformers computes, and a model that fails is refused.
`slipstream info MODEL` says what is used. [Checkpoints](../guides/checkpoints.md) has formats, adapters and long
contexts.
"""

FAMILIES_INTRODUCTION = """\
## Families

`tests/parity/test_families.py` compares tiny random models of each family with Transformers' own: whole and chunked
prompts, packed batches, draft trees, hidden states, greedy text, in float32, and some in bfloat16 and float16.

*Whole pass* means that one call of the CPU kernels computes all layers, with weights in any format that they have.
*Layer by layer* means that Transformers' code runs; in it the kernels compute the linear layers and PyTorch the
attention. With
`cpu_kernels="torch"`, and on other devices, everything runs in PyTorch.
"""

TOWERS_INTRODUCTION = """\
## Text towers of models that read images

Only the language model is loaded, for text. `tests/parity/test_text_towers.py` compares its logits with the whole
model's.
"""

REFUSED_INTRODUCTION = """\
## Refused

`tests/parity/test_refusals.py` checks that these end in one line with the reason, before any request.
"""

INNER: dict[str, Any] = {
    "draft": {"method": "off"},
    "drafter": {"method": "ngram"},
    "members": [{"method": "suffix"}, {"method": "ngram"}],
}
"""Values of options that hold other drafters and have no default."""


def _required(spec: MethodSpec) -> dict[str, Any]:
    """The options of a drafter that have no default."""
    model = {"model": "draft"} if spec.needs_model else {}
    return {**model, **{name: INNER[name] for name in spec.inner if name in INNER}}


NO_OPTIONS = {spec.name: _required(spec) for spec in METHODS.values()}
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
        "## Options of the drafters\n\nThey are keys beside `method` and `verifier` in `speculative_config`.\n"
    )
    for method, options in NO_OPTIONS.items():
        _, made = validate(SpeculativeConfig(method, options=options))
        parts.append(_class(type(made), title=f"### `method: {method}`"))
    return "\n".join(parts)


def tested_models_page() -> str:
    """The families, text towers and refusals of tests/parity."""
    tests = {name: _parity(name) for name in ("tiny_models", "test_text_towers", "test_refusals")}
    parts = [TESTED_INTRODUCTION, FAMILIES_INTRODUCTION, "| family | tested as | on a CPU |", "|---|---|---|"]
    by_type: dict[str, list[str]] = {}
    tiny = tests["tiny_models"]
    for name, config in {**tiny["FAMILIES"], **tiny["LIKE_OTHERS"]}.items():
        by_type.setdefault(config().model_type, []).append(name)
    for model_type, names in by_type.items():
        parts.append(_row(f"`{model_type}`", ", ".join(names), _cpu_path(model_type)))
    parts += ["", TOWERS_INTRODUCTION, "| checkpoint | its language model | on a CPU |", "|---|---|---|"]
    for make in tests["test_text_towers"]["FAMILIES"].values():
        config = make().config
        tower = text_tower(config)
        assert tower is not None
        inner = tower.config.model_type
        parts.append(_row(f"`{config.model_type}`", f"`{inner}`", _cpu_path(inner)))
    parts += ["", REFUSED_INTRODUCTION, "| model | reason |", "|---|---|"]
    parts += [_row(f"`{name}`", reason) for name, (_, reason) in tests["test_refusals"]["REFUSED"].items()]
    return "\n".join([*parts, ""])


def from_vllm_page() -> str:
    """The page as it is, with its tables written anew."""
    options = {
        method: type(validate(SpeculativeConfig(method, options=given))[1])
        for method, given in NO_OPTIONS.items()
    }
    tables = runpy.run_path(str(FOLDER / "vllm_tables.py"))
    page: str = tables["filled"]((FOLDER / FROM_VLLM).read_text(encoding="utf-8"), options)
    return page


def _parity(name: str) -> dict[str, Any]:
    """The names of a file in tests/parity."""
    folder = Path(__file__).parents[1] / "tests/parity"
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(folder / f"{name}.py"))
    finally:
        sys.path.remove(str(folder))


def _cpu_path(model_type: str) -> str:
    return "whole pass" if model_type in FUSED.names() else "layer by layer"


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


PAGES = {
    "reference/cli.md": cli_page,
    "reference/config.md": config_page,
    "reference/tested-models.md": tested_models_page,
    FROM_VLLM: from_vllm_page,
}

if __name__ == "__main__":
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns of small configurations
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")

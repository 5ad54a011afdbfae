"""The pages of the command line. A group of flags that several verbs share is printed once, and each verb links to it.

The verbs of training have a page of their own. `docs/generate.py` writes both.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.main import get_command

from slipstream.cli.main import app

COMMON = "Common"
"""The group of flags of verbs' own that several verbs have."""
FEWEST_VERBS = 3
"""A flag of verbs' own is common from so many on."""

INTRODUCTION = """\
# Command line

Written from the code by `make docs`; do not edit.

Answers and reports that were asked for go to standard output, everything else to standard error. A request that
cannot be served costs one line, `error: …`, and exit code 2; a fault of Slipstream's own exits with 1
(`slipstream --debug …` shows where it happened); Ctrl-C with 130. Colours appear on terminals only; `NO_COLOR`
turns them off and `FORCE_COLOR` on. `HF_HOME`, `HF_HUB_OFFLINE` and the other variables of the Hugging Face hub are
honoured. The verbs of `slipstream train` have [a page of their own](cli-train.md).

## Which drafter runs

At most one of `--spec` and `--speculative-config` may be given. Without any, the embedded pair
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
- `labels`: what must be said with these results, such as that a model is cost-expanded
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

`slipstream info --json` prints its information as one object too, the memory plan in bytes. Its `measured` is null, or
the profile that `--measure` took or saved earlier: [what its keys mean](../guides/roofline.md#in-json).

```console
$ slipstream generate "Can you help me to buy movie tickets?" --temperature 0 --logprobs 2 --json
$ slipstream info --json
```
"""

SHARED_INTRODUCTION = """\
## Shared flags

Several verbs take these. Each verb links to the groups that it takes, and names the flags of them that it does not
have. A flag with another default or meaning is listed with the verb.
"""

TRAINING = "train "
"""What the verbs that have a page of their own begin with."""
TRAINING_INTRODUCTION = """\
# Command line: training

Written from the code by `make docs`; do not edit. [Train a drafter](../guides/train.md) says how to use these verbs;
[the command line's page](cli.md) has the others, and the flags that these share with them.
"""


def cli_page() -> str:
    """Every verb but those of training with its own flags, then the groups."""
    return f"{INTRODUCTION}\n{CommandPage(of_training=False).text()}"


def training_page() -> str:
    """The verbs of training, then the groups that no other verb takes."""
    return f"{TRAINING_INTRODUCTION}\n{CommandPage(of_training=True).text()}"


@dataclass(frozen=True)
class FlagRow:
    """One flag of a verb."""

    name: str
    """As it is written: '`-n`, `--n`'."""
    default: str
    help: str
    panel: str | None

    @classmethod
    def of(cls, parameter: Any) -> FlagRow:
        """From Typer's parameter."""
        if parameter.param_type_name == "argument":
            name = f"`{parameter.name.upper()}`"
        else:
            name = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
        shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        default = "" if shown is None or shown is False else f"`{shown}`"
        return cls(name, default, parameter.help, getattr(parameter, "rich_help_panel", None))

    def line(self) -> str:
        """Its row of a table."""
        return table_row(self.name, self.default, self.help)


class CommandPage:
    """The verbs of a page, and the groups that several of them share."""

    def __init__(self, of_training: bool) -> None:
        self._commands = dict(_verbs(get_command(app)))
        self._rows = {
            verb: [FlagRow.of(parameter) for parameter in command.params]
            for verb, command in self._commands.items()
        }
        counts = Counter(row for rows in self._rows.values() for row in rows)
        self.groups: dict[str, list[FlagRow]] = {}
        for row, count in counts.items():
            if count >= (FEWEST_VERBS if row.panel is None else 2):
                group = self.groups.setdefault(row.panel or COMMON, [])
                group[:] = [one for one in group if one.name != row.name or counts[one] > count]
                if all(one.name != row.name for one in group):
                    group.append(row)
        self._is_here = {verb: verb.startswith(TRAINING) == of_training for verb in self._commands}
        self._elsewhere = {name for name in self.groups if self._is_of_training(name) != of_training}

    def _is_of_training(self, group: str) -> bool:
        """Whether only verbs of training take a group."""
        rows = self.groups[group]
        return all(verb.startswith(TRAINING) for verb, own in self._rows.items() if {*rows} & {*own})

    def text(self) -> str:
        """The page below its introduction."""
        verbs = [self._verb(verb, command) for verb, command in self._commands.items() if self._is_here[verb]]
        shared = [
            _table(f"### {name}", rows) for name, rows in self.groups.items() if name not in self._elsewhere
        ]
        return "\n".join([*verbs, SHARED_INTRODUCTION, *shared])

    def _verb(self, verb: str, command: Any) -> str:
        arguments = "".join(f" [{p.name.upper()}]" for p in command.params if p.param_type_name == "argument")
        lines = [f"## `slipstream {verb}{arguments}`", "", command.help, ""]
        rows = self._rows[verb]
        own: dict[str, list[FlagRow]] = {}
        for row in rows:
            if row not in self.groups.get(row.panel or COMMON, []):
                own.setdefault(row.panel or "", []).append(row)
        for panel, mine in own.items():
            lines.append(_table(f"**{panel}**" if panel else "", mine))
        taken = [self._taken(name, rows) for name in self.groups]
        if any(taken):
            also = f"Also: {'; '.join(filter(None, taken))}."
            lines += [textwrap.fill(also, 118, break_long_words=False, break_on_hyphens=False), ""]
        return "\n".join(lines)

    def _taken(self, name: str, rows: list[FlagRow]) -> str:
        """What a verb takes of a group: its link, and the flags that it has or lacks, whichever are fewer."""
        group = self.groups[name]
        have = [row.name for row in group if row in rows]
        lack = [row.name for row in group if row not in rows]
        if not have:
            return ""
        page = "cli.md" if name in self._elsewhere else ""
        link = f"[{name}]({page}#{_anchor(name)})"
        if not lack:
            return link
        names = have if len(have) <= len(lack) else lack
        return f"{link} {'only' if names is have else 'without'} {', '.join(map(_first, names))}"


def _first(name: str) -> str:
    """The longest of a flag's spellings that turns it on."""
    return next((each for each in name.split(", ") if each.startswith("`--")), name)


def _anchor(group: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", group.lower())


def _table(heading: str, rows: list[FlagRow]) -> str:
    head = [heading, ""] if heading else []
    return "\n".join([*head, "| | default | |", "|---|---|---|", *(row.line() for row in rows), ""])


def table_row(*cells: str) -> str:
    """A row of a Markdown table."""
    escaped = [re.sub(r"\s+", " ", cell or "").replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _verbs(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each verb's full name and command, those of groups included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{above}{name} ")
        else:
            yield above + name, command

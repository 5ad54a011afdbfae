"""The formats in which models write tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.config import reject_unknown


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Fixed texts around the names and arguments of calls.

    One call is `head`, its function's name, `middle`, its arguments as a JSON object, `tail`. All of them are `begin`,
    the calls with `between` between them, `end`.
    """

    name: str
    mark: str
    """The text that marks the beginning of calls; `begin` and `head` together begin with it."""
    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str | None = ""
    """Between two calls. None where the model writes at most one."""
    end: str = ""
    anywhere: bool = True
    """The mark may follow other text; otherwise it counts only at the very beginning."""
    known_by: str = ""
    """Text that chat templates of such models contain."""

    def written(self, calls: Seq[tuple[str, str]]) -> str:
        """A call as the model writes it."""
        texts = [f"{self.head}{name}{self.middle}{arguments}{self.tail}" for name, arguments in calls]
        return self.begin + (self.between or "").join(texts) + self.end


FORMATS = (
    ToolFormat(
        "mistral_args",
        mark="[TOOL_CALLS]",
        head="[TOOL_CALLS]",
        middle="[ARGS]",
        tail="",
        known_by="[ARGS]",
    ),
    ToolFormat(
        "mistral_tekken",
        mark="[TOOL_CALLS]",
        begin="[TOOL_CALLS][",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        between=", ",
        end="]",
        known_by="[TOOL_CALLS][",
    ),
    ToolFormat(
        "mistral",
        mark="[TOOL_CALLS]",
        begin="[TOOL_CALLS] [",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        between=", ",
        end="]",
        known_by="[TOOL_CALLS]",
    ),
    ToolFormat(
        "llama3_json",
        mark='{"name": "',
        head='{"name": "',
        middle='", "parameters": ',
        tail="}",
        between=None,
        anywhere=False,
        known_by="ipython",
    ),
    ToolFormat(
        "hermes",
        mark="<tool_call>",
        head='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
        known_by="<tool_call>",
    ),
)
"""In the order in which chat templates are compared. `hermes` (also Qwen's), `llama3_json` and `mistral` are vLLM's
names."""

FORMAT_NAMES = tuple(tool_format.name for tool_format in FORMATS)
DEFAULT = FORMATS[-1]


def tool_format(name: str | None, template: str) -> ToolFormat:
    """The format called `name`, else the one that the chat template contains, else `hermes`.

    Raises `ConfigError` for an unknown name.
    """
    if name is not None:
        reject_unknown([name], FORMAT_NAMES, "tool_call_parser")
        return next(known for known in FORMATS if known.name == name)
    return next((known for known in FORMATS if known.known_by in template), DEFAULT)


def chat_template(tokenizer: Any) -> str:
    """The chat template for a conversation with tools; empty where there is none."""
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(tools=[{}]))


def shows_tools(template: str) -> bool:
    """Whether a chat template reads the variable `tools`."""
    return re.search(r"\btools\b", template) is not None

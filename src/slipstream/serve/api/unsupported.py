"""Unknown names in a body: parameters of other servers, and fields that front ends add. A parameter of another
server that would change the answer is refused, except at a value that changes nothing. A misspelt name is refused.
The rest are fields that front ends use themselves, such as `chat_id`: they are ignored, and the response names
them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from slipstream.serve.api.errors import ApiError

IGNORED = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "modalities"),
    }
)
"""Parameters of OpenAI's that change nothing about the text."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""The values at which a parameter changes nothing; other values are refused. A parameter of `IGNORED` without an
entry is ignored at any value."""

_FORM = "give structured_outputs.{} instead"
_REASONING = "give chat_template_kwargs what the model's own template knows instead"
_SAMPLER = "this server does not sample so; leave it out"
_BEAMS = "there is no beam search here; ask for n answers"
_CUT = "prompts are never cut here; shorten them before they are sent"
_UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": ("give tools to /v1/chat/completions instead", ([],)),
    "function_call": ("give tool_choice to /v1/chat/completions instead", ("auto", "none")),
    "guided_json": (_FORM.format("json"), ()),
    "guided_regex": (_FORM.format("regex"), ()),
    "guided_choice": (_FORM.format("choice"), ()),
    "guided_grammar": (_FORM.format("grammar"), ()),
    "grammar": (_FORM.format("grammar"), ("",)),
    "regex": (_FORM.format("regex"), ("",)),
    "json_schema": (_FORM.format("json"), ()),
    "guided_decoding_backend": ("the server follows forms in one way; leave it out", ("auto",)),
    "guided_whitespace_pattern": ("give structured_outputs.disable_any_whitespace instead", ()),
    "cache_salt": ("give user instead, since nothing is shared between users", ()),
    "priority": ("requests have no priorities here; leave it out", (0,)),
    "truncate_prompt_tokens": (_CUT, ()),
    "truncation": (_CUT, ("disabled", False)),
    "continue_final_message": ("have /v1/completions continue the text instead", (False,)),
    "add_generation_prompt": ("a chat always goes on with the assistant's answer; leave it out", (True,)),
    "chat_template": ("the model's own template is used; give chat_template_kwargs its variables", ()),
    "documents": ("put them into a message", ([],)),
    "mm_processor_kwargs": ("chats and completions are text only", ({},)),
    "logits_processors": ("a request brings no code here; see logit_bias and structured_outputs", ([],)),
    "vllm_xargs": ("leave it out", ({},)),
    "kv_transfer_params": ("there is no other server to take keys and values from; leave it out", ({},)),
    "spaces_between_special_tokens": ("give true or false, which mean the same here", (True, False)),
    "return_tokens_as_token_ids": ("give return_token_ids instead", (False,)),
    "include_reasoning": ("an answer has no part of that name here", (True, False)),
    "reasoning_effort": (_REASONING, ("none",)),
    "reasoning": (_REASONING, ({}, {"effort": "none"})),
    "thinking": (_REASONING, ({"type": "disabled"},)),
    "thinking_token_budget": (_REASONING, ()),
    "enable_thinking": (_REASONING, ()),
    "verbosity": ("say in the prompt how long an answer should be", ("medium",)),
    "audio": ("chats and completions are text only", ()),
    "web_search_options": ("this server does not search", ()),
    "use_beam_search": (_BEAMS, (False,)),
    "num_beams": (_BEAMS, (1,)),
    "early_stopping": (_BEAMS, (False,)),
    "length_penalty": (_BEAMS, (1,)),
    "max_new_tokens": ("give max_tokens instead", ()),
    "max_length": ("give max_tokens instead", ()),
    "n_predict": ("give max_tokens instead", ()),
    "num_predict": ("give max_tokens instead", ()),
    "min_length": ("give min_tokens instead", (0,)),
    "temp": ("give temperature instead", ()),
    "repeat_penalty": ("give repetition_penalty instead", (1,)),
    "rep_pen": ("give repetition_penalty instead", (1,)),
    "stop_sequence": ("give stop instead", ([], "")),
    "stop_sequences": ("give stop instead", ([], "")),
    "ban_eos_token": ("give ignore_eos instead", (False,)),
    "custom_token_bans": ("give logit_bias of -100 instead", ("",)),
    "typical": (_SAMPLER, (1,)),
    "typical_p": (_SAMPLER, (1,)),
    "top_a": (_SAMPLER, (0,)),
    "tfs": (_SAMPLER, (1,)),
    "tfs_z": (_SAMPLER, (1,)),
    "top_n_sigma": (_SAMPLER, (0, -1)),
    "epsilon_cutoff": (_SAMPLER, (0,)),
    "eta_cutoff": (_SAMPLER, (0,)),
    "mirostat": (_SAMPLER, (0,)),
    "mirostat_mode": (_SAMPLER, (0,)),
    "dry_multiplier": (_SAMPLER, (0,)),
    "xtc_probability": (_SAMPLER, (0,)),
    "dynatemp_range": (_SAMPLER, (0,)),
    "dynamic_temperature": (_SAMPLER, (False,)),
    "smoothing_factor": (_SAMPLER, (0,)),
    "no_repeat_ngram_size": (_SAMPLER, (0,)),
    "penalty_alpha": (_SAMPLER, (0,)),
    "guidance_scale": (_SAMPLER, (1,)),
    "negative_prompt": (_SAMPLER, ("",)),
}

UNSUPPORTED = {name: advice for name, (advice, _) in _UNSUPPORTED.items()}
"""Names of other servers' parameters, and what to use instead."""
HARMLESS |= {name: values for name, (_, values) in _UNSUPPORTED.items()}

HINTS = ("cache_control",)
"""Fields of other servers within tools, messages and their parts that say nothing about the text."""
_HINTED = ("tools.function", "messages.content", "input.content")
"""The objects that may have hints: those of each list, and within them the object or the list of this name."""

MAX_IGNORED = 64
"""Most names of a body that are ignored."""
_SANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that may be repeated in a header and a log line."""


def left_out(
    value: Mapping[str, Any],
    known: Collection[str],
    ignored: Collection[str],
    unsupported: Mapping[str, str],
    harmless: Mapping[str, tuple[Any, ...]],
    ignores_unknown: bool,
) -> tuple[set[str], tuple[str, ...]]:
    """The names of a body that are left out of validation, and those among them that the response names.

    `known` are the body's own names; `ignored`, `unsupported` and `harmless` are as above. Without `ignores_unknown`
    validation refuses unknown names. Raises `ApiError` 400 that names the parameter.
    """
    out: set[str] = set()
    reported: list[str] = []
    for name, item in value.items():
        if name in known:
            continue
        if item is None:  # null is the same as leaving it out
            out.add(name)
        elif name in ignored or name in unsupported:
            out.add(name)
            if name in unsupported and not _is_among(item, harmless.get(name, ())):
                raise _unsupported(name, f"{name} is not supported here: {unsupported[name]}")
            if name in harmless and not _is_among(item, harmless[name]):
                if name != "store" or not ignores_unknown:
                    raise _unsupported(
                        name, f"{name} must be {' or '.join(map(json.dumps, harmless[name]))} here"
                    )
                reported.append(name)  # not storing does not change the answer
        elif ignores_unknown and len(reported) < MAX_IGNORED and _SANE_NAME.fullmatch(name):
            if (meant := near(name, known)) is not None:
                raise unknown(name, meant)
            out.add(name)
            reported.append(name)
    return out, tuple(reported)


def without_hints(value: dict[str, Any]) -> tuple[str, ...]:
    """Remove hints from a decoded body; returns where they were, as in `tools.cache_control`."""
    found: dict[str, None] = {}
    for path in _HINTED:
        outer, inner = path.split(".")
        for each in _objects(value.get(outer)):
            for place, within in ((outer, [each]), (path, _objects(each.get(inner)))):
                for one in within:
                    for name in HINTS:
                        if name in one:
                            del one[name]
                            found[f"{place}.{name}"] = None
    return tuple(found)


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, or the object itself."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def near(name: str, known: Collection[str]) -> str | None:
    """The known name of which `name` is a misspelling."""
    plain = {_plain(one): one for one in known}
    found = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=0.8)
    return plain[found[0]] if found else None


def unknown(param: str, meant: str | None) -> ApiError:
    """400 for an unknown name."""
    hint = f"; did you mean {meant}?" if meant else ""
    return ApiError(400, f"unknown parameter {param!r}{hint}", param=param, code="unknown_parameter")


def _plain(name: str) -> str:
    """A name without case and separators: topP, top-p and top_p are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_among(item: Any, values: Collection[Any]) -> bool:
    """Whether a value is one of several; `True` is not 1, and 1.0 is."""
    return any(item == one and isinstance(item, bool) == isinstance(one, bool) for one in values)


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")

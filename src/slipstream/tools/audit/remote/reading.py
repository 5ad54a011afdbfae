"""What a server's responses say, in one piece or streamed, in the dialects of several servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.tools.audit.records import AuditAnswer, AuditReply, TokenTop


@dataclass(slots=True)
class _Parts:
    """One choice, gathered from one or many payloads."""

    text: str = ""
    token_ids: list[int] | None = None
    entries_stand_for_tokens: bool = False
    """Whether the ids are those of log-probabilities, of which one may stand for the tokens of a whole character."""
    tops: list[TokenTop] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Append what a payload says of the choice."""
        said = choice.get("delta") or choice.get("message") or {}
        parts = (
            said.get("reasoning_content") or said.get("reasoning"),
            said.get("content"),
            choice.get("text"),
        )
        self.text += "".join(part for part in parts if isinstance(part, str))
        ids = choice.get("token_ids")
        tops, own_ids = _tops(choice.get("logprobs"))
        if ids is None and own_ids:
            ids, self.entries_stand_for_tokens = own_ids, True
        if ids is not None:
            self.token_ids = (self.token_ids or []) + list(ids)
        if tops is not None:
            self.tops = (self.tops or []) + tops
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        reason = choice.get("stop_reason")
        self.stop_reason = self.stop_reason if reason is None else reason


@dataclass(slots=True)
class ReplyReader:
    """Gathers a reply from its payloads."""

    request: int
    _choices: dict[int, _Parts] = field(default_factory=dict)
    _usage: dict[str, Any] = field(default_factory=dict)
    _prompt_token_ids: list[int] | None = None

    def add(self, payload: Mapping[str, Any]) -> None:
        """Take a whole response, or an event of a stream."""
        for choice in payload.get("choices") or []:
            self._choices.setdefault(int(choice.get("index") or 0), _Parts()).add(choice)
            self._prompt_token_ids = choice.get("prompt_token_ids") or self._prompt_token_ids
        self._prompt_token_ids = payload.get("prompt_token_ids") or self._prompt_token_ids
        self._usage = payload.get("usage") or self._usage

    def reply(self) -> AuditReply:
        """All that came."""
        shown = sum(len(parts.token_ids or []) for parts in self._choices.values())
        lacks_some = (self._usage.get("completion_tokens") or 0) > shown
        return AuditReply(
            request=self.request,
            answers=[_answer(index, parts, lacks_some) for index, parts in sorted(self._choices.items())],
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_output_tokens=self._usage.get("completion_tokens"),
            num_total_tokens=self._usage.get("total_tokens"),
            prompt_token_ids=self._prompt_token_ids,
        )


def _answer(index: int, parts: _Parts, lacks_some: bool) -> AuditAnswer:
    """`lacks_some`: fewer ids came than tokens were counted, so ids of entries that stand for several are unknown."""
    shown = parts.token_ids if parts.token_ids is not None else parts.tops
    hidden = 1 if parts.finish_reason == "stop" else 0
    joined = 0
    if parts.entries_stand_for_tokens:
        joined = sum(_num_joined(top.token) for top in parts.tops or ())
    return AuditAnswer(
        index=index,
        text=parts.text,
        token_ids=None if joined and lacks_some else parts.token_ids,
        finish_reason=parts.finish_reason,
        stop_reason=parts.stop_reason,
        tops=parts.tops,
        num_tokens=None if shown is None else len(shown),
        num_hidden=hidden + joined,
    )


def _num_joined(entry: str) -> int:
    """Tokens at most that an entry has beyond its own: llama.cpp waits until the bytes of a character are whole."""
    return sum(len(character.encode("utf-8", "replace")) - 1 for character in entry if character != "\ufffd")


def _tops(logprobs: Any) -> tuple[list[TokenTop] | None, list[int]]:
    """(tokens with their log-probabilities, their ids where the server names them), from either of OpenAI's forms."""
    if not isinstance(logprobs, Mapping):
        return None, []
    if isinstance(entries := logprobs.get("content"), list):
        tops = [
            TokenTop(
                str(entry.get("token")),
                _number(entry.get("logprob")),
                _pairs(entry.get("top_logprobs") or []),
            )
            for entry in entries
        ]
        ids = [entry["id"] for entry in entries if isinstance(entry.get("id"), int)]
        return tops, ids if len(ids) == len(entries) else []
    if not isinstance(tokens := logprobs.get("tokens"), list):
        return None, []
    values = logprobs.get("token_logprobs") or [None] * len(tokens)
    others = logprobs.get("top_logprobs") or [None] * len(tokens)
    tops = [
        TokenTop(str(token), _number(value), tuple(sorted((other or {}).items(), key=lambda pair: -pair[1])))
        for token, value, other in zip(tokens, values, others, strict=True)
    ]
    return tops, []


def _pairs(entries: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((str(entry.get("token")), _number(entry.get("logprob"))) for entry in entries)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("-inf")

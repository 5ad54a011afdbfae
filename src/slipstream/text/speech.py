"""How the answers of a speech model begin: its language, and what is made of what is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError


@dataclass(frozen=True)
class SpeechTexts:
    """The tokens that say so; a model of one language has none for languages."""

    languages: dict[str, int]
    """Code ("en") to token."""
    tasks: dict[str, int]
    """`transcribe` and `translate` to token."""
    no_timestamps: int | None
    default_language: str | None = None
    default_task: str | None = None

    @classmethod
    def of(cls, settings: Any) -> SpeechTexts:
        """What a generation configuration of Transformers says."""
        found: Mapping[str, int] = getattr(settings, "lang_to_id", None) or {}
        is_multilingual = getattr(settings, "is_multilingual", bool(found))
        tasks = (getattr(settings, "task_to_id", None) or {}) if is_multilingual else {}
        return cls(
            languages={name.strip("<|>"): int(token) for name, token in found.items()}
            if is_multilingual
            else {},
            tasks={name: int(token) for name, token in tasks.items()},
            no_timestamps=getattr(settings, "no_timestamps_token_id", None),
            default_language=getattr(settings, "language", None),
            default_task=getattr(settings, "task", None),
        )

    def begin(self, language: str | None, task: str | None) -> list[int]:
        """What follows the start of an answer; raises `RequestError` for what the model has no token for."""
        return [*self._language(language), *self._task(task), *self._ends]

    @property
    def _ends(self) -> list[int]:
        return [] if self.no_timestamps is None else [self.no_timestamps]

    def detects(self, language: str | None) -> bool:
        """Whether a request leaves it to the model which language is spoken."""
        return bool(self.languages) and (language or self.default_language) is None

    def language_of(self, token_id: int) -> str:
        """The code of the language that a token says."""
        return next(code for code, token in self.languages.items() if token == token_id)

    def _language(self, language: str | None) -> list[int]:
        code = (language or self.default_language or "").lower().strip("<|>")
        if not self.languages:
            if code not in ("", "en", "english"):
                raise RequestError(f"this model hears English alone, got the language {language!r}")
            return []
        if code not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise RequestError(f"language must be one of {known}, got {language!r}")
        return [self.languages[code]]

    def _task(self, task: str | None) -> list[int]:
        name = task or self.default_task or "transcribe"
        if not self.tasks:
            if name != "transcribe":
                raise RequestError(f"this model transcribes, and has no task {name!r}")
            return []
        if name not in self.tasks:
            raise RequestError(f"task must be one of {', '.join(sorted(self.tasks))}, got {task!r}")
        return [self.tasks[name]]

"""The steps of one answer as a state machine: protected, drafted, judged, kept or rewritten. No tensors, no models.

It reads the answer's bytes token by token and says when a step may be drafted. The first token of every step is the
target's own, so the target alone decides when the thinking ends. A step under way is in one of three stages:

    OWN -> DRAFTING -> DRAFTED -> OWN
     ^________|

In `OWN` the target writes. In `DRAFTING` the draft writes ahead of the committed text, up to the separator, and any
fault ends it. In `DRAFTED` a whole step waits for its judge. Whatever the verdict, the committed tokens are pushed as
any others are. Each step is drafted once at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slipstream.reasoning.options import StepOptions
from slipstream.reasoning.record import StepAuthor, StepRecord, StepScore, StepVerdict


class AnswerPhase(StrEnum):
    """Where an answer is."""

    BEFORE = "before"
    THINKING = "thinking"
    ANSWERING = "answering"


class StepStage(StrEnum):
    """Who is at work on the step under way."""

    OWN = "own"
    DRAFTING = "drafting"
    DRAFTED = "drafted"


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The texts that tell steps apart, as bytes."""

    separator: bytes
    think_end: bytes
    think_start: bytes | None = None
    """None: the thinking begins with the answer."""


class StepTracker:
    """One answer's steps. Calls that do not suit the stage raise `ValueError`."""

    def __init__(self, marks: StepMarks, options: StepOptions, unfit: str = "") -> None:
        """`unfit` says why nothing can be drafted for this answer, empty where it can."""
        self.options = options
        self.phase = AnswerPhase.BEFORE if marks.think_start is not None else AnswerPhase.THINKING
        self.stage = StepStage.OWN
        self.log: list[StepRecord] = []
        self._marks = marks
        self._unfit = unfit
        self._failed_in_a_row = 0
        self._before = b""
        """The end of the text while the thinking has not begun."""
        self._begin_step(b"")

    def _begin_step(self, text: bytes) -> None:
        self._text = text
        """Text of the step under way, as far as it is committed."""
        self._draft = b""
        self._num_tokens = 0
        self._num_kept = 0
        self._num_drafted = 0
        self._was_drafted = False
        self._verdict = StepVerdict.OWN
        self._score: StepScore | None = None
        self._reason = ""

    # --- the committed text -----------------------------------------------------------------------------------

    def read_prompt(self, text: bytes) -> None:
        """The prompt's end: where it opens the thinking, the answer begins with it."""
        start = self._marks.think_start
        if start is not None and text.rfind(start) > text.rfind(self._marks.think_end):
            self.phase = AnswerPhase.THINKING

    def push(self, token: bytes, kept: bool = False) -> None:
        """A token was committed; `kept` where it belongs to a drafted step that the judge kept."""
        if self.phase is AnswerPhase.BEFORE:
            self._read_before(token)
        elif self.phase is AnswerPhase.THINKING:
            self._read_step(token, kept)

    def _read_before(self, token: bytes) -> None:
        start = self._marks.think_start
        assert start is not None
        self._before += token
        found = self._before.find(start)
        if found >= 0:
            self.phase = AnswerPhase.THINKING
            rest = self._before[found + len(start) :]
            self._begin_step(rest)
            self._num_tokens = int(bool(rest))
        self._before = self._before[-len(start) :]

    def _read_step(self, token: bytes, kept: bool) -> None:
        searched = max(len(self._text) - self._longest_mark, 0)
        self._text += token
        self._num_tokens += 1
        self._num_kept += kept
        end = self._text.find(self._marks.think_end, searched)
        if end >= 0:
            self.phase = AnswerPhase.ANSWERING
            if self._text[:end].strip():
                self._close()
            return
        found = self._text.rfind(self._marks.separator, searched)
        if found < 0:
            return
        rest = self._text[found + len(self._marks.separator) :]
        if self._text[:found].strip():
            self._close()
            self._begin_step(rest)
            self._num_tokens = int(bool(rest.strip()))
        else:  # separators alone are no step
            self._begin_step(rest)

    @property
    def _longest_mark(self) -> int:
        return max(len(self._marks.separator), len(self._marks.think_end))

    def _close(self) -> None:
        author = StepAuthor.DRAFT if self._num_kept else StepAuthor.TARGET
        verdict, reason = self._verdict, self._reason
        if not self._was_drafted:
            verdict, reason = self._why_not_drafted()
        self.log.append(
            StepRecord(
                len(self.log), author, verdict, self._num_tokens, self._num_drafted, self._score, reason
            )
        )

    def _why_not_drafted(self) -> tuple[StepVerdict, str]:
        if self._unfit:
            return StepVerdict.OWN, self._unfit
        if len(self.log) < self.options.protect_first_steps:
            return StepVerdict.PROTECTED, ""
        if self.has_given_up:
            return StepVerdict.OWN, f"given up after {self._failed_in_a_row} drafted steps that were not kept"
        if self._num_tokens > self.options.max_step_tokens:
            return StepVerdict.OWN, f"longer than max_step_tokens {self.options.max_step_tokens}"
        return StepVerdict.OWN, "complete before it could be drafted"

    def end(self) -> None:
        """The answer has ended; a step that it ends in is logged too."""
        self.stage = StepStage.OWN
        if self.phase is AnswerPhase.THINKING and self._text.strip():
            self._close()
        self.phase = AnswerPhase.ANSWERING

    # --- the draft --------------------------------------------------------------------------------------------

    @property
    def has_given_up(self) -> bool:
        return self._failed_in_a_row >= self.options.give_up_after

    @property
    def may_draft(self) -> bool:
        """Whether the step under way may be drafted now."""
        return (
            self.stage is StepStage.OWN
            and self.phase is AnswerPhase.THINKING
            and not self._was_drafted
            and not self._unfit
            and not self.has_given_up
            and len(self.log) >= self.options.protect_first_steps
            and bool(self._text.strip())
            and self._num_tokens < self.options.max_step_tokens
            and not self.may_end(self._text)
        )

    def may_end(self, text: bytes) -> bool:
        """Whether `text`, at the beginning of a step, may be the beginning of the end of the thinking."""
        said = text.lstrip()
        return bool(said) and (
            self._marks.think_end.startswith(said) or said.startswith(self._marks.think_end)
        )

    def begin_draft(self) -> None:
        """The draft begins to write the rest of the step."""
        if not self.may_draft:
            raise ValueError("the step under way may not be drafted")
        self.stage = StepStage.DRAFTING
        self._was_drafted = True
        self._draft = b""

    def push_draft(self, token: bytes, is_end: bool = False) -> StepStage:
        """The draft wrote a token, `is_end` where that ends its text. The stage afterwards: `DRAFTING` to go on,
        `DRAFTED` where the step is whole, `OWN` where it is given up."""
        if self.stage is not StepStage.DRAFTING:
            raise ValueError("nothing is being drafted")
        self._num_drafted += 1
        self._draft += token
        written = self._text + self._draft
        tags = [tag for tag in (self._marks.think_start, self._marks.think_end) if tag and tag in written]
        if is_end:
            self.abandon("the draft ended its text")
        elif tags:
            self.abandon(f"the draft wrote {tags[0].decode(errors='replace')!r} inside the step")
        elif self._marks.separator in written:
            self.stage = StepStage.DRAFTED
        elif self._num_tokens + self._num_drafted >= self.options.max_step_tokens:
            self.abandon(f"no separator within max_step_tokens {self.options.max_step_tokens}")
        return self.stage

    def abandon(self, reason: str, counts: bool = True) -> StepStage:
        """Give up the draft of this step, whole or not; the target writes it. `counts` where the draft is at fault.
        The stage afterwards, as `push_draft` returns it."""
        if self.stage is StepStage.OWN:
            raise ValueError("nothing is being drafted")
        self.stage = StepStage.OWN
        self._verdict, self._reason = StepVerdict.OWN, reason
        self._failed_in_a_row += counts
        return self.stage

    def judge(self, score: StepScore, keep: bool, is_last: bool = False) -> None:
        """The judge's verdict on the whole step. `is_last`: it is good, but the target ends its thinking behind it."""
        if self.stage is not StepStage.DRAFTED:
            raise ValueError("no whole step waits for its judge")
        self.stage = StepStage.OWN
        self._score = score
        if is_last:
            self._verdict = StepVerdict.LAST
        elif keep:
            self._verdict = StepVerdict.KEPT
            self._failed_in_a_row = 0
        else:
            self._verdict = StepVerdict.REWRITTEN
            self._reason = "" if score.is_sure else "the judge gave no mark"
            self._failed_in_a_row += 1

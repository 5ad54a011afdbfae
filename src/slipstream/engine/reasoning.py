"""Step-level speculation in the engine's step: a drafter writes whole steps of thinking, and a judge keeps them or not.

The step under way is a proposal like any other: a chain of the drafted tokens, with the judge's question behind it. One
pass of the target computes both. The judge looks at the logits; the question's nodes are then cut off. A kept step is
taken as it is, and the verifier chooses the token behind it; a refused one is a chain that the verifier judges exactly.
So the verifier still chooses every token that is not the draft's, and requests without step-level speculation see none
of this.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import make_drafter
from slipstream.engine.extension import StepExtension, Verify
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError, ReasoningError
from slipstream.models import load_draft_tokenizer
from slipstream.models.cpu import threads
from slipstream.reasoning.config import ReasoningConfig
from slipstream.reasoning.judges import LogprobJudge, ScoreJudge, StepJudge
from slipstream.reasoning.options import StepOptions
from slipstream.reasoning.question import digit_token_ids, question_token_ids
from slipstream.reasoning.record import StepScore, StepVerdict
from slipstream.reasoning.steps import StepMarks, StepStage, StepTracker
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.common_prefix import common_prefix_length
from slipstream.text.token_bytes import TokenBytes

MAX_SILENT_CALLS = 16
"""Calls in a row in which the draft writes nothing, besides those that read the text before it."""


@dataclass(slots=True)
class _Thinker:
    """One sequence that requested step-level speculation."""

    sequence: Sequence
    tracker: StepTracker
    judge: StepJudge
    processor: LogitsProcessor
    draft_sequence: Sequence
    """The text as the draft sees it: the committed one and what it has written behind it."""
    draft: list[int] = field(default_factory=list)
    num_silent_calls: int = 0
    score: StepScore | None = None
    """Score of the step that is being judged in the pass under way."""
    keeps: bool = False

    @property
    def num_nodes(self) -> int:
        return len(self.draft) + len(self.judge.question)

    def permits(self, token_id: int) -> bool:
        """Whether the request's rules allow a token, no end token, behind what is written. A kept token is not
        sampled, so no mask would have kept it out."""
        processor = self.processor
        return not processor.masks or processor.permits(self.draft_sequence.output_token_ids, token_id)


class StepSpeculation(StepExtension):
    """The draft that writes steps, the judges, and the answers that are thought out with them."""

    reads_logits = True
    lossy = True

    def __init__(self, speculation: ParsedSpeculation, context: DraftContext, max_rows: int) -> None:
        """`max_rows` is how long a step and its question may be together, in tokens.

        Raises `ConfigError` or `ModelError` where the draft cannot be made.
        """
        assert speculation.reasoning is not None
        assert speculation.step_drafter is not None
        config = self.config = speculation.reasoning
        chosen = speculation.step_drafter
        self.step_drafter = make_drafter(chosen.config, chosen.drafter, chosen.options, context)
        if not self.step_drafter.traits.reads_text_only:
            raise ConfigError(
                f"reasoning method {config.method!r} reads more of the target than the text; use draft_model"
            )
        timeout_s = speculation.config.draft_timeout_s
        self._guard = Guard(self.step_drafter, context.vocab_size, context.verifier.kinds, timeout_s)
        self._max_rows = max_rows
        self._max_read_rows = context.engine_config.max_num_batched_tokens
        tokens = TokenBytes(context.tokenizer, context.engine_config.model)
        self._bytes = tokens.ordinary | {number: text.encode() for number, text in tokens.special.items()}
        self._marks = StepMarks(
            config.separator.encode(),
            config.think_end.encode(),
            None if config.think_start is None else config.think_start.encode(),
        )
        self._judges: dict[str, StepJudge] = {"logprob": LogprobJudge()}
        self._no_score = ""
        try:
            question = question_token_ids(context.tokenizer, config.question)
            self._judges["score"] = ScoreJudge(question, digit_token_ids(context.tokenizer))
        except ConfigError as error:
            if config.question is not None:
                raise
            self._no_score = str(error)
        self.unfit = _unfit_template(config, context)
        """Why no step is drafted at all; empty where they are."""
        self._end_token_ids: frozenset[int] = frozenset()
        self._max_model_len = context.max_model_len
        self._num_operator_threads = (
            1 if context.target is None else context.target.executor.num_operator_threads
        )
        self._thinkers: dict[int, _Thinker] = {}

    def drafters(self) -> list[Drafter]:
        """The one that writes."""
        return [self.step_drafter]

    def begin(self, num_slots: int, end_token_ids: frozenset[int], max_model_len: int) -> None:
        """Make room for what the draft reads."""
        self.step_drafter.allocate(num_slots)
        self._end_token_ids, self._max_model_len = end_token_ids, max_model_len

    def reset(self) -> None:
        """Forget what the draft kept from finished sequences."""
        self.step_drafter.reset()

    # --- requests ---------------------------------------------------------------------------------------------

    def check(self, options: StepOptions, params: SamplingParams) -> None:
        """Raise `ReasoningError` for a request that cannot be served with step-level speculation."""
        if options.draft not in (None, self.config.name):
            raise ReasoningError(f"reasoning draft must be {self.config.name!r} here, got {options.draft!r}")
        if options.judge not in self._judges:
            raise ReasoningError(self._no_score)
        if params.structured is not None:
            raise ReasoningError(
                "reasoning drafts steps of free text; leave out reasoning, or the structured output"
            )

    def open(self, sequence: Sequence, processor: LogitsProcessor) -> None:
        """Follow an answer that requested it; tokens that came with it are read."""
        options = sequence.options.reasoning
        if options is None:
            return
        tracker = StepTracker(self._marks, options, self.unfit)
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        if self._marks.think_start is not None:
            tracker.read_prompt(self._text(prompt))
        for token_id in sequence.output_token_ids:
            tracker.push(self._bytes.get(token_id, b""))
        draft_sequence = Sequence(
            id=sequence.id,
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[],
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=sequence.params,
            seed=sequence.seed,
            options=sequence.options,
            nonce=sequence.nonce,
        )
        self._thinkers[sequence.id] = _Thinker(
            sequence, tracker, self._judges[options.judge], processor, draft_sequence
        )
        sequence.metrics.lossy = True

    def release(self, sequence: Sequence) -> None:
        """What was drafted for it is forgotten; of a finished answer the last step is logged, and all are counted."""
        thinker = self._thinkers.get(sequence.id)
        if thinker is None:
            return
        if sequence.finished:
            _record(thinker)
        if thinker.tracker.stage is not StepStage.OWN:
            self._abandon(thinker, "the request had to wait for room in the cache", counts=False)
        thinker.draft_sequence.finish_reason = sequence.finish_reason
        self._guard.release(thinker.draft_sequence)
        thinker.draft_sequence.token_ids.clear()
        if sequence.finished:
            del self._thinkers[sequence.id]

    # --- before the plan --------------------------------------------------------------------------------------

    def propose(self) -> dict[int, Proposal]:
        """Let the draft write on at the steps under way: sequences whose step is not whole await it. The whole ones
        are proposed, each with its question.

        One call of some tokens, also where no request waits for the target: requests and aborts come in between steps.
        """
        started_s = time.perf_counter()
        if self._thinkers:
            with threads.operators(self._num_operator_threads):
                self._write()
        self.propose_s = time.perf_counter() - started_s if self._thinkers else 0.0
        return {
            number: Proposal.chain([*thinker.draft, *thinker.judge.question])
            for number, thinker in self._thinkers.items()
            if thinker.sequence.num_step_nodes
        }

    def _write(self) -> None:
        for thinker in self._thinkers.values():
            if thinker.tracker.may_draft and self._is_ready(thinker.sequence):
                thinker.tracker.begin_draft()
                thinker.sequence.awaits_draft = True
                thinker.num_silent_calls = 0
                self._read(thinker)
        if writing := [t for t in self._thinkers.values() if t.tracker.stage is StepStage.DRAFTING]:
            self._write_once(writing)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether its next pass of the target would decode, and there is room for a step behind it."""
        return not sequence.finished and sequence.num_pending == 1 and self._room(sequence) > 1

    def _room(self, sequence: Sequence) -> int:
        """How many more tokens the answer may have."""
        to_context = self._max_model_len - len(sequence.token_ids)
        return int(min(sequence.max_output_tokens - sequence.num_output_tokens, to_context))

    def _write_once(self, writing: Seq[_Thinker]) -> None:
        """One call of the draft for all of them."""
        budgets = [self.config.chunk_tokens] * len(writing)
        proposals = self._guard.propose([thinker.draft_sequence for thinker in writing], budgets)
        seen: list[Observation] = []
        for thinker, proposal in zip(writing, proposals, strict=True):
            before = len(thinker.draft_sequence.token_ids)
            taken = self._take(thinker, proposal) if self._guard.serves(thinker.draft_sequence) else 0
            if not len(proposal) and thinker.tracker.stage is StepStage.DRAFTING:
                self._note_silence(thinker)
            seen.append(
                # No pass of the target has seen them: the drafters that write steps do not look at logits.
                Observation(
                    thinker.draft_sequence, proposal, taken, _no_logits(), num_before=before, was_cut=True
                )
            )
        self._guard.observe(seen)

    def _take(self, thinker: _Thinker, proposal: Proposal) -> int:
        """Append a chain to the step, up to its end; how many of its tokens were taken."""
        tracker, stops = thinker.tracker, thinker.sequence.params.stop_token_ids
        for number, token_id in enumerate(proposal.token_ids):
            is_end = token_id in self._end_token_ids or token_id in stops
            stage = tracker.push_draft(self._bytes.get(token_id, b""), is_end)
            if stage is not StepStage.OWN and not thinker.permits(token_id):
                stage = tracker.abandon(
                    "the draft wrote what the request's bad words or allowed tokens forbid"
                )
            if stage is StepStage.OWN:
                self._stop_writing(thinker)
                return number
            thinker.draft.append(token_id)
            thinker.draft_sequence.token_ids.append(token_id)
            if stage is StepStage.DRAFTED:
                self._finish_step(thinker)
                return number + 1
        if len(proposal):
            thinker.num_silent_calls = 0
        return len(proposal)

    def _finish_step(self, thinker: _Thinker) -> None:
        """The step is whole: its next pass of the target checks it, where it can."""
        sequence = thinker.sequence
        num_nodes = thinker.num_nodes
        if len(thinker.draft) + 1 > self._room(sequence):
            self._abandon(thinker, "the answer's last tokens are the target's own", counts=False)
        elif num_nodes + 1 > self._max_model_len - len(sequence.token_ids):
            self._abandon(thinker, "the context has no room for the judge's question", counts=False)
        elif num_nodes > self._max_rows:
            self._abandon(thinker, f"longer than a pass has rows to spare ({self._max_rows})")
        else:
            sequence.awaits_draft = False
            sequence.num_step_nodes = num_nodes

    def _note_silence(self, thinker: _Thinker) -> None:
        thinker.num_silent_calls += 1
        num_reading = len(thinker.draft_sequence.token_ids) // self._max_read_rows * len(self._thinkers)
        if (
            not self._guard.serves(thinker.draft_sequence)
            or thinker.num_silent_calls > num_reading + MAX_SILENT_CALLS
        ):
            self._abandon(thinker, "the draft wrote nothing")

    def _abandon(self, thinker: _Thinker, reason: str, counts: bool = True) -> None:
        thinker.tracker.abandon(reason, counts)
        self._stop_writing(thinker)

    def _stop_writing(self, thinker: _Thinker) -> None:
        thinker.draft = []
        thinker.sequence.awaits_draft = False
        thinker.sequence.num_step_nodes = 0

    def _read(self, thinker: _Thinker) -> None:
        """Bring the draft's text to the committed one."""
        text, seen = thinker.sequence.token_ids, thinker.draft_sequence.token_ids
        common = common_prefix_length(seen, text)
        if common < len(seen):
            del seen[common:]
            self._guard.rewind(thinker.draft_sequence)
        seen.extend(text[common:])

    # --- in the step ------------------------------------------------------------------------------------------

    def verify(self, items: Seq[StepItem], verify: Verify) -> None:
        """A kept step is given, and the verifier chooses what follows; a refused one is a chain that it verifies."""
        judged = self._judge(items) if self._thinkers else []
        verify(items)
        if again := self._resolve(judged):
            verify(again)

    def _judge(self, items: Iterable[StepItem]) -> list[tuple[StepItem, _Thinker]]:
        """Give the steps of this pass their marks, and cut the questions off; sets `StepItem.num_given`."""
        judged: list[tuple[StepItem, _Thinker]] = []
        for item in items:
            if not item.sequence.num_step_nodes:
                continue
            thinker = self._thinkers[item.sequence.id]
            if item.max_draft_tokens < thinker.num_nodes:
                self._abandon(thinker, "the cache had no room for it", counts=False)
                continue
            draft = thinker.draft
            thinker.score = thinker.judge.score(item.logits, draft)
            thinker.keeps = thinker.judge.keeps(thinker.score, thinker.tracker.options)
            item.num_dropped_nodes = len(thinker.judge.question)
            item.proposal = Proposal.chain(draft)
            item.logits = item.logits[: 1 + len(draft)]
            item.num_given = len(draft) if thinker.keeps else 0
            judged.append((item, thinker))
        return judged

    def _resolve(self, judged: Iterable[tuple[StepItem, _Thinker]]) -> list[StepItem]:
        """The verdicts are known; the items whose step is the last one, to be verified again with nothing given."""
        again: list[StepItem] = []
        for item, thinker in judged:
            tracker, score = thinker.tracker, thinker.score
            assert score is not None
            following = item.verdict.next_token
            is_last = (
                item.num_given > 0
                and tracker.options.protect_last_step
                and (following in self._end_token_ids or tracker.may_end(self._bytes.get(following, b"")))
            )
            tracker.judge(score, thinker.keeps and not is_last, is_last)
            self._stop_writing(thinker)
            if is_last:
                item.num_given = 0
                again.append(item)
        return again

    def commit(self, items: Seq[StepItem]) -> None:
        """Read what the step has appended to the texts."""
        if not self._thinkers:
            return
        for item in items:
            thinker = self._thinkers.get(item.sequence.id)
            if thinker is not None:
                for number, token_id in enumerate(item.emitted_token_ids):
                    if token_id not in self._end_token_ids:
                        thinker.tracker.push(self._bytes.get(token_id, b""), kept=number < item.num_given)
                item.sequence.metrics.num_lossy_tokens += min(item.num_given, item.num_emitted)

    def _text(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes.get(token_id, b"") for token_id in token_ids)

    # --- state ------------------------------------------------------------------------------------------------

    def num_held(self) -> int:
        """Answers that are followed, or of which the draft keeps state; 0 once all have been released."""
        return max(len(self._thinkers), self._guard.num_held())

    def integrity(self) -> list[str]:
        """Violated invariants, a sentence each."""
        faults = self.step_drafter.integrity()
        for thinker in self._thinkers.values():
            sequence, stage = thinker.sequence, thinker.tracker.stage
            if sequence.awaits_draft != (stage is StepStage.DRAFTING):
                faults.append(f"sequence {sequence.id} awaits its draft in stage {stage}")
            if bool(sequence.num_step_nodes) != (stage is StepStage.DRAFTED):
                faults.append(
                    f"sequence {sequence.id} has {sequence.num_step_nodes} step nodes in stage {stage}"
                )
        return faults


def _record(thinker: _Thinker) -> None:
    """The answer has ended: log its last step and count them all."""
    thinker.tracker.end()
    log, metrics = thinker.tracker.log, thinker.sequence.metrics
    metrics.reasoning_log = [record.as_json() for record in log]
    metrics.num_drafted_steps = sum(record.num_drafted > 0 for record in log)
    metrics.num_kept_steps = sum(record.verdict is StepVerdict.KEPT for record in log)


def _no_logits() -> Any:
    import torch

    return torch.empty(0, 0)


def _unfit_template(config: ReasoningConfig, context: DraftContext) -> str:
    """Why the draft does not know how the target's prompts are written; empty where it does."""
    model = config.options.get("model")
    if not config.check_template or not isinstance(model, str):
        return ""
    trusts = context.engine_config.trust_remote_code
    theirs = load_draft_tokenizer(model, context.tokenizer, trust_remote_code=trusts)
    ours = getattr(context.tokenizer, "chat_template", None)
    if ours and getattr(theirs, "chat_template", None) != ours:
        return f"the draft {config.name!r} has not the target's chat template (check_template false trusts it anyway)"
    return ""

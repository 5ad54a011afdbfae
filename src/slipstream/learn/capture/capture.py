"""Makes records of served answers while they are decoded, concurrently with the engine's thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.request import FinishReason
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.engine import Engine
from slipstream.errors import LearnError, RecordTooLargeError
from slipstream.learn.capture.step_rows import DEFAULT_BRANCH_ROWS, DEFAULT_WIDTH, StepRows, joined, reduced
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import JUDGE_SHARE, CheckedRows, ServedRecord, purpose_of
from slipstream.learn.server_status import CaptureStatus
from slipstream.learn.storage.ring import Ring, RingIdentity
from slipstream.models.cpu import threads
from slipstream.models.files.digest import digest_of, digest_of_model

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20
"""Bytes of logits and rows that wait to be reduced; beyond it answers are skipped, and no step waits."""
GATHERED_STEPS, GATHERED_BYTES = 16, 4 * 2**20
"""So many steps, or so many bytes of logits, are reduced at a time: two threads that take turns at every step would
cost the engine more than the work does."""
MAX_ANSWER_BYTES = 8 * 2**20
"""Bytes of the rows of one answer; a longer one is skipped."""
MAX_SHARE = 0.02
"""Share of one core's time for capture in the long run; beyond it answers are skipped. Records are many more than a
learner needs where they cost that much, and few where it could not wait for them."""
BURST_S = 0.5
"""Processor time that may be used at once after a quiet time."""
RETRY_S = 10.0
"""After a write that failed, records are dropped for so long before the next attempt."""

Features = Callable[[Sequence], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """What is kept of an answer, and what capture may use."""

    width: int = DEFAULT_WIDTH
    """Tokens that are kept of a row."""
    max_branch_rows: int = DEFAULT_BRANCH_ROWS
    """Rows in rejected branches that are kept of a step."""
    judge_share: float = JUDGE_SHARE
    max_waiting_bytes: int = MAX_WAITING_BYTES
    max_share: float | None = MAX_SHARE
    """None does not bound the time."""
    retry_s: float = RETRY_S


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer in the making."""

    began_s: float
    parts: list[CheckedRows] = field(default_factory=list)
    num_bytes: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    why_not: str = ""
    """Why it will not become a record."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """An answer that a record is to be made of. Its sequence does not change any more."""

    answer: _Answer
    sequence: Sequence
    method: str
    version: str
    """Version that drafted: once the sequence is released it is not known."""
    features: Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class _Work:
    """What some steps left to do."""

    rows: list[tuple[_Answer, StepRows]] = field(default_factory=list)
    ended: list[_Ended] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0
    flushed: threading.Event | None = None


class Capture:
    """The engine's hook: `engine.on_checked = capture.observe`.

    In the engine's thread it takes note of what a step checked and nothing more; a thread of its own reduces the logits
    to their most probable tokens and writes records. What would make the engine wait is skipped and counted. Nothing is
    kept, not even in memory, of a request that `rules` or its own options exclude. Records are made of answers that
    ended by a stop rule or their length alone, decoded here from their first token on, and drawn from the target's own
    distribution: not under a grammar, a bias or a list of allowed tokens, which no draft can learn, nor with steps of a
    draft that a lossy judge has kept.
    """

    def __init__(
        self,
        ring: Ring,
        rules: PrivacyRules | None = None,
        limits: CaptureLimits | None = None,
        *,
        version_of: Callable[[Sequence], str] = lambda sequence: "",
        features_of: Features | None = None,
    ) -> None:
        """`version_of` names the version that drafts for a sequence; `features_of` gives what a head reads besides
        tokens."""
        self.ring = ring
        self.rules = PrivacyRules() if rules is None else rules
        self._limits = CaptureLimits() if limits is None else limits
        self._version_of = version_of
        self._features_of = features_of
        self._began_s = time.monotonic()
        self._used_s = -BURST_S if self._limits.max_share else 0.0
        """Processor time, less what was allowed and not used."""
        self._answers: weakref.WeakKeyDictionary[Sequence, _Answer] = weakref.WeakKeyDictionary()
        """Answers of what runs; an answer that was aborted goes with its sequence."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._num_records = 0
        self._num_skipped: dict[str, int] = {}
        self._capture_s = self._reduce_s = 0.0
        self._fault = ""
        self._retry_s = 0.0
        self._told_too_large = False
        self._gathered = _Work()
        self._thread = threading.Thread(target=self._run, name="learn-capture", daemon=True)
        self._thread.start()

    # --- in the engine's thread -------------------------------------------------------------------------------

    def observe(self, items: list[StepItem]) -> None:
        """Take note of a step; never raises, and never waits."""
        began_s, before_s = time.perf_counter(), time.thread_time()
        try:
            allowed = [item for item in items if self.rules.may_learn(item.sequence.options)]
            with self._lock:
                work = self._gathered
                work.num_steps += 1
                noted = [(item, answer) for item in allowed if not (answer := self._note(item)).why_not]
                self._hold_rows(noted, work)
                for item in allowed:
                    if item.sequence.finished:
                        self._end(item, work)
                if work.ended or work.num_steps >= GATHERED_STEPS or work.num_bytes >= GATHERED_BYTES:
                    self._hand_over()
        except Exception as error:  # serving goes on
            self._set_fault(f"capture failed: {type(error).__name__}: {error}")
        with self._lock:
            self._capture_s += time.perf_counter() - began_s
            self._used_s += time.thread_time() - before_s

    def _hand_over(self) -> None:
        """Give what was gathered to the capture's thread; the lock is held."""
        work, self._gathered = self._gathered, _Work()
        if work.rows or work.ended or work.flushed is not None:
            self._waiting_bytes += work.num_bytes
            self._work.put(work)

    def _note(self, item: StepItem) -> _Answer:
        """Count a step of an answer, which begins with its first one."""
        answer = self._answers.get(item.sequence)
        if answer is None:
            why_not = _why_not(item) or ("" if self._may_spend() else "over its share of time")
            answer = self._answers[item.sequence] = _Answer(time.time(), why_not=why_not)
        answer.num_steps += 1
        answer.num_draft_tokens += len(item.proposal)
        answer.num_accepted += item.num_accepted
        return answer

    def _hold_rows(self, noted: list[tuple[StepItem, _Answer]], work: _Work) -> None:
        """Hold what the step checked of these answers, and nothing of others.

        The logits of a step are one tensor: rows that share it with others' are copied, as holding them holds all.
        """
        wanted: dict[int, int] = {}
        """Bytes of the answers' rows by storage."""
        for item, _ in noted:
            place = item.logits.untyped_storage().data_ptr()
            wanted[place] = wanted.get(place, 0) + item.logits.nbytes
        for item, answer in noted:
            rows, storage = StepRows.of(item), item.logits.untyped_storage()
            if self._waiting_bytes + work.num_bytes + rows.logits.nbytes > self._limits.max_waiting_bytes:
                answer.why_not, answer.parts = "too much at a time", []
                continue
            if wanted[storage.data_ptr()] < storage.nbytes():
                rows = replace(rows, logits=rows.logits.clone())
            work.num_bytes += rows.logits.nbytes
            work.rows.append((answer, rows))

    def _end(self, item: StepItem, work: _Work) -> None:
        """Have a record made of an answer that has ended, where one can be made."""
        sequence = item.sequence
        answer = self._answers.pop(sequence)
        if sequence.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            answer.why_not = answer.why_not or "did not end well"
        if sequence.metrics.lossy:  # perhaps since its middle
            answer.why_not = answer.why_not or "lossy"
        if answer.why_not:
            self._count_skipped(answer.why_not)
            return
        features = {} if self._features_of is None else self._features_of(sequence)
        work.ended.append(_Ended(answer, sequence, item.method, self._version_of(sequence), features))

    def _may_spend(self) -> bool:
        """Whether another answer may be captured: time is allowed as it passes, and saved up to `BURST_S`."""
        if self._limits.max_share is None:
            return True
        now_s = time.monotonic()
        self._used_s = max(self._used_s - self._limits.max_share * (now_s - self._began_s), -BURST_S)
        self._began_s = now_s
        return self._used_s <= 0.0

    # --- in the capture's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            began_s = time.thread_time()
            try:
                self._reduce(work)
            except Exception as error:  # the next one may be well
                self._set_fault(f"capture failed: {type(error).__name__}: {error}")
            num_bytes, flushed = work.num_bytes, work.flushed
            del work
            with self._lock:
                self._waiting_bytes -= num_bytes
                used_s = time.thread_time() - began_s
                self._reduce_s += used_s
                self._used_s += used_s
            if flushed is not None:
                flushed.set()

    def _reduce(self, work: _Work) -> None:
        wanted = [(answer, rows) for answer, rows in work.rows if not answer.why_not]
        if wanted:
            with threads.operators(1):
                parts = reduced(
                    [rows for _, rows in wanted], self._limits.width, self._limits.max_branch_rows
                )
            for (answer, _), part in zip(wanted, parts, strict=True):
                answer.parts.append(part)
                answer.num_bytes += part.top_ids.nbytes + part.top_log_probs.nbytes + part.path_ids.nbytes
                if answer.num_bytes > MAX_ANSWER_BYTES:
                    answer.why_not, answer.parts = "too long", []
        for ended in work.ended:
            if ended.answer.why_not:
                self._skip(ended.answer.why_not)
            else:
                self._write(self._record(ended))

    def _record(self, ended: _Ended) -> ServedRecord:
        """The record of an answer all of whose rows have been reduced."""
        answer, sequence = ended.answer, ended.sequence
        params, prompt = sequence.params, sequence.num_prompt_tokens
        identity = self.ring.identity
        return ServedRecord(
            request_id=sequence.request_id,
            index=sequence.index,
            tenant=sequence.tenant,
            task=sequence.task,
            model_hash=identity.model_hash,
            template_hash=identity.template_hash,
            draft_version=ended.version,
            method=ended.method,
            prompt_ids=np.array(sequence.token_ids[:prompt], np.int32),
            token_ids=np.array(sequence.token_ids[prompt:], np.int32),
            rows=joined(answer.parts, len(sequence.token_ids) - prompt),
            finish_reason=str(sequence.finish_reason),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=sequence.seed,
            nonce=sequence.nonce,
            num_steps=answer.num_steps,
            num_draft_tokens=answer.num_draft_tokens,
            num_accepted=answer.num_accepted,
            created_s=answer.began_s,
            purpose=purpose_of(sequence.request_id, self._limits.judge_share),
            features=ended.features,
        )

    def _write(self, record: ServedRecord) -> None:
        if self._fault and time.monotonic() < self._retry_s:
            self._skip("cannot be written")
            return
        try:
            number = self.ring.append(record)
        except RecordTooLargeError as error:  # the next one may fit
            self._skip("too large for the ring")
            if not self._told_too_large:
                self._told_too_large = True
                logger.warning("learning: %s", error)
            return
        except LearnError as error:
            self._skip("cannot be written")
            self._set_fault(str(error))
            self._retry_s = time.monotonic() + self._limits.retry_s
            return
        if number is None:
            self._skip("forgotten")
            return
        with self._lock:
            self._num_records += 1
            recovered, self._fault = bool(self._fault), ""
        if recovered:
            logger.warning("learning: records are written again")

    # --- for others -------------------------------------------------------------------------------------------

    def status(self) -> CaptureStatus:
        """What was captured so far; may be called from any thread."""
        with self._lock:
            return CaptureStatus(
                self._num_records,
                dict(self._num_skipped),
                self._capture_s,
                self._reduce_s,
                self._waiting_bytes,
                self._fault,
            )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was observed before is written; False where that took longer."""
        done = threading.Event()
        with self._lock:
            self._gathered.flushed = done
            self._hand_over()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Write what waits, and end; nothing may be observed after."""
        with self._lock:
            self._hand_over()
        self._work.put(None)
        self._thread.join()

    def _skip(self, why: str) -> None:
        with self._lock:
            self._count_skipped(why)

    def _count_skipped(self, why: str) -> None:
        self._num_skipped[why] = self._num_skipped.get(why, 0) + 1

    def _set_fault(self, fault: str) -> None:
        with self._lock:
            is_new, self._fault = fault != self._fault, fault
        if is_new:
            logger.warning("learning: %s; serving goes on, and records are dropped meanwhile", fault)


def _why_not(item: StepItem) -> str:
    """Why nothing can be learned from an answer that begins with this step; empty where something can."""
    sequence, params = item.sequence, item.sequence.params
    if sequence.num_resumed_tokens or item.length_before > sequence.num_prompt_tokens:
        return "begun elsewhere"
    if sequence.grammar is not None or params.logit_bias or params.bad_words:
        return "constrained"
    return "constrained" if params.allowed_token_ids is not None else ""


def template_hash(tokenizer: Any) -> str:
    """Return the hash of the chat template that prompts are wrapped in; a tokenizer without one has a hash too."""
    template = getattr(tokenizer, "chat_template", None)
    return digest_of(repr(template).encode("utf-8", "surrogatepass"))


def identity_of(engine: Engine) -> RingIdentity:
    """The loaded target, its adapter and tokenizer included, and its chat template."""
    config = engine.config
    return RingIdentity(
        digest_of_model(config.model, config.tokenizer, config.lora), template_hash(engine.tokenizer)
    )

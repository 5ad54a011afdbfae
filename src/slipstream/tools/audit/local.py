"""An audit of an engine in this process: its answers with speculation against those without, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.assets.workload.prompts import Prompt
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.meter import Meter, meter
from slipstream.core.version import __version__
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.labels import engine_labels
from slipstream.engine.outputs import RequestOutput
from slipstream.errors import ConfigError
from slipstream.profiling.provenance import provenance, without_folders
from slipstream.text.prompts import encode_question
from slipstream.tools.audit.accounting import Knowledge, account
from slipstream.tools.audit.answering import Streamed, answer_all, answer_params, sampling_params
from slipstream.tools.audit.certificate import AuditData, Certificate, file_hashes
from slipstream.tools.audit.claims import SmallestDeviations
from slipstream.tools.audit.decision import AuditDecision, Evidence, decide, level_of_tests
from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.identity import AnswerComparison, compare
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.mix import FULL, Profile
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.audit.reference import distribution_tests
from slipstream.tools.audit.replaying import Replayer
from slipstream.tools.audit.settings import AuditSettings, data_hash, make_requests
from slipstream.tools.audit.ties import Rounding, joined

ON, OFF = "on", "off"
SAME = "same tokens"
NUM_NOISE_TEXTS = 4
"""Answers on which rounding is measured."""


@dataclass(frozen=True)
class LocalAudit:
    """What is audited, and how."""

    settings: AuditSettings
    speculative: SpeculativeConfig
    model: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    profiles: Seq[Profile] = FULL
    journal: AuditJournal = field(default_factory=AuditJournal)


@dataclass(slots=True)
class _Streams:
    """What the updates of the audited side add up to."""

    check: AuditCheck = field(
        default_factory=lambda: AuditCheck("streams", "what the updates add up to against the whole answers")
    )

    def add(self, reply: AuditReply, streamed: Streamed) -> None:
        """Compare a finished request with its updates."""
        for answer in reply.answers:
            same = streamed.token_ids.get(answer.index) == answer.token_ids
            same = same and streamed.text.get(answer.index) == answer.text
            self.check.expect(
                same, f"request {reply.request}: the stream is not the whole answer", reply.request
            )


def run_local(audit: LocalAudit) -> Certificate:
    """Load two engines on one target, with speculation and without, and compare them.

    Raises what loading raises, `ConfigError` where nothing is drafted, and `RequestError` for invalid prompts.
    """
    if audit.speculative.method == "off":
        raise ConfigError("there is no speculation to audit; choose a drafter, as in --spec ngram")
    options = dict(audit.engine_options)
    options.setdefault("max_num_seqs", max(audit.settings.concurrency, EngineConfig.max_num_seqs))
    if options.get("kv_cache_bytes") is None and options.get("gpu_memory_utilization") is None:
        options["kv_memory_fraction"] = options.get("kv_memory_fraction", EngineConfig.kv_memory_fraction) / 2
    off = make_engine(audit.model, None, {**options, "enable_prefix_caching": False})
    on = make_engine(audit.model, audit.speculative, options, off)
    return certify(audit, on, off)


def certify(audit: LocalAudit, on: Engine, off: Engine) -> Certificate:
    """Compare two engines of one target. `off` should neither draft nor reuse prefixes."""
    settings, replayer = audit.settings, Replayer(off)
    prompts = settings.prompts(lambda prompt: fits(off, settings, prompt))
    ids = [encode(off, settings, prompt) for prompt in prompts]
    requests = make_requests(settings, prompts, ids, audit.profiles, off.model.vocab_size)
    for request in requests:
        sampling_params(request).check_vocabulary(off.model.vocab_size)
    audit.journal.open(_key(audit, requests))
    streams = _Streams()
    repeatable = {r.number: on.intake.reproduces(sampling_params(r)) for r in requests}
    compared = [request for request in requests if repeatable[request.number]]
    complete = True
    try:
        with meter("audit", len(requests) + len(compared)) as shown:
            _send(audit, on, ON, requests, settings.concurrency, streams, shown)
            # Another order and other batches: neither may change an answer.
            _send(audit, off, OFF, compared[::-1], max(1, settings.concurrency // 2), _Streams(), shown)
    except KeyboardInterrupt:
        complete = False
    finally:
        audit.journal.close()
    return _Judging(audit, on, off, replayer, prompts, requests, repeatable, streams, complete).certificate()


@dataclass
class _Judging:
    """Judges answers, up to the certificate."""

    audit: LocalAudit
    on: Engine
    off: Engine
    replayer: Replayer
    prompts: Seq[Prompt]
    requests: Seq[AuditRequest]
    repeatable: Mapping[int, bool]
    streams: _Streams
    complete: bool

    def certificate(self) -> Certificate:
        audit, settings = self.audit, self.audit.settings
        mine, theirs = audit.journal.side(ON), audit.journal.side(OFF)
        replayer = self.replayer
        rounding = self._rounding(replayer, mine)
        identity = self._identity(replayer, rounding, mine, theirs)
        level = level_of_tests(settings.alpha)
        gaps = self._gaps(replayer, rounding, identity, mine, theirs)
        ties = rounding.test(gaps, identity.num_ties, level)
        sampled = [r for r in self.requests if not self.repeatable[r.number] and r.number in mine]
        answers = identity.check.num_compared
        unknown = rounding.unknown_test(identity.num_tokens, identity.num_unknown, level, answers)
        tests = [test for test in (ties, unknown) if test is not None]
        if sampled:
            tests += distribution_tests(replayer, sampled, mine, settings.confidence, rounding.tie_margin)
        by_number = {request.number: request for request in self.requests}
        known = Knowledge(replayer.end_tokens)
        checks = [identity.check, *account(by_number, mine, known), self.streams.check]
        smallest = SmallestDeviations(settings.confidence, settings.max_tokens)
        smallest.add_identity(identity, rounding)
        smallest.add_tests(tests)
        evidence = Evidence(
            checks, tests, lossy_settings(self.on), self._doubts(mine), (SAME, "distribution")
        )
        decision, reasons = decide(evidence, settings.alpha)
        return Certificate(
            decision=decision,
            reasons=reasons,
            claim=smallest.claim(decision is AuditDecision.CERTIFIED, "the same engine without speculation"),
            audited=_described(self.on, audit.model),
            compared_with=_described(self.off, audit.model),
            data=audit_data(settings, self.prompts, self.requests, mine),
            confidence=settings.confidence,
            checks=checks,
            tests=tests,
            ties=rounding.report(identity.num_ties, ties),
            smallest_deviations=smallest.as_json(),
            differences=[difference.as_json() for difference in identity.differences],
            notes=self._notes(mine),
            provenance=provenance(num_threads=audit.engine_options.get("num_threads")),
            complete=self.complete,
            interrupted=not self.complete,  # nothing else ends it early
        )

    def _rounding(self, replayer: Replayer, mine: Mapping[int, AuditReply]) -> Rounding:
        """How far a row's result depends on the other rows of its pass."""
        texts = [
            [*(request.token_ids or ()), *answer.token_ids]
            for request in self.requests[:NUM_NOISE_TEXTS]
            if request.number in mine and (answer := mine[request.number].answers[0]).token_ids
        ]
        noise = joined([replayer.row_noise(text) for text in texts])
        return Rounding(noise, self.audit.settings.tie_margin)

    def _identity(
        self,
        replayer: Replayer,
        rounding: Rounding,
        mine: Mapping[int, AuditReply],
        theirs: Mapping[int, AuditReply],
    ) -> AnswerComparison:
        check = AuditCheck(SAME, "every token with speculation against the one without, under the same seed")
        if not any(self.repeatable.values()):
            check.skipped = (
                f"under the verifier {self.on.verifier.traits().name} no seed repeats a sampled answer"
            )
        requests = {request.number: request for request in self.requests if self.repeatable[request.number]}

        def margin(request: AuditRequest, one: AuditAnswer, other: AuditAnswer, place: int) -> float | None:
            return first_margin(replayer, request, one, other, place)

        return compare(requests, mine, theirs, margin, rounding.tie_margin, check)

    def _gaps(
        self,
        replayer: Replayer,
        rounding: Rounding,
        identity: AnswerComparison,
        mine: Mapping[int, AuditReply],
        theirs: Mapping[int, AuditReply],
    ) -> list[Any]:
        """The distances of the two best choices in all compared answers; needed only where rounding changes any."""
        if not rounding.tie_margin and not identity.num_ties:
            return []
        return [
            replayer.replay(
                request.token_ids or (),
                answer.token_ids or [],
                answer_params(request),
                request.answer_seed(answer.index),
            ).gaps
            for request in self.requests
            if self.repeatable[request.number] and request.number in mine.keys() & theirs.keys()
            for answer in theirs[request.number].answers
        ]

    def _doubts(self, mine: Mapping[int, AuditReply]) -> list[str]:
        doubts = [] if self.complete else ["the audit was interrupted"]
        if not any(reply.num_draft_tokens for reply in mine.values()):
            doubts.append(
                "no draft token was checked, so nothing of speculation was seen; give other prompts"
            )
        return doubts

    def _notes(self, mine: Mapping[int, AuditReply]) -> list[str]:
        drafted = sum(reply.num_draft_tokens for reply in mine.values())
        accepted = sum(reply.num_accepted_tokens for reply in mine.values())
        notes = [f"{drafted:,} draft tokens were checked and {accepted:,} accepted"]
        if self.audit.journal.num_resumed:
            notes.append(f"{self.audit.journal.num_resumed:,} replies are from an earlier run")
        if failures := self.on.stats().num_draft_failures:
            notes.append(f"the drafter failed {failures} times, and answers went on without drafts")
        notes += [f"the target runs as {self.on.model.runs_as}", *engine_labels(self.on)]
        return notes


def lossy_settings(engine: Engine) -> list[str]:
    """What of an engine's configuration is made to change the text, a sentence each."""
    found: list[str] = []
    if engine.verifier.lossy:
        found.append(
            f"the verifier {engine.verifier.traits().name} is lossy: it does not keep the target's distribution"
        )
    if engine.config.allow_lossy:
        found.append(
            "allow_lossy lets requests choose step-level speculation, whose text is not the target's own"
        )
    return found


def first_margin(
    replayer: Replayer, request: AuditRequest, one: AuditAnswer, other: AuditAnswer, place: int
) -> float | None:
    """Nats between the target's own choice at `place` and the one that `one` has; None where an answer has ended."""
    ids, theirs = one.token_ids, other.token_ids
    if ids is None or theirs is None or request.token_ids is None or place >= min(len(ids), len(theirs)):
        return None
    params, seed = answer_params(request), request.answer_seed(one.index)
    return replayer.margin(request.token_ids, ids[:place], theirs[place], ids[place], params, seed)


def encode(engine: Engine, settings: AuditSettings, prompt: Prompt) -> list[int]:
    """A prompt's token ids, in the chat template where the model has one."""
    return encode_question(
        engine.tokenizer, prompt.text, prompt.messages, settings.raw, engine.model.vocab_size
    )


def audit_data(
    settings: AuditSettings,
    prompts: Seq[Prompt],
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> AuditData:
    """What was sent, and how much of it was answered."""
    answers = [answer for reply in replies.values() for answer in reply.answers]
    return AuditData(
        source=settings.workload.source,
        sha256=data_hash(requests),
        num_prompts=len(prompts),
        num_requests=len(requests),
        num_answers=len(answers),
        num_tokens=sum(
            len(answer.text) if answer.num_tokens is None else answer.num_tokens for answer in answers
        ),
        profiles=dict(Counter(request.profile for request in requests)),
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        concurrency=settings.concurrency,
    )


def fits(engine: Engine, settings: AuditSettings, prompt: Prompt) -> bool:
    """Whether the context has room for a prompt and its answer."""
    return len(encode(engine, settings, prompt)) + settings.max_tokens <= engine.max_model_len


def _send(
    audit: LocalAudit,
    engine: Engine,
    side: str,
    requests: Seq[AuditRequest],
    concurrency: int,
    streams: _Streams,
    shown: Meter,
) -> None:
    """Answer what the journal lacks."""
    missing = [request for request in requests if audit.journal.get(side, request.number) is None]
    shown.advance(f"{side}, kept", len(requests) - len(missing))

    def keep(reply: AuditReply, output: RequestOutput, streamed: Streamed) -> None:
        audit.journal.add(side, reply)
        streams.add(reply, streamed)
        shown.advance(f"speculation {side}")

    answer_all(engine, missing, concurrency, keep)


def _described(engine: Engine, model: str | None) -> dict[str, Any]:
    """An engine for the certificate."""
    speculative = engine.speculative
    return {
        "kind": "engine",
        "model": without_folders(model or "embedded pair"),
        "method": speculative.method,
        "verifier": speculative.verifier,
        "options": {
            name: without_folders(value) if isinstance(value, str) else value
            for name, value in asdict(engine.draft_options).items()
        },
        "runs_as": engine.model.runs_as,
        "prefix_caching": engine.config.enable_prefix_caching,
        "files_sha256": file_hashes(engine.config.model),
    }


def _key(audit: LocalAudit, requests: Seq[AuditRequest]) -> dict[str, Any]:
    """What a resumed audit must have in common."""
    return {
        "model": audit.model or "embedded pair",
        "version": __version__,
        "speculation": {name: str(value) for name, value in asdict(audit.speculative).items()},
        "data": data_hash(requests),
        "engine": {name: str(value) for name, value in audit.engine_options.items()},
    }

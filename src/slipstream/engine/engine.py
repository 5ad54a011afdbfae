"""The engine: every decoding step is a tree step.

    plan -> propose -> one target pass -> verify -> commit

Speculation off is the empty proposal on this same path, and a prompt is a step whose rows are prompt tokens. There is
no second loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.control.types import ControlReport
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.step import StepReport
from slipstream.core.types import (
    DEFAULT_OPTIONS,
    EMPTY_PROPOSAL,
    ROOT,
    EmittedTokens,
    FinishReason,
    RequestOptions,
    Sequence,
    StepItem,
    StepPlan,
    Verdict,
)
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.lookup.prediction import PredictionDrafter, PredictionOptions
from slipstream.draft.registry import create_drafter
from slipstream.engine.control import create_policy
from slipstream.engine.defaults import sampling_defaults
from slipstream.engine.drafting import Drafting
from slipstream.engine.intake import Intake, Served
from slipstream.engine.logprobs import TokenTexts, record_logprobs, record_prompt_logprobs
from slipstream.engine.memory import plan_memory, with_passes
from slipstream.engine.outputs import RequestOutput, Update, completion
from slipstream.engine.reasoning import StepSpeculation
from slipstream.engine.requests import (
    Answer,
    Request,
    UpdateCallback,
    deliver,
)
from slipstream.engine.runner import ModelRunner
from slipstream.engine.speculation import validate
from slipstream.engine.steps import StepTimes, record_acceptance, record_prediction, report_of
from slipstream.engine.target import check_same_target, load_target
from slipstream.errors import RequestError
from slipstream.models import CausalLM
from slipstream.models.cpu import threads
from slipstream.reasoning.config import ReasoningConfig
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.schedule.scheduler import Scheduler
from slipstream.text.end_tokens import end_token_ids
from slipstream.text.expected import ExpectedText
from slipstream.text.prediction import Prediction
from slipstream.text.prompts import EncodedPrompt, Prompt
from slipstream.verify.base import Judgement
from slipstream.verify.registry import create_verifier

logger = logging.getLogger(__name__)

D = TypeVar("D", bound=Drafter)


class Engine:
    """A target model, a drafter and a verifier, serving many requests at once. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        speculative: SpeculativeConfig | None = None,
        *,
        like: Engine | None = None,
    ) -> None:
        """`like` is an engine of the same target: its weights and tokenizer are shared instead of loaded again."""
        speculative = speculative or SpeculativeConfig()
        _, drafter_options = validate(speculative, config.allow_lossy)
        self.config = config
        self.speculative = speculative
        cores = threads.usable_cores()
        if config.num_threads is not None and config.num_threads > math.ceil(cores):
            logger.warning(
                "num_threads is %d, but this process may use %g cores; more threads than cores are slower",
                config.num_threads,
                cores,
            )
        with threads.limit(config.num_threads):
            self.model, self.tokenizer = load_target(config) if like is None else like.share_target(config)
        self.sampling_defaults = sampling_defaults(config, self.model.model)
        """What the checkpoint recommends, as names and values of `SamplingParams`."""
        self.verifier = create_verifier(speculative.verifier)
        with threads.limit(config.num_threads):
            self.drafter = create_drafter(
                speculative,
                DraftContext(
                    engine_config=config,
                    tokenizer=self.tokenizer,
                    vocab_size=self.model.vocab_size,
                    max_model_len=config.max_model_len or self.model.context_length,
                    device=self.model.device,
                    dtype=self.model.dtype,
                    verifier=self.verifier.traits(),
                    target=self.model,
                    draft_timeout_s=speculative.draft_timeout_s,
                ),
            )
        self.reasoning = self._step_speculation(speculative)
        """Drafts whole steps of thinking for requests that ask for it; None where the engine has no draft for that."""
        self._num_operator_threads = self.model.num_threads if self.model.decoder is None else 1
        feature_layers = tuple(self.drafter.feature_layers())
        feature_width = len(feature_layers) * self.model.hidden_size
        planned = plan_memory(
            config,
            self.model,
            self.drafter.memory_bytes() + (self.reasoning.writer.memory_bytes() if self.reasoning else 0),
            self.drafter.kv_bytes_per_token()
            + feature_width * self.model.dtype.itemsize
            + (self.reasoning.writer.kv_bytes_per_token() if self.reasoning else 0),
            self.drafter.max_nodes(),
        )
        writer = None if self.reasoning is None else self.reasoning.writer
        drafters = [self.drafter] if writer is None else [self.drafter, writer]
        drafting = [model for each in drafters for model in each.drafting_models()]
        models = {id(model): model for model in (self.model, *drafting)}  # one that several use counts once
        self.memory_plan = with_passes(
            planned,
            config,
            list(models.values()),
            self.drafter.max_nodes(),
            partial(self.drafter.table_bytes, drafter_options),
        )
        logger.info("memory: %s", self.memory_plan)
        self.max_model_len = self.memory_plan.max_model_len
        self.drafter.allocate(self.memory_plan.num_slots)
        if self.reasoning is not None:
            self.reasoning.writer.allocate(self.memory_plan.num_slots)
        cache = self.model.new_cache(
            self.memory_plan.num_slots,
            prefix_caching=config.enable_prefix_caching,
            feature_width=feature_width,
        )
        self.runner = ModelRunner(self.model, cache, feature_layers)
        self.drafting = Drafting(
            self.drafter,
            speculative.method,
            self.model.vocab_size,
            self.verifier.kinds,
            speculative.draft_timeout_s,
            create_policy(speculative, self.drafter, self.model),
            PredictionDrafter(PredictionOptions(), self.drafter.context),
        )
        self.drafting.attach(cache)
        self.scheduler = Scheduler(
            cache.accounting,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_tokens_limit=self.max_model_len,
            max_draft_tokens=self.drafter.max_nodes(),
        )
        self._eos_token_ids = end_token_ids(self.tokenizer, self.model.model, self.model.vocab_size)
        if self.reasoning is not None:
            self.reasoning.begin(self._eos_token_ids, self.max_model_len)
        self._intake = Intake(
            Served(
                config,
                self.model,
                self.tokenizer,
                self.drafter,
                self.drafting,
                self.reasoning,
                self.verifier,
                self._eos_token_ids,
                self.max_model_len,
                self.sampling_defaults,
            )
        )
        self._texts = TokenTexts(self.tokenizer)
        self._requests: dict[str, Request] = {}
        self._answers: dict[int, Answer] = {}
        self._unreported_s = 0.0
        """Of writing steps of thinking while nothing else was to be done; the next step counts it."""
        self._aborted: list[Update] | None = None
        """While callbacks run: the updates of the requests that they abort."""
        self.shares_by_account = True
        """False where tenants are names that clients choose: new requests are then of one account for the scheduler, so
        that many names take no more than one."""
        self.on_begin: Callable[[], None] | None = None
        """Called at the begin of every step, for those who make way for it."""
        self.on_step: Callable[[StepReport], None] | None = None
        """Called at the end of every step with what it did and cost, for those who measure."""
        self.on_observe: Callable[[list[StepItem]], None] | None = None
        """Called in every step with the items of the sequences that decoded; see `StepItem`."""
        self.on_checked: Callable[[list[StepItem]], None] | None = None
        """The same for those who keep what the target thought, so that statistics and records come and go apart. The
        logits are this step's own: nobody writes to them later."""

    def _step_speculation(self, speculative: SpeculativeConfig) -> StepSpeculation | None:
        """What `speculative` asks for as `reasoning`."""
        if speculative.reasoning is None:
            return None
        config = self.config
        with threads.limit(config.num_threads):
            return StepSpeculation(
                ReasoningConfig.from_mapping(speculative.reasoning),
                speculative,
                replace(self.drafter.context, lender=self.drafter),
                max(config.max_num_batched_tokens - config.max_num_seqs, 0),
            )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return self._eos_token_ids

    @property
    def drafts(self) -> bool:
        """Whether its drafter can propose anything."""
        return self.drafter.max_nodes() > 0

    @property
    def draft_methods(self) -> list[str]:
        """The drafters that a request may name as its own."""
        return self.drafting.methods

    def reproduces(self, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> bool:
        """Whether the same seed gives the same answer to such a request again, whatever is drafted for it."""
        return self._intake.reproduces(params, options)

    @property
    def draft_model(self) -> CausalLM | None:
        """The model that the drafter runs, None for lookups, heads and groups."""
        return self.drafter.drafting_model()

    @property
    def num_speculative_tokens(self) -> int | None:
        """The drafter's configured depth, None where it has none."""
        return self.drafter.configured_depth(self.drafter.options)

    @property
    def draft_options(self) -> Any:
        """The drafter's own options, a dataclass, defaults included."""
        return self.drafter.options

    def drafter_as(self, kind: type[D]) -> D:
        """The drafter, for those who brought it; raises `TypeError` where it is no `kind`."""
        if not isinstance(self.drafter, kind):
            raise TypeError(f"the engine's drafter is a {type(self.drafter).__name__}, no {kind.__name__}")
        return self.drafter

    def group_tasks_by(self, name: Callable[[RequestOptions], str], task: Callable[[str], str]) -> None:
        """Keep the statistics of a request under `name` of its options, from which `task` tells its task."""
        self.drafting.task_of = lambda sequence: name(sequence.options)
        if self.drafting.policy is not None:
            self.drafting.policy.read_tasks_by(task)

    def stats(self) -> EngineStats:
        """What the engine holds and has counted; call it between two steps."""
        cache = self.runner.cache
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_slots=cache.accounting.num_slots,
            num_held_slots=cache.accounting.num_held,
            num_retained_slots=cache.accounting.num_retained,
            cache_bytes=cache.memory_bytes(),
            num_preemptions=self.scheduler.num_preemptions,
            num_drafted_sequences=self.drafting.num_held(),
            num_draft_failures=self.drafting.num_failures,
            num_paused=len(self.scheduler.paused),
            retired_drafters=self.drafting.retired,
            draft_workers=tuple(self.drafter.worker_stats()),
        )

    @property
    def load(self) -> tuple[int, int]:
        """How many sequences run and how many wait; may be asked at any time, from any thread."""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def control_report(self) -> ControlReport:
        """What speculation gains on this engine's traffic, as measured; call it between two steps."""
        return self.drafting.report()

    def default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request without any, as a copy."""
        return self._intake.default_params()

    def share_target(self, config: EngineConfig) -> tuple[CausalLM, Any]:
        """The target model and tokenizer for an engine of `config`; `ConfigError` where it asks for others."""
        check_same_target(self.model, self.config, config)
        return self.model, self.tokenizer

    # --- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        on_update: UpdateCallback | None = None,
        grammar: Grammar | None = None,
        emitted: Seq[EmittedTokens] = (),
    ) -> None:
        """Queue a request; raises `RequestError` before any work when it cannot be served.

        `on_update` is called from `step` with each of the request's updates.
        `prompt` may be what `encode` has made of it, and `grammar` what `compile_grammar` has made of `params`; without
        them that is done here, and waited for.
        `emitted`, one entry for each answer, makes the request the continuation of one that was begun before with the
        same prompt, parameters and seed: updates hold what follows, the output is the whole. Where `reproduces`, the
        text is the one that the request would have had in one go.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; ids are unique among running requests")
        request, answers = self._intake.admit(request_id, prompt, params, options, grammar, emitted)
        request.on_update = on_update
        self._requests[request_id] = request
        for answer in answers:
            sequence = answer.sequence
            self._answers[sequence.id] = answer
            if self.reasoning is not None and sequence.options.reasoning is not None:
                self.reasoning.open(sequence, answer.processor)
            sequence.has_account = self.shares_by_account
            self.scheduler.add(sequence)

    def encode(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EncodedPrompt:
        """What tokenizing there is to do for a request, which may take long; may be called from any thread.

        Raises `RequestError` where the prompt or the prediction cannot be served.
        """
        return self._intake.encode(prompt, params, options)

    def expected(self, prediction: Prediction) -> ExpectedText:
        """What a caller expects, in the target's tokens; may be called from any thread. Raises `PredictionError`."""
        return self._intake.expected(prediction)

    def compile_grammar(
        self, params: SamplingParams, tried_bytes: int | None = None, tenant: str = ""
    ) -> Future[Grammar] | None:
        """Begin to compile what `params.structured` asks for, None where nothing is; may be called from any thread.

        `tried_bytes` is what `GrammarCompiler.try_` found, where another process has tried it. What was compiled
        before is reused by the same `tenant` alone. The future raises `RequestError` where it cannot be followed.
        """
        return self._intake.compile_grammar(params, tried_bytes, tenant)

    def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> Future[bool]:
        """Whether a part of a larger constraint can be followed; the future raises `RequestError` where it cannot.

        May be called from any thread.
        """
        return self._intake.check_grammar(structured, tenant)

    def abort(self, request_id: str) -> list[Update]:
        """End a request now and free what it holds; returns its last updates, none for an unknown id.

        Its `on_update` is not called, since the caller has the updates. A step whose callbacks abort requests returns
        these updates too.
        """
        answers = [self._answers[sequence.id] for sequence in self._unfinished(request_id)]
        for answer in answers:
            answer.sequence.finish_reason = answer.sequence.finish_reason or FinishReason.ABORT
        updates = [self._emit(answer, 0) for answer in answers]
        if self._aborted is not None:
            self._aborted += updates
        return updates

    def pause(self, request_id: str) -> None:
        """Give a request no more steps until `resume`, because what it makes is not read; unknown ids are ignored.

        It holds no running place meanwhile. Its cache entries are retained, and computed again if others need the
        room; the text is the same.
        """
        for sequence in self._unfinished(request_id):
            self.scheduler.pause(sequence)
            self._release(sequence)

    def resume(self, request_id: str) -> None:
        """Go on with a paused request; unknown ids, and requests that are not paused, are ignored."""
        for sequence in self._unfinished(request_id)[::-1]:  # each is put before the ones that wait
            self.scheduler.resume(sequence)

    def _unfinished(self, request_id: str) -> list[Sequence]:
        request = self._requests.get(request_id)
        return [] if request is None else [s for s in request.sequences if s.id in self._answers]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True while a step has something to do; False where all unfinished requests are paused."""
        return self.scheduler.has_work

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request waits or runs."""
        return request_id in self._requests

    # --- the step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Run one step for everyone who is scheduled; returns what it added to their answers."""
        started_s = time.perf_counter()
        if self.on_begin is not None:
            self.on_begin()
        wrote_s = self._write_steps()
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self._release(sequence)
        if not plan.scheduled:
            self._unreported_s += wrote_s
            return []
        with threads.operators(self._num_operator_threads):
            planned_s = time.perf_counter()
            self._propose(plan.scheduled)
            drafted_s = time.perf_counter()
            self.runner.forward(plan.scheduled)
            self._verify(plan.decoding)
            times = StepTimes(planned_s, drafted_s, verified_s=time.perf_counter())
        callbacks = {name: request.on_update for name, request in self._requests.items() if request.on_update}
        report = report_of(plan.scheduled, times)
        updates = self._commit(plan, times)
        step_s = time.perf_counter() - started_s
        report = replace(report, other_s=step_s - wrote_s - report.draft_s - report.verify_s)
        self.drafting.finish(report)
        if wrote_s or self._unreported_s:
            report = replace(report, draft_s=report.draft_s + wrote_s + self._unreported_s)
            self._unreported_s = 0.0
        aborted: list[Update] = []
        self._aborted = aborted
        try:
            deliver(updates, callbacks)
        finally:
            self._aborted = None
        if self.on_step is not None:
            self.on_step(report)
        return [*updates, *aborted]

    def _write_steps(self) -> float:
        """Let the steps of thinking that are being drafted grow; the seconds that it took."""
        if self.reasoning is None or not self._requests:
            return 0.0
        started_s = time.perf_counter()
        with threads.operators(self._num_operator_threads):
            self.reasoning.write()
        return time.perf_counter() - started_s

    def _propose(self, items: list[StepItem]) -> None:
        """Ask the drafters; a sequence without a proposal decodes without speculation."""
        steps = {} if self.reasoning is None else self.reasoning.proposals(items)
        proposals = self.drafting.propose(items, steps)
        for item in items:
            item.proposal = proposals.get(item.sequence.id, EMPTY_PROPOSAL)
            item.method = self.drafting.method_of(item.sequence)
            item.sequence.metrics.draft_version = self.drafter.version_of(item.sequence)

    def _verify(self, items: list[StepItem]) -> None:
        """Judge every proposal, the empty ones too. A lossy judge may have given a step before: then what follows."""
        if self.reasoning is not None:
            self.reasoning.judge(items)
        self._decide(items)
        if self.reasoning is not None:
            self._decide(self.reasoning.settle(items))

    def _decide(self, items: list[StepItem]) -> None:
        verdicts = self.verifier.verify([self._judgement(item) for item in items])
        for item, verdict in zip(items, verdicts, strict=True):
            item.verdict = (
                Verdict(tuple(range(item.num_given)), verdict.next_token) if item.num_given else verdict
            )

    def _judgement(self, item: StepItem) -> Judgement:
        """The processed distributions of one sequence, its proposal and its noise."""
        sequence, proposal, log_probs = item.sequence, item.proposal, item.logits
        given = proposal.token_ids[: item.num_given]
        if given:  # they are text, and nothing is proposed behind them
            proposal, log_probs = EMPTY_PROPOSAL, log_probs[item.num_given :]
        processor = self._answers[sequence.id].processor
        if self.verifier.needs_distributions or not processor.is_plain_greedy:
            paths = [
                [proposal.token_ids[n] for n in proposal.path(node)] for node in range(ROOT, len(proposal))
            ]
            log_probs = processor.log_probs(log_probs, [*sequence.output_token_ids, *given], paths)
        greedy = sequence.params.temperature == 0
        noise = Noise(sequence.seed, len(sequence.token_ids) + len(given), greedy, sequence.nonce)
        return Judgement(log_probs, proposal, noise)

    def _commit(self, plan: StepPlan, times: StepTimes) -> list[Update]:
        """Append what was verified, keep its cache entries, and report it to drafters and callers."""
        for item in plan.scheduled:
            record_prompt_logprobs(item)
            self._record_times(item.sequence, times)
            if item.decodes:
                self._append(item)
            self.runner.commit(item)
        decoded = plan.decoding
        if self.reasoning is not None:
            self.reasoning.committed(decoded)
        self.drafting.observe([Observation.of(item) for item in decoded])
        if self.on_observe is not None:
            self.on_observe(decoded)
        if self.on_checked is not None:
            self.on_checked(decoded)
        return [self._emit(self._answers[item.sequence.id], item.num_emitted) for item in decoded]

    def _append(self, item: StepItem) -> None:
        """Append the verdict's tokens until a stop rule ends the answer, and count them."""
        stop = self._answers[item.sequence.id].stop
        for number, token_id in enumerate(item.verdict.token_ids(item.proposal)):
            if stop.append(token_id, from_draft=number < len(item.verdict.accepted)):
                break
        item.record_emitted(len(item.sequence.token_ids) - item.length_before)
        record_logprobs(item)
        record_acceptance(item)

    def _emit(self, answer: Answer, num_new: int) -> Update:
        """Report what a sequence has gained; when it is finished, free what it holds."""
        sequence = answer.sequence
        request = self._requests[sequence.request_id]
        metrics = sequence.metrics
        metrics.num_output_tokens = sequence.num_output_tokens
        metrics.total_s = time.perf_counter() - request.arrived_s
        metrics.other_s = metrics.total_s - metrics.queue_s - metrics.draft_s - metrics.verify_s
        if num_new and sequence.num_new_tokens == num_new:
            metrics.time_to_first_token_s = metrics.total_s
        pieces = answer.text.take(sequence.finished)
        sequence.text = answer.text.text
        if sequence.finished:
            record_prediction(sequence)
            if self.reasoning is not None:
                self.reasoning.close(sequence)
        output = self._finish(request, sequence) if sequence.finished else None
        new = len(sequence.token_ids) - num_new
        return Update(
            request_id=request.id,
            index=sequence.index,
            token_ids=sequence.token_ids[new:],
            pieces=pieces,
            logprobs=None
            if sequence.logprobs is None
            else sequence.logprobs[len(sequence.logprobs) - num_new :],
            finish_reason=sequence.finish_reason,
            output=output,
            from_draft=sequence.from_draft[len(sequence.from_draft) - num_new :],
        )

    def _finish(self, request: Request, sequence: Sequence) -> RequestOutput | None:
        """Free what a finished sequence holds; the request's output when it was the last one."""
        self.scheduler.remove(sequence)
        self._release(sequence)
        del self._answers[sequence.id]
        request.unfinished -= 1
        if request.unfinished:
            return None
        del self._requests[request.id]
        first = request.sequences[0]
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[completion(s, self._texts) for s in request.sequences],
            prompt_token_logprobs=next(s.prompt_logprobs for s in request.sequences if s.scores_prompt),
            texts=self._texts,
        )

    def _release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        self.drafting.release(sequence)
        if self.reasoning is not None:
            self.reasoning.release(sequence)

    # --- state ------------------------------------------------------------------------------------------------

    def reset_caches(self) -> None:
        """Drop what finished requests left: retained prefixes, and what the drafter learned."""
        self.runner.cache.accounting.clear()
        self.drafter.reset()
        if self.reasoning is not None:
            self.reasoning.writer.reset()

    def integrity(self) -> list[str]:
        """Violated invariants, a sentence each; an idle engine holds nothing. Tests call it after every scenario."""
        accounting = self.runner.cache.accounting
        faults = [*accounting.integrity(), *self.drafting.integrity()]
        faults += self.reasoning.integrity() if self.reasoning is not None else []
        if not self.has_unfinished:
            held = {
                "slots of the cache": accounting.num_held,
                "sequences of the drafter": self.drafting.num_held(),
                "answers with drafted steps": self.reasoning.num_held() if self.reasoning is not None else 0,
                "sequences": len(self._answers) + self.scheduler.num_sequences,
            }
            faults += [
                f"{number} {what} are held though nothing runs" for what, number in held.items() if number
            ]
        return faults

    def _record_times(self, sequence: Sequence, times: StepTimes) -> None:
        metrics = sequence.metrics
        if metrics.verify_s == 0:  # its first step
            metrics.queue_s = times.planned_s - self._requests[sequence.request_id].arrived_s
        metrics.draft_s += times.drafted_s - times.planned_s
        metrics.verify_s += times.verified_s - times.drafted_s

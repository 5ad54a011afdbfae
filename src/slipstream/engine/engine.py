"""The engine: every decoding step is a tree step.

    plan -> propose -> one target pass -> verify -> commit

Speculation off is the empty proposal on this same path, and a prompt is a step whose rows are prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from slipstream.control.types import ControlReport
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.passes import PassCounts
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Drafter
from slipstream.engine.answers import Answers
from slipstream.engine.in_flight import InFlight
from slipstream.engine.intake import Intake
from slipstream.engine.logprobs import TokenTexts, record_prompt_logprobs
from slipstream.engine.outputs import Update
from slipstream.engine.overlap import StepOverlap
from slipstream.engine.parts import EngineParts
from slipstream.engine.requests import UpdateCallback
from slipstream.engine.steps import StepClock, record_times
from slipstream.engine.verification import is_greedy_alone, own_tokens, verify_items
from slipstream.models import CausalLM
from slipstream.models.cpu import threads
from slipstream.models.executor.choices import OwnTokens
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import EncodedPrompt, Prompt

D = TypeVar("D", bound=Drafter)


class Engine:
    """A target model, a drafter and a verifier, serving many requests at once. Not thread-safe.

    `engine.factory` makes one. `intake` checks and prepares what callers request; it may be used from any thread.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.speculative = parts.speculative
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.sampling_defaults = parts.sampling_defaults
        self.end_token_ids = parts.end_token_ids
        self.drafter, self.verifier = parts.drafter, parts.verifier
        self.extension = parts.extension
        self.memory_plan, self.max_model_len = parts.memory_plan, parts.max_model_len
        self.scheduler, self.drafting, self.runner = parts.scheduler, parts.drafting, parts.runner
        self.intake = Intake(parts)
        self._answers = Answers(TokenTexts(self.tokenizer), self._free)
        self._clock = StepClock()
        self._overlap = StepOverlap(parts, self._choose)
        self._flight: InFlight | None = None
        """A step that was launched and not finished."""
        self._num_operator_threads = self.model.executor.num_operator_threads
        self.shares_by_account = True
        """False where tenants are names that clients choose: new requests are then of one account for the scheduler, so
        that many names take no more than one."""
        self.on_begin: Callable[[], None] | None = None
        """Called at the begin of every step, for those who make way for it."""
        self.on_step: Callable[[StepReport], None] | None = None
        """Called at the end of every step with what it did and cost, for those who measure."""
        self.on_observe: Callable[[list[StepItem]], None] | None = None
        """Called in every step with the items of the sequences that decoded; see `StepItem`. Their logits may have no
        columns, unless `on_checked` is set too."""
        self.on_checked: Callable[[list[StepItem]], None] | None = None
        """The same for those who keep what the target thought, so that statistics and records come and go apart. The
        logits are this step's own: they are not written to later."""

    # --- what it is -------------------------------------------------------------------------------------------

    @property
    def drafts(self) -> bool:
        """Whether its drafter can propose anything."""
        return self.drafter.traits.max_nodes > 0

    @property
    def draft_methods(self) -> list[str]:
        """The drafters that a request may name as its own."""
        return self.drafting.methods

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
        self.drafting.group_tasks_by(name, task)

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
            passes=self._passes(),
            num_overlapped_steps=self._overlap.num_overlapped,
            drained_steps=dict(self._overlap.drained),
        )

    def _passes(self) -> dict[str, PassCounts]:
        """See `EngineStats.passes`; an executor that several models share counts once, for the target first."""
        drafters = [self.drafter, *self.extension.drafters()]
        drafting = [model.executor for each in drafters for model in each.drafting_models()]
        target = self.model.executor
        roles = {
            "target": [target],
            "draft": {id(each): each for each in drafting if each is not target}.values(),
        }
        counts = {role: [each.pass_counts for each in executors] for role, executors in roles.items()}
        known = {role: [each for each in found if each is not None] for role, found in counts.items()}
        return {role: PassCounts.joined(found) for role, found in known.items() if found}

    @property
    def load(self) -> tuple[int, int]:
        """How many sequences run and how many wait; may be called at any time, from any thread."""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def control_report(self) -> ControlReport:
        """What speculation gains on this engine's traffic, as measured; call it between two steps."""
        return self.drafting.report()

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
        `prompt` may be what `intake.encode` has made of it, and `grammar` what `intake.compile_grammar` has made of
        `params`; without them that is done here, and waited for.
        `emitted`, one entry for each answer, makes the request the continuation of one that was begun before with the
        same prompt, parameters and seed: updates hold what follows, the output is the whole. Where it is reproducible,
        the text is the one that the request would have had in one go.
        """
        self._answers.check_unused(request_id)
        request, answers = self.intake.admit(request_id, prompt, params, options, grammar, emitted)
        request.on_update = on_update
        self._answers.add(request, answers)
        for answer in answers:
            answer.sequence.has_account = self.shares_by_account
            self.extension.open(answer.sequence, answer.processor)
            self.scheduler.add(answer.sequence)

    def abort(self, request_id: str) -> list[Update]:
        """End a request now and free what it holds; returns its last updates, none for an unknown id.

        Its `on_update` is not called, since the caller has the updates. A step whose callbacks abort requests returns
        these updates too.
        """
        return self._answers.abort(request_id)

    def pause(self, request_id: str) -> None:
        """Give a request no more steps until `resume`, because what it makes is not read; unknown ids are ignored.

        It holds no running place meanwhile. Its cache entries are retained, and computed again if others need the
        room; the text is the same.
        """
        for sequence in self._answers.unfinished(request_id):
            self.scheduler.pause(sequence)
            self._release(sequence)

    def resume(self, request_id: str) -> None:
        """Go on with a paused request; unknown ids, and requests that are not paused, are ignored."""
        for sequence in self._answers.unfinished(request_id)[::-1]:  # each is put before the ones that wait
            self.scheduler.resume(sequence)

    @property
    def has_unfinished(self) -> bool:
        return self._answers.num_requests > 0

    @property
    def has_work(self) -> bool:
        """True while a step has something to do; False where all unfinished requests are paused."""
        return self.scheduler.has_work

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request waits or runs."""
        return request_id in self._answers

    # --- the step ---------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Finish one step of everyone who is scheduled; returns what it added to their answers.

        Where `StepOverlap` allows it, the next one is launched before.
        """
        self._clock.begin()
        _call(self.on_begin)
        flight = self._flight or self._launch()
        if flight is None:
            return []
        with threads.operators(self._num_operator_threads):
            self._flight = flight  # should what follows fail, it is finished another time
            self._flight = self._overlap.launch(flight)
            self._finish(flight)
        updates = self._commit(flight)
        report = self._clock.report(flight.items)
        self.drafting.finish(report, self._clock.step_s, flight.drafts)
        updates += self._answers.deliver()
        _call(self.on_step, report)
        return updates

    def _launch(self) -> InFlight | None:
        """Begin the next step, of which all is known; None where there is nothing to do."""
        clock = self._clock
        drafted = self.extension.propose()
        clock.extended(self.extension.propose_s)
        plan = self.scheduler.plan()  # copies the entries of known prefixes, with all threads
        for sequence in plan.preempted:
            self._release(sequence)
        if not plan.scheduled:
            return None
        with threads.operators(self._num_operator_threads):
            self.runner.encode(plan.scheduled)
            clock.planned()
            drafts = self.drafting.propose(plan.scheduled, drafted)
            clock.drafted()
            choose = self._choose if self.verifier.walks else None
            try:
                return self.runner.launch(plan.scheduled, drafts, choose, self._wants_best(plan.scheduled))
            except BaseException:
                self.runner.take_back(plan.scheduled)
                raise

    def _finish(self, flight: InFlight) -> None:
        """Wait for a step, and have it verified."""
        try:
            flight.finish()
            self.extension.verify(flight.decoding, self._verify)
        except BaseException:
            self._flight = None
            self.runner.take_back(flight.items)
            raise
        for item in flight.decoding:
            if self._flight is not None and item.verdict is not item.walked:
                self._release(item.sequence)  # the next step was launched with other tokens
        self._clock.verified()

    def _choose(self, item: StepItem) -> OwnTokens | None:
        return own_tokens(item, self._answers.of(item.sequence).processor)

    def _wants_best(self, items: Seq[StepItem]) -> bool:
        """Whether of all logits only the best tokens matter, for which a pass may take less time."""
        reads_logits = self.drafter.traits.reads_logits or self.extension.reads_logits
        if reads_logits or self.on_checked is not None or not self.verifier.walks:
            return False
        return all(is_greedy_alone(item, self._answers.of(item.sequence).processor) for item in items)

    def _verify(self, items: Seq[StepItem]) -> None:
        processors = [self._answers.of(item.sequence).processor for item in items]
        verify_items(self.verifier, items, processors)

    def _commit(self, flight: InFlight) -> list[Update]:
        """Append what was verified, keep its cache entries, and report it to drafters and callers."""
        for item in flight.items:
            record_prompt_logprobs(item)
            record_times(item.sequence, self._clock, self._answers.arrived_s(item.sequence))
            if item.decodes:
                self._answers.append(item)
            self.runner.commit(item)
        decoded = flight.decoding
        self.extension.commit(decoded)
        self.drafting.observe(decoded, flight.drafts)
        _call(self.on_observe, decoded)
        _call(self.on_checked, decoded)
        return self._answers.emit(decoded)

    def _release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted, paused or preempted."""
        self._drop(sequence)
        self.runner.release(sequence)
        self.drafting.release(sequence)
        self.extension.release(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """What the step in flight makes of the sequence is of no use."""
        if self._flight is not None:
            self._flight.drop(sequence)
            if not self._flight.items:
                self._flight = None

    def _free(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self.scheduler.remove(sequence)
        self._release(sequence)

    # --- state ------------------------------------------------------------------------------------------------

    def reset_caches(self) -> None:
        """Drop what finished requests left: retained prefixes, and what the drafter learned."""
        self.runner.cache.clear()
        self.drafter.reset()
        self.extension.reset()

    def integrity(self) -> list[str]:
        """Violated invariants, a sentence each; an idle engine holds nothing. Tests call it after every scenario."""
        cache = self.runner.cache
        faults = [*cache.integrity(), *self.drafting.integrity(), *self.extension.integrity()]
        if not self.has_unfinished:
            held = {
                "slots of the cache": cache.accounting.num_held,
                "encoded inputs": cache.num_encoded_held,
                "sequences of the drafter": self.drafting.num_held(),
                "answers with drafted steps": self.extension.num_held(),
                "sequences": len(self._answers) + self.scheduler.num_sequences,
            }
            faults += [
                f"{number} {what} are held though nothing runs" for what, number in held.items() if number
            ]
        return faults


def _call(listener: Callable[..., None] | None, *arguments: object) -> None:
    if listener is not None:
        listener(*arguments)

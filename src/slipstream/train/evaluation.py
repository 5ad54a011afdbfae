"""Evaluation of a trained drafter: acceptance in the engine on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.request import RequestMetrics
from slipstream.engine.closed_loop import BenchJob, closed_loop
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError, RequestError
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_conversation


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Acceptance at one temperature."""

    tau: float
    """Tokens committed per target pass, the target's own included."""
    alpha: float
    """Accepted over proposed draft tokens."""
    conditional: list[float]
    """Entry i: accepted at position i + 1 over the steps that reached it."""
    tau_by_task: dict[str, float]


@dataclass(frozen=True)
class EvaluationFigures:
    """Acceptance on the held-out prompts."""

    greedy: MeasuredAcceptance
    sampled: MeasuredAcceptance
    """At temperature 1."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, for the log."""
        return asdict(self)

    def __str__(self) -> str:
        parts = []
        for name, one in (("greedy", self.greedy), ("sampled", self.sampled)):
            positions = " ".join(f"{rate:.3f}" for rate in one.conditional)
            parts.append(f"{name} τ {one.tau:.3f}, α {one.alpha:.3f}, by position {positions}")
        return "; ".join(parts)


class Evaluator:
    """Held-out prompts and a target, which is loaded once for all evaluated drafters."""

    def __init__(
        self,
        model: str | None,
        workload: str = "sample",
        prompts_per_task: int = 4,
        max_tokens: int = 64,
        engine_options: Mapping[str, Any] | None = None,
        excluded: Set[str] = frozenset(),
    ) -> None:
        """`model` None is the embedded target. `workload` is as in `slipstream bench`; the first turns of its questions
        are used, without those whose `where` is in `excluded`.

        Raises what loading raises, and `RequestError` for an invalid workload.
        """
        self._model = model
        self._options = {"max_num_seqs": 8, **(engine_options or {})}
        self._engine = make_engine(model, None, self._options)
        self.jobs: list[BenchJob] = []
        self._tasks: list[str] = []
        num_of_task: dict[str, int] = {}
        for question in read_workload(workload).questions:
            if question.where in excluded or num_of_task.setdefault(question.task, 0) >= prompts_per_task:
                continue
            messages = list(question.messages) or [{"role": "user", "content": question.text}]
            prompt = encode_conversation(self._engine.tokenizer, messages)
            if len(prompt) >= self._engine.max_model_len:
                continue  # longer than the target's context
            num_of_task[question.task] += 1
            number = len(self.jobs)
            params = SamplingParams(max_tokens=max_tokens, seed=derive_seed(0, number + 1))
            self.jobs.append(BenchJob(number, prompt, params))
            self._tasks.append(question.task)
        if not self.jobs:
            raise RequestError(
                f"no prompt of {workload!r} fits the target's context of {self._engine.max_model_len} tokens"
            )

    def evaluate(self, speculative: SpeculativeConfig, model: str | None = None) -> EvaluationFigures:
        """Answer all prompts with this drafter, greedily and at temperature 1, with fixed seeds.

        `model` is another target, with the same tokenizer.
        """
        like = self._engine if model is None else None
        engine = make_engine(model or self._model, speculative, self._options, like=like)
        return EvaluationFigures(self._acceptance(engine, 0.0), self._acceptance(engine, 1.0))

    def _acceptance(self, engine: Engine, temperature: float) -> MeasuredAcceptance:
        jobs = [replace(job, params=replace(job.params, temperature=temperature)) for job in self.jobs]
        answers, _, _ = closed_loop(engine, jobs, self._options["max_num_seqs"])
        if engine.stats().num_draft_failures:
            raise ConfigError(
                f"drafter {engine.speculative.method!r} failed while it was measured; "
                "generate with it and --debug to see why"
            )
        metrics = [answer.metrics for answer in answers]
        merged = RequestMetrics.merged(metrics)
        by_task = _ByTask()
        for task, one in zip(self._tasks, metrics, strict=True):
            by_task.parts.setdefault(task, []).append(one)
        return MeasuredAcceptance(
            merged.acceptance_length, merged.acceptance_rate, merged.conditional_acceptance, by_task.tau()
        )


@dataclass
class _ByTask:
    parts: dict[str, list[RequestMetrics]] = field(default_factory=dict)

    def tau(self) -> dict[str, float]:
        return {task: RequestMetrics.merged(parts).acceptance_length for task, parts in self.parts.items()}


def evaluate(
    speculative_config: SpeculativeConfig,
    model: str | None = None,
    *,
    workload: str = "sample",
    prompts_per_task: int = 4,
    max_tokens: int = 64,
) -> EvaluationFigures:
    """Evaluate one drafter; `Evaluator` loads the target once for several."""
    return Evaluator(model, workload, prompts_per_task, max_tokens).evaluate(speculative_config)

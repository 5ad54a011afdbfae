"""`slipstream tree`: plans a drafter's best fixed tree from its acceptance by rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from slipstream.assets import sample_prompts
from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    Json,
    ModelArgument,
    SamplingValues,
    SpeculationValues,
    announce,
    chosen_speculation,
    load,
)
from slipstream.cli.flags.prompts import PromptJob, prepare, read_jobs
from slipstream.cli.measure import Measurement
from slipstream.cli.output.console import stderr
from slipstream.cli.output.loading import loading
from slipstream.cli.output.results import print_json
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.draft.model.sequoia import RankAcceptance, TreePlan
    from slipstream.engine.llm import LLM

FEW_STEPS = 100
"""Rates of fewer steps have an error of 0.1 or more (two standard errors of a rate of 0.5)."""


@dataclass(frozen=True, kw_only=True)
class TreeFlags:
    """Size of the tree, and what it is measured on."""

    model: ModelArgument = None
    num_draft_nodes: Annotated[int, Option(min=1)] = 16
    """The most nodes of the tree."""
    depth: Annotated[int, Option(min=1)] = 8
    """The most levels of the tree."""
    width: Annotated[int, Option(min=1)] = 8
    """Number of measured siblings, and the most children of a node."""
    file: Annotated[Path | None, Option("--file", "-f")] = None
    """Prompts to measure on, as for generate; by default the embedded ones."""
    prompts: Annotated[int, Option(min=1)] = 3
    """Number of embedded prompts of each task."""
    fastest: Annotated[bool, Option("--fastest")] = False
    """Choose size and depth for the least time per token, with the step times saved by info --measure; by default the
    greatest acceptance length for all nodes."""
    json: Json = False
    speculation: SpeculationValues
    sampling: SamplingValues
    engine: EngineValues


@with_flags
def tree(flags: TreeFlags) -> None:
    """Measure how often draft tokens are accepted by rank, and plan the best fixed tree (Sequoia).

    Prints the speculative configuration with its tree_choices, ready for --speculative-config.
    """
    params = SamplingParams.from_mapping(flags.sampling)
    jobs = _embedded(flags.prompts) if flags.file is None else read_jobs(None, flags.file)
    with loading(flags.model):
        from slipstream.tools.bench.engine.ranks import measure_rank_acceptance, with_tree

        speculative = chosen_speculation(flags.speculation, flags.model)
        with_tree(speculative, [[0]])  # raises for a drafter without fixed trees, before anything is loaded
        llm = load(flags.model, speculative, flags.engine)
    params.check_vocabulary(llm.engine.model.vocab_size)
    measurement = _step_times(llm) if flags.fastest else None
    token_ids = [prepare(llm.engine, job, None) for job in jobs]
    announce(llm)
    depth = min(flags.depth, 6)
    counts = measure_rank_acceptance(llm, speculative, token_ids, params, depth=depth, width=flags.width)
    rates = counts.rates()
    plan = _plan(rates, flags.num_draft_nodes, flags.depth, measurement)
    config = with_tree(speculative, plan.tree_choices)
    chosen = {"method": config.method, "verifier": config.verifier, **config.options}
    for level, row in enumerate(rates.rates, start=1):
        shown = " ".join(f"{rate:.3f}" for rate in row)
        few = " (few)" if counts.reached[level - 1] < FEW_STEPS else ""
        stderr().print(f"depth {level}, {counts.reached[level - 1]} steps{few}: {shown}", markup=False)
    stderr().print(
        f"{plan.num_nodes} nodes in {plan.depth} levels; predicted τ {plan.acceptance_length:.2f}",
        markup=False,
    )
    if flags.json:
        measured = {"reached": counts.reached, "accepted": counts.accepted, "rates": rates.rates}
        print_json({"speculative_config": chosen, "plan": asdict(plan), "rank_acceptance": measured})
    else:
        print_json(chosen)


def _embedded(per_task: int) -> list[PromptJob]:
    by_task: dict[str, list[PromptJob]] = {}
    for row in sample_prompts():
        by_task.setdefault(row["task"], []).append(PromptJob(messages=row["messages"], task=row["task"]))
    return [job for jobs in by_task.values() for job in jobs[:per_task]]


def _step_times(llm: LLM) -> Measurement:
    found = Measurement.find(llm.engine.model, llm.engine.draft_model)
    if found is None or found.draft is None:
        raise ConfigError(
            "--fastest needs the step times of target and draft model; "
            "slipstream info --draft PATH --measure takes them"
        )
    return found


def _plan(rates: RankAcceptance, num_nodes: int, depth: int, measurement: Any) -> TreePlan:
    from slipstream.draft.model.sequoia import best_tree, fastest_tree

    if measurement is None:
        return best_tree(rates, num_nodes, depth)
    step_s, context = measurement.target.step_s, measurement.context
    level_s = measurement.draft.step_s(1, context)
    plan = fastest_tree(rates, num_nodes, depth, level_s, lambda rows: step_s(rows, context))
    if not plan.tree_choices:
        raise ConfigError("no tree of this drafter gains speed on this machine; run without speculation")
    return plan

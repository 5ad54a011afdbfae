"""`slipstream tree`: plans a drafter's best fixed tree from its acceptance by rank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.assets import sample_prompts
from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SAMPLING,
    SPECULATION,
    Json,
    ModelArgument,
    announce,
    chosen_speculation,
    load,
    print_json,
    with_model,
)
from slipstream.cli.flags.prompts import PromptJob, prepare, read_jobs
from slipstream.cli.measure import Measurement
from slipstream.cli.output.console import notes
from slipstream.cli.output.loading import loading
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.draft.model.sequoia import RankAcceptance, TreePlan
    from slipstream.engine.llm import LLM

FEW_STEPS = 100
"""Rates of fewer steps have an error of 0.1 or more (two standard errors of a rate of 0.5)."""


@with_model
@with_flags(speculation=SPECULATION, sampling=SAMPLING, engine=ENGINE)
def tree(
    model: ModelArgument = None,
    num_draft_nodes: Annotated[int, typer.Option(min=1, help="The most nodes of the tree.")] = 16,
    depth: Annotated[int, typer.Option(min=1, help="The most levels of the tree.")] = 8,
    width: Annotated[
        int, typer.Option(min=1, help="Number of measured siblings, and the most children of a node.")
    ] = 8,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Prompts to measure on, as for generate; by default the embedded ones."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of embedded prompts of each task.")] = 3,
    fastest: Annotated[
        bool,
        typer.Option(
            "--fastest",
            help="Choose size and depth for the least time per token, with the step times saved by info --measure; "
            "by default the greatest acceptance length for all nodes.",
        ),
    ] = False,
    json: Json = False,
    *,
    speculation: Values,
    sampling: Values,
    engine: Values,
) -> None:
    """Measure how often draft tokens are accepted by rank, and plan the best fixed tree (Sequoia).

    Prints the speculative configuration with its tree_choices, ready for --speculative-config.
    """
    params = SamplingParams.from_mapping(sampling)
    jobs = _embedded(prompts) if file is None else read_jobs(None, file)
    with loading(model):
        from slipstream.tools.bench.engine.ranks import measure_rank_acceptance, with_tree

        speculative = chosen_speculation(speculation, model)
        with_tree(speculative, [[0]])  # raises for a drafter without fixed trees, before anything is loaded
        llm = load(model, speculative, engine)
    params.check_vocabulary(llm.engine.model.vocab_size)
    measurement = _step_times(llm) if fastest else None
    token_ids = [prepare(llm.engine, job, None) for job in jobs]
    announce(llm)
    counts = measure_rank_acceptance(llm, speculative, token_ids, params, depth=min(depth, 6), width=width)
    rates = counts.rates()
    plan = _plan(rates, num_draft_nodes, depth, measurement)
    config = with_tree(speculative, plan.tree_choices)
    chosen = {"method": config.method, "verifier": config.verifier, **config.options}
    for level, row in enumerate(rates.rates, start=1):
        shown = " ".join(f"{rate:.3f}" for rate in row)
        few = " (few)" if counts.reached[level - 1] < FEW_STEPS else ""
        notes().print(f"depth {level}, {counts.reached[level - 1]} steps{few}: {shown}", markup=False)
    notes().print(
        f"{plan.num_nodes} nodes in {plan.depth} levels; predicted τ {plan.acceptance_length:.2f}",
        markup=False,
    )
    if json:
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

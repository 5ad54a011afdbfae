"""`slipstream learn replay`: the loop offline on a trace."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.flags.options import Json, Model, print_json
from slipstream.cli.flags.speculation import SpeculationFlags
from slipstream.cli.flags.speculation import speculative_config as drafter_of
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import Overwrite, check_file, write_text
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.learn.records import ServedRecord
    from slipstream.learn.replay import ReplayedRound, ReplayReport


def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="The folder of slipstream serve --learn, or prompts as in slipstream bench (FILE.jsonl, sample), "
            "which the target answers first.",
        ),
    ],
    model: Model = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Folder of the draft model that would have learned; by default the embedded target's own."
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="The drafter that would have learned where it is no draft model, as for slipstream serve: "
            """'{"method": "layer_skip", "exit_layer": 4}'."""
        ),
    ] = None,
    learner: Annotated[
        str | None,
        typer.Option(
            help="What learns: whole, low_rank, corrective, eagle; by default whole, eagle for a head, else corrective."
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Requests between two candidates.")] = 100,
    window: Annotated[
        int, typer.Option(min=1, help="The latest requests, which a candidate learns from.")
    ] = 400,
    anchors: Annotated[int, typer.Option(min=0, help="Older answers that must not be forgotten.")] = 400,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps for a candidate.")] = 120,
    learning_rate: Annotated[float, typer.Option(help="AdamW's peak learning rate.")] = 1e-3,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1, help="Draft tokens of the chains that are served; by default the drafter's, or 4."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of answers that are made now.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of answers that are made now.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of answers that are made now, and of the learner.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the result to this JSON file.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Learn, judge and promote offline on a trace, and say what that would have gained.

    The answers are the same with any draft, so each version's drafts on them are known, not estimated.
    """
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.draft.methods import HEADS
    from slipstream.learn.judge import JudgeOptions
    from slipstream.learn.learners.floor import DraftFloor
    from slipstream.learn.learners.registry import check_learns, learner_for, make_learner
    from slipstream.learn.options import LearnerOptions
    from slipstream.learn.replay import ReplayOptions
    from slipstream.learn.replay import replay as run

    if output is not None:
        check_file(output, overwrite, "--output")
    flags = SpeculationFlags(draft=draft, speculative_config=speculative_config)
    speculative = drafter_of(flags, model)
    check_learns(speculative, learner)
    floor = DraftFloor.of(speculative, EMBEDDED_TARGET if model is None else model)
    depth = depth or int(speculative.options.get("num_speculative_tokens", 4))
    if floor.method in HEADS and not Path(trace).is_dir():
        raise ConfigError(
            f"a head learns from hidden states, which slipstream serve --learn keeps: give its folder, not {trace!r}"
        )
    if not floor.path.is_dir():
        raise ConfigError(f"learning needs the folder of the draft's weights, got {floor.model!r}")
    options = LearnerOptions(num_steps=steps, learning_rate=learning_rate, depth=depth, seed=seed)
    made = make_learner(learner or learner_for(floor.method, 0), floor, options)
    records = _records(trace, model, temperature, max_tokens, seed)
    notes().print(f"{len(records):,} answers", markup=False)
    report = run(
        records,
        made,
        ReplayOptions(every=every, window=window, num_anchors=anchors),
        JudgeOptions(depth=depth),
        on_round=lambda one: notes().print(_line(one), markup=False),
    )
    if output is not None:
        write_text(output, json_.dumps(report.as_json(), indent=1) + "\n")
    if json:
        print_json(report.as_json())
    else:
        _show(report)


def _records(
    trace: str, model: str | None, temperature: float, max_tokens: int, seed: int
) -> list[ServedRecord]:
    from slipstream.learn.tracing import asked_trace, questions_of, served_trace

    if Path(trace).is_dir():
        return served_trace(Path(trace))
    from slipstream.engine.factory import make_engine
    from slipstream.sampling.params import SamplingParams

    questions = questions_of(trace)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    say_loading(model)
    engine = make_engine(model, None, {"max_num_seqs": 32})

    def told(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            notes().print(f"answered {done} of {total}", markup=False)

    return asked_trace(engine, questions, params, told)


def _line(one: ReplayedRound) -> str:
    serves = f"version {one.serving}" if one.serving else "the floor"
    what = "promoted" if one.promoted else "kept"
    return (
        f"after {one.after}: {what} ({one.why}); {serves}: {one.served['all']:.2f} tokens a pass, "
        f"floor {one.floor['all']:.2f}"
    )


def _show(report: ReplayReport) -> None:
    from slipstream.tools.bench.report.grid import Grid

    grid = Grid("tokens a pass over the whole trace", ["task", "floor", "learning", "gain"])
    for task, floor in sorted(report.floor.items()):
        served = report.served[task]
        grid.add(task, f"{floor:.3f}", f"{served:.3f}", f"{served / floor - 1:+.1%}")
    wide_results().print(grid.rich())
    promoted = sum(one.promoted for one in report.rounds)
    print(
        f"{report.num_requests:,} requests, {promoted} of {len(report.rounds) - 1} candidates promoted, "
        f"{report.learn_s:.0f} s of learning, tokens a pass {report.gain:+.1%}"
    )

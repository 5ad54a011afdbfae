"""`slipstream learn replay`: the loop offline on a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from slipstream.cli.flags.flags import filled, with_flags
from slipstream.cli.flags.options import Json, Model
from slipstream.cli.flags.speculation import SpeculationFlags
from slipstream.cli.flags.speculation import speculative_config as drafter_of
from slipstream.cli.output.console import stderr, wide_results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.results import print_json, write_json
from slipstream.cli.output.writing import Overwrite, check_file
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.config import SpeculativeConfig
    from slipstream.learn.decisions.replay import ReplayedRound, ReplayReport
    from slipstream.learn.learners.base_draft import BaseDraft
    from slipstream.learn.records.served import ServedRecord


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """A replay."""

    trace: Annotated[str, Argument(metavar="TRACE")]
    """The folder of slipstream serve --learn, or prompts as in slipstream bench (FILE.jsonl, sample), which the target
    answers first."""
    model: Model = None
    draft: str | None = None
    """Folder of the draft model that would have learned; by default the embedded target's own."""
    speculative_config: str | None = None
    """The drafter that would have learned where it is no draft model, as for slipstream serve: '{"method":
    "layer_skip", "exit_layer": 4}'."""
    learner: str | None = None
    """What learns: whole, low_rank, corrective, eagle; by default whole, eagle for a head, else corrective."""
    every: Annotated[int, Option(min=1)] = 100
    """Requests between two candidates."""
    window: Annotated[int, Option(min=1)] = 400
    """The latest requests, which a candidate learns from."""
    num_older: Annotated[int, Option("--older-answers", min=0)] = 400
    """Older answers that must not be forgotten."""
    num_steps: Annotated[int, Option("--steps", min=1)] = 120
    """Optimizer steps for a candidate."""
    learning_rate: float = 1e-3
    """AdamW's peak learning rate."""
    depth: Annotated[int | None, Option(min=1)] = None
    """Draft tokens of the chains that are served; by default the drafter's, or 4."""
    temperature: Annotated[float, Option(min=0.0)] = 0.0
    """Temperature of answers that are made now."""
    max_tokens: Annotated[int, Option(min=1)] = 64
    """Most tokens of answers that are made now."""
    seed: Annotated[int, Option(min=0)] = 0
    """Seed of answers that are made now, and of the learner."""
    output: Path | None = None
    """Also write the result to this JSON file."""
    overwrite: Overwrite = False
    json: Json = False

    def base(self, speculative: SpeculativeConfig) -> BaseDraft:
        """The drafter that would have learned; raises `ConfigError` for one that cannot, from this trace."""
        from slipstream.assets import EMBEDDED_TARGET
        from slipstream.draft.methods import HEADS
        from slipstream.learn.learners.base_draft import BaseDraft
        from slipstream.learn.learners.registry import check_learns

        check_learns(speculative, self.learner)
        base = BaseDraft.of(speculative, self.model or EMBEDDED_TARGET)
        if base.method in HEADS and not Path(self.trace).is_dir():
            raise ConfigError(
                "a head learns from hidden states, which slipstream serve --learn keeps: give its folder, not "
                f"{self.trace!r}"
            )
        if not base.path.is_dir():
            raise ConfigError(f"learning needs the folder of the draft's weights, got {base.model!r}")
        return base


@with_flags
def replay(flags: ReplayFlags) -> None:
    """Learn, judge and promote offline on a trace, and say what that would have gained.

    The answers are the same with any draft, so each version's drafts on them are known, not estimated.
    """
    from slipstream.learn.decisions.judge import JudgeOptions
    from slipstream.learn.decisions.replay import ReplayOptions
    from slipstream.learn.decisions.replay import replay as run
    from slipstream.learn.learners.learner_options import LearnerOptions
    from slipstream.learn.learners.registry import learner_for, make_learner

    if flags.output is not None:
        check_file(flags.output, flags.overwrite, "--output")
    speculative = drafter_of(filled(SpeculationFlags, flags), flags.model)
    base = flags.base(speculative)
    depth = flags.depth or int(speculative.options.get("num_speculative_tokens", 4))
    learner = make_learner(
        flags.learner or learner_for(base.method, 0), base, filled(LearnerOptions, flags, depth=depth)
    )
    records = _records(flags)
    stderr().print(f"{len(records):,} answers", markup=False)
    report = run(
        records,
        learner,
        filled(ReplayOptions, flags),
        JudgeOptions(depth=depth),
        on_round=lambda one: stderr().print(_line(one), markup=False),
    )
    if flags.output is not None:
        write_json(flags.output, report.as_json())
    if flags.json:
        print_json(report.as_json())
    else:
        _show(report)


def _records(flags: ReplayFlags) -> list[ServedRecord]:
    from slipstream.learn.capture.traces import asked_trace, questions_of, served_trace

    if Path(flags.trace).is_dir():
        return served_trace(Path(flags.trace))
    from slipstream.engine.factory import make_engine
    from slipstream.sampling.params import SamplingParams

    questions = questions_of(flags.trace)
    params = SamplingParams(temperature=flags.temperature, max_tokens=flags.max_tokens, seed=flags.seed)
    say_loading(flags.model)
    engine = make_engine(flags.model, None, {"max_num_seqs": 32})

    def show(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            stderr().print(f"answered {done} of {total}", markup=False)

    return asked_trace(engine, questions, params, show)


def _line(one: ReplayedRound) -> str:
    serves = f"version {one.serving}" if one.serving else "the base drafter"
    what = "promoted" if one.promoted else "kept"
    return (
        f"after {one.after}: {what} ({one.why}); {serves}: {one.served['all']:.2f} tokens a pass, "
        f"base {one.base['all']:.2f}"
    )


def _show(report: ReplayReport) -> None:
    from slipstream.tools.bench.report.grid import Grid

    grid = Grid("tokens a pass over the whole trace", ["task", "base", "learning", "gain"])
    for task, base in sorted(report.base.items()):
        served = report.served[task]
        grid.add(task, f"{base:.3f}", f"{served:.3f}", f"{served / base - 1:+.1%}")
    wide_results().print(grid.rich())
    promoted = sum(one.promoted for one in report.rounds)
    print(
        f"{report.num_requests:,} requests, {promoted} of {len(report.rounds) - 1} candidates promoted, "
        f"{report.learn_s:.0f} s of learning, tokens a pass {report.gain:+.1%}"
    )

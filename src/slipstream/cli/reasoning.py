"""`slipstream reasoning calibrate`: which threshold of drafted steps keeps the accuracy on the user's own problems."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from slipstream.cli.flags.flags import PlainHelp, filled, with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    Json,
    Model,
    SamplingValues,
    SpeculationValues,
    announce,
    chosen_speculation,
    load,
    model_name,
    recommended,
)
from slipstream.cli.flags.prompts import prepare, read_jobs
from slipstream.cli.output.console import print_rows, results
from slipstream.cli.output.loading import loading
from slipstream.cli.output.results import print_json
from slipstream.errors import ConfigError, RequestError
from slipstream.reasoning.calibration import DEFAULT_GRID, CalibrationCell, choose_threshold, is_expected
from slipstream.reasoning.config import ReasoningConfig
from slipstream.reasoning.options import StepOptions
from slipstream.sampling.params import SamplingParams
from slipstream.stats.paired import PairedAccuracy
from slipstream.text.jsonl import read_rows

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

app = typer.Typer(help="Step-level speculation, which is lossy.", rich_markup_mode=None)


class StepJudgeName(StrEnum):
    """The judges."""

    SCORE = "score"
    LOGPROB = "logprob"


@app.callback()
def reasoning() -> None:
    """Step-level speculation, which is lossy."""


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags:
    """On what and how a threshold is calibrated."""

    problems: Annotated[Path, Argument()]
    """A .jsonl file: one {"prompt" or "messages": …, "expected": "…"} a line."""
    model: Model = None
    judge: StepJudgeName = StepJudgeName.SCORE
    """score or logprob."""
    thresholds: str | None = None
    """Thresholds to try, with commas between them; a usual grid by default."""
    max_loss: Annotated[float, Option(min=0, max=1)] = 0.02
    """The accuracy that may be lost, as a share: 0.02 is two points."""
    protect_first_steps: Annotated[int, Option(min=0)] = 2
    """As in requests."""
    exact: Annotated[bool, Option("--exact")] = False
    """The answer is `expected` and nothing else; by default it has it as a word."""
    chat: Annotated[bool | None, Option("--chat/--raw")] = None
    """Use the chat template; by default where there is one."""
    json: Json = False
    speculation: SpeculationValues
    sampling: SamplingValues
    engine: EngineValues

    def options(self) -> list[StepOptions]:
        """One a threshold; raises `RequestError`."""
        return [
            filled(StepOptions, self, judge=self.judge.value, threshold=one)
            for one in _grid(self.thresholds, self.judge)
        ]


@app.command(cls=PlainHelp)
@with_flags
def calibrate(flags: CalibrateFlags) -> None:
    """Answer problems with drafted steps at several thresholds, and choose the fastest that keeps the accuracy.

    Accuracy is compared problem by problem with the target's own answers. A threshold qualifies if it loses at most
    --max-loss with 95 % confidence, so few problems never qualify one. Needs --reasoning-draft and --allow-lossy.
    """
    requested, jobs, expected = flags.options(), read_jobs(None, flags.problems), _expected(flags.problems)
    params = SamplingParams.from_mapping(flags.sampling)
    with loading(flags.model):
        speculative = chosen_speculation(flags.speculation, flags.model)
        if speculative.reasoning is None:
            raise ConfigError("calibrate needs a draft that writes steps; name one with --reasoning-draft")
        think_end = ReasoningConfig.from_mapping(speculative.reasoning).think_end
        llm = load(flags.model, speculative, flags.engine)
    params = recommended(llm, params, flags.sampling)
    prompts = [prepare(llm.engine, job, flags.chat) for job in jobs]
    task = _CalibrationTask(llm, prompts, params, expected, think_end, flags.exact)
    announce(llm)
    reference = task.run(None)
    cells = [task.run(options) for options in requested]
    chosen = choose_threshold(reference.right, cells, flags.max_loss)
    found = _found(reference, cells, chosen, requested[0], flags.max_loss)
    if flags.json:
        print_json({"model": model_name(flags.model), "lossy": True, **found})
        return
    _print(found, flags.judge.value)


def _grid(text: str | None, judge: StepJudgeName) -> list[float]:
    if text is None:
        return list(DEFAULT_GRID[judge.value])
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise RequestError(f"--thresholds takes numbers with commas between them, got {text!r}") from None


def _expected(file: Path) -> list[str]:
    """The right answers; raises `RequestError` for a line without one."""
    found: list[str] = []
    for where, row in read_rows(file):
        answer = row.get("expected")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise RequestError(f'{where} needs "expected", the right answer as a text or a number')
        found.append(str(answer))
    return found


@dataclass
class _CalibrationTask:
    """The problems, and how their answers are looked at."""

    llm: LLM
    prompts: list[list[int]]
    params: SamplingParams
    expected: Seq[str]
    think_end: str
    exact: bool

    def run(self, options: StepOptions | None) -> CalibrationCell:
        """Answer them all; None drafts no steps."""
        name = "the target alone" if options is None else f"threshold {options.least:g}"
        print(f"{name}: {len(self.prompts)} problems …", file=sys.stderr, flush=True)
        seeds = [
            self.params.seed if self.params.seed is not None else number
            for number in range(len(self.prompts))
        ]
        each = [replace(self.params, seed=seed) for seed in seeds]  # the same both ways
        outputs = self.llm.generate(self.prompts, each, use_tqdm=False, reasoning=options)
        metrics = [output.metrics for output in outputs]
        right = [
            is_expected(output.outputs[0].text, wanted, self.think_end, self.exact)
            for output, wanted in zip(outputs, self.expected, strict=True)
        ]
        return CalibrationCell(
            0.0 if options is None else options.least,
            right,
            sum(len(one.reasoning_log) for one in metrics),
            sum(one.num_kept_steps for one in metrics),
            sum(one.num_steps for one in metrics),
            sum(one.num_output_tokens for one in metrics),
        )


def _found(
    reference: CalibrationCell,
    cells: Seq[CalibrationCell],
    chosen: CalibrationCell | None,
    requested: StepOptions,
    max_loss: float,
) -> dict[str, Any]:
    num = len(reference.right)
    rows = []
    for cell in cells:
        pair = PairedAccuracy.of(reference.right, cell.right)
        rows.append(
            {
                "threshold": cell.threshold,
                "accuracy": pair.accuracy,
                "lost": pair.num_lost,
                "won": pair.num_won,
                "least_difference": pair.least_difference,
                "kept_share": cell.kept_share,
                "passes": cell.num_passes / num,
                "tokens": cell.num_tokens / num,
                "qualifies": pair.least_difference >= -max_loss,
            }
        )
    request = None
    if chosen is not None:
        request = {
            "judge": requested.judge,
            "threshold": chosen.threshold,
            "protect_first_steps": requested.protect_first_steps,
        }
    return {
        "num_problems": num,
        "max_loss": max_loss,
        "target": {
            "accuracy": sum(reference.right) / num,
            "passes": reference.num_passes / num,
            "tokens": reference.num_tokens / num,
        },
        "thresholds": rows,
        "reasoning": request,
    }


def _print(found: dict[str, Any], judge: str) -> None:
    console, target = results(), found["target"]
    print_rows(
        console,
        [
            (
                "target",
                f"{target['accuracy']:.1%} of {found['num_problems']} right, {target['passes']:.0f} passes and "
                f"{target['tokens']:.0f} tokens an answer",
            ),
            *(
                (
                    f"{judge} {row['threshold']:g}",
                    f"{row['accuracy']:.1%} right ({row['lost']} lost, {row['won']} won; at least "
                    f"{100 * row['least_difference']:+.1f} points), {row['kept_share']:.0%} of the steps kept, "
                    f"{row['passes']:.0f} passes{'' if row['qualifies'] else ', does not qualify'}",
                )
                for row in found["thresholds"]
            ),
        ],
    )
    if found["reasoning"] is None:
        console.print(
            f"no threshold keeps the accuracy within {100 * found['max_loss']:g} points with 95 % confidence: give "
            "more problems, stricter thresholds, or a larger --max-loss",
            markup=False,
        )
    else:
        console.print(f'"reasoning": {dumps(found["reasoning"])}', markup=False)

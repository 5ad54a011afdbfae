"""`slipstream generate`: answer one prompt or many."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.flags.flags import Values, parse_json, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SAMPLING,
    SPECULATION,
    Json,
    Model,
    announce,
    chosen_speculation,
    describe_speculation,
    labels,
    load,
    model_name,
    print_json,
    recommended,
    short_speculation,
)
from slipstream.cli.flags.prompts import PromptJob, prepare, read_jobs
from slipstream.cli.output.comparison import TimedComparison, time_pairs
from slipstream.cli.output.console import Painter, notes, results
from slipstream.cli.output.loading import loading, waiting
from slipstream.cli.output.logprobs import print_logprobs, print_prompt_logprobs
from slipstream.cli.output.report import as_json, print_summary, summarise
from slipstream.errors import ConfigError, RequestError
from slipstream.reasoning.options import StepOptions, parse_step_options
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.text.jsonl import read_text
from slipstream.text.prediction import parse_prediction

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
    from slipstream.text.stream import Piece


@with_flags(speculation=SPECULATION, sampling=SAMPLING, engine=ENGINE)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, --file or standard input is read.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="A text file with one prompt, or a .jsonl file with a prompt or messages a line.",
        ),
    ] = None,
    model: Model = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Wrap prompts in the chat template; by default if the model has one."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer without speculation; report the ratio of speeds.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="With --compare: timed runs of each prompt.")] = 3,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE|JSON",
            help="The answer is JSON under this schema, without white space. For other constraints see "
            "--structured.",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="The whole answer matches this regular expression.")
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--prediction",
            metavar="FILE",
            help="A text file that the answer is expected to be like, such as the code to be edited; it is drafted "
            "beside whatever drafter runs.",
        ),
    ] = None,
    reasoning: Annotated[
        str | None,
        typer.Option(
            "--reasoning",
            metavar="JSON",
            help="Draft whole steps of thinking, which may change the text: settings as a JSON object, or `on`. Needs "
            "--reasoning-draft and --allow-lossy.",
        ),
    ] = None,
    json: Json = False,
    *,
    speculation: Values,
    sampling: Values,
    engine: Values,
) -> None:
    """Answer a prompt, or every prompt of a file in one batch.

    Answers go to standard output; on a terminal, accepted draft tokens and the target's own have different colours.
    """
    jobs = read_jobs(prompt, file)
    params = SamplingParams.from_mapping(sampling | _constraint(json_schema, regex, sampling))
    expected = None if prediction is None else parse_prediction(read_text(prediction))
    steps = None if reasoning is None else _steps(reasoning)
    if compare and steps is not None:
        raise ConfigError("--compare measures speculation without loss; leave --reasoning out, or --compare")
    if compare and expected is not None:
        raise ConfigError("--compare measures drafters; leave --prediction out, or --compare")
    if isinstance(params.structured, StructuredOutput):
        from slipstream.sampling.grammars.compiler import check_followed

        check_followed(params.structured)  # before the model is loaded
    with loading(model):
        speculative = chosen_speculation(speculation, model)
        if compare and speculative.method == "off":
            raise ConfigError(
                "--compare needs speculation to compare with; choose a drafter with --spec or --draft"
            )
        llm = load(model, speculative, engine)
    params = recommended(llm, params, sampling)
    params.check_vocabulary(llm.engine.model.vocab_size)
    prompts = [prepare(llm.engine, job, chat) for job in jobs]
    if (compiling := llm.engine.intake.compile_grammar(params)) is not None:
        with waiting("compiling the constraint"):  # of a large vocabulary it takes seconds
            compiling.result()
    announce(llm)

    transcript = Transcript()
    comparison = None
    painter = None if json else Painter()
    streams = painter is not None and not compare and len(prompts) == params.n == 1
    if compare:
        comparison = _compare(llm, jobs, prompts, params, repeats, transcript)
        runs = [pair.on for pair in comparison.pairs[: len(prompts)]]
        outputs, wall_s = [run.output for run in runs], sum(run.wall_s for run in runs)
    else:
        if painter is not None and streams:
            painter.legend()
            transcript.on_pieces = painter.write
        started_s = time.perf_counter()
        tasks = [job.task for job in jobs]
        outputs = llm.generate(
            prompts, params, task=tasks, prediction=expected, reasoning=steps, on_update=transcript.add
        )
        wall_s = time.perf_counter() - started_s

    if painter is None:
        print_json(_as_json(llm, model, jobs, outputs, wall_s, comparison))
        return
    if streams:
        painter.end()
        mark_if_cut(outputs[0].outputs[0], params)
        print_logprobs(llm.engine.tokenizer, outputs[0].outputs[0])
        print_prompt_logprobs(llm.engine.tokenizer, outputs[0])
    else:
        _print_answers(llm, painter, jobs, outputs, transcript, params)
    notes().print()
    print_summary(
        notes(), summarise(outputs, wall_s), short_speculation(llm), _timed(len(prompts) * params.n, compare)
    )
    if comparison is not None:
        results().print()
        comparison.print(results(), short_speculation(llm), llm.engine.verifier.traits())
        for label in labels(llm):
            results().print(f"note: {label}")


def _steps(text: str) -> StepOptions:
    """The value of --reasoning; raises `RequestError`."""
    return parse_step_options(True if text == "on" else parse_json(text, "--reasoning"))


def _constraint(json_schema: str | None, regex: str | None, sampling: Values) -> Values:
    """`--json-schema` or `--regex` as a value of `structured`; raises `RequestError` for several constraints."""
    given = {"--json-schema": json_schema, "--regex": regex, "--structured": sampling.get("structured")}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"an answer has one constraint, got {' and '.join(names)}; give one of them")
    if json_schema is not None:
        is_json = json_schema.lstrip().startswith("{") or json_schema.strip() in ("true", "false")
        schema = json_schema if is_json else read_text(Path(json_schema))
        return {"structured": {"json_schema": schema, "compact": True}}
    return {} if regex is None else {"structured": {"regex": regex}}


@dataclass
class Transcript:
    """Collects the released pieces of each answer."""

    on_pieces: Callable[[list[Piece]], None] | None = None
    """Called with each update's pieces."""
    _pieces: dict[tuple[str, int], list[Piece]] = field(default_factory=dict)

    def add(self, update: Update) -> None:
        """Add an engine's update."""
        self._pieces.setdefault((update.request_id, update.index), []).extend(update.pieces)
        if self.on_pieces is not None:
            self.on_pieces(update.pieces)

    def of(self, request_id: str, index: int) -> list[Piece]:
        """All pieces of one answer."""
        return self._pieces.get((request_id, index), [])


def _compare(
    llm: LLM,
    jobs: Seq[PromptJob],
    prompts: list[list[int]],
    params: SamplingParams,
    repeats: int,
    transcript: Transcript,
) -> TimedComparison:
    """Time every prompt both ways, with a bar on a terminal and lines elsewhere.

    Every prompt has its own seed, the same both ways.
    """
    from rich.progress import Progress

    from slipstream.sampling.noise import draw_seed

    seeds = [params.seed if params.seed is not None else draw_seed() for _ in prompts]
    seeded = [replace(params, seed=seed) for seed in seeds]
    # Drawn between the timed runs only, because an automatic refresh would slow them down.
    with Progress(
        console=notes(), auto_refresh=False, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        bar = progress.add_task("comparing", total=len(prompts) * repeats)

        def advance(num_done: int) -> None:
            progress.update(bar, completed=num_done, refresh=True)
            if progress.disable:
                notes().print(f"pair {num_done} of {len(prompts) * repeats}")

        tasks = [job.task for job in jobs]
        return time_pairs(llm, prompts, seeded, tasks, repeats, transcript.add, advance)


def _timed(num_answers: int, compare: bool) -> str:
    """The basis of the summary's speed, in words."""
    if num_answers == 1:
        return "prompt included"
    if compare:
        return "prompts included; the first run of each, one after another"
    return f"prompts included; {num_answers} answers in one batch"


def _print_answers(
    llm: LLM,
    painter: Painter,
    jobs: Seq[PromptJob],
    outputs: Seq[RequestOutput],
    transcript: Transcript,
    params: SamplingParams,
) -> None:
    """Print every answer in the order of the prompts, with headings if there are several."""
    painter.legend()
    several = sum(len(output.outputs) for output in outputs) > 1
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True), start=1):
        for answer in output.outputs:
            if several:
                label = f" ({job.label})" if job.label else ""
                which = f", answer {answer.index + 1}" if len(output.outputs) > 1 else ""
                painter.heading(f"── prompt {number}{label}{which}")
            painter.write(transcript.of(output.request_id, answer.index))
            painter.end()
            mark_if_cut(answer, params)
            print_logprobs(llm.engine.tokenizer, answer)
        print_prompt_logprobs(llm.engine.tokenizer, output)


def mark_if_cut(answer: CompletionOutput, params: SamplingParams) -> None:
    """Print a note if an answer ended at the end of the context, or under a constraint before it was complete."""
    if answer.finish_reason == "length" and len(answer.token_ids) < (params.max_tokens or sys.maxsize):
        notes().print(
            f"note: the answer was cut after {len(answer.token_ids)} tokens, where the context is full"
        )
        return
    if params.structured is None or answer.finish_reason not in ("length", "error"):
        return
    why = (
        f"after {len(answer.token_ids)} tokens"
        if answer.finish_reason == "length"
        else "where nothing was allowed"
    )
    more = "; --max-tokens lets it grow" if answer.finish_reason == "length" else ""
    notes().print(f"note: the answer was cut {why}, before its form was whole{more}", markup=False)


def _as_json(
    llm: LLM,
    model: str | None,
    jobs: Seq[PromptJob],
    outputs: Seq[RequestOutput],
    wall_s: float,
    comparison: TimedComparison | None,
) -> dict[str, Any]:
    return {
        "slipstream": __version__,
        "model": model_name(model),
        "speculation": describe_speculation(llm),
        "labels": labels(llm),
        "requests": [
            {"label": job.label, "prompt": job.text, **as_json(output)}
            for job, output in zip(jobs, outputs, strict=True)
        ],
        "summary": summarise(outputs, wall_s),
        "comparison": None if comparison is None else comparison.as_json(),
    }

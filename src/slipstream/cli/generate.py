"""`slipstream generate`: answer one prompt or many."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from slipstream.cli.flags.flags import Values, parse_json, with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    Json,
    Model,
    SamplingValues,
    SpeculationValues,
    announce,
    chosen_speculation,
    describe_speculation,
    labels,
    load,
    model_name,
    recommended,
    short_speculation,
)
from slipstream.cli.flags.prompts import PromptJob, prepare, read_jobs
from slipstream.cli.output.comparison import TimedComparison, time_pairs
from slipstream.cli.output.console import Painter, results, stderr
from slipstream.cli.output.loading import loading, waiting
from slipstream.cli.output.report import as_json, print_summary, summarise
from slipstream.cli.output.results import print_json
from slipstream.core.meter import meter
from slipstream.core.version import __version__
from slipstream.errors import ConfigError, RequestError
from slipstream.reasoning.options import StepOptions, parse_step_options
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.text.jsonl import read_text
from slipstream.text.prediction import parse_prediction

if TYPE_CHECKING:
    from slipstream.config import SpeculativeConfig
    from slipstream.core.request import TokenLogprob
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
    from slipstream.text.prediction import Prediction
    from slipstream.text.prompts import Prompt
    from slipstream.text.stream import Piece


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """What is answered, by whom, and how."""

    prompt: Annotated[str | None, Argument()] = None
    """The prompt, of a speech model a sound's file; without it, --file or standard input is read."""
    file: Annotated[Path | None, Option("--file", "-f")] = None
    """A text file with one prompt, or a .jsonl file with a prompt or messages a line."""
    model: Model = None
    chat: Annotated[bool | None, Option("--chat/--raw")] = None
    """Wrap prompts in the chat template; by default if the model has one."""
    compare: Annotated[bool, Option("--compare")] = False
    """Also answer without speculation; report the ratio of speeds."""
    repeats: Annotated[int, Option(min=1)] = 3
    """With --compare: timed runs of each prompt."""
    json_schema: Annotated[str | None, Option(metavar="FILE|JSON")] = None
    """The answer is JSON under this schema, without white space. For other constraints see --structured."""
    regex: str | None = None
    """The whole answer matches this regular expression."""
    prediction: Annotated[Path | None, Option(metavar="FILE")] = None
    """A text file that the answer is expected to be like, such as the code to be edited; it is drafted in addition
    to what the drafter proposes."""
    reasoning: Annotated[str | None, Option(metavar="JSON")] = None
    """Draft whole steps of thinking, which may change the text: settings as a JSON object, or `on`. Needs
    --reasoning-draft and --allow-lossy."""
    json: Json = False
    speculation: SpeculationValues
    sampling: SamplingValues
    engine: EngineValues

    def constraint(self) -> Values:
        """`--json-schema` or `--regex` as a value of `structured`; raises `RequestError` for several constraints."""
        structured = self.sampling.get("structured")
        given = {"--json-schema": self.json_schema, "--regex": self.regex, "--structured": structured}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"an answer has one constraint, got {' and '.join(names)}; give one of them")
        if self.json_schema is not None:
            text = self.json_schema
            is_json = text.lstrip().startswith("{") or text.strip() in ("true", "false")
            schema = text if is_json else read_text(Path(text))
            return {"structured": {"json_schema": schema, "compact": True}}
        return {} if self.regex is None else {"structured": {"regex": self.regex}}

    def speculative(self) -> SpeculativeConfig:
        """The chosen speculation; raises `ConfigError`."""
        chosen = chosen_speculation(self.speculation, self.model)
        if self.compare and chosen.method == "off":
            raise ConfigError("--compare needs speculation to compare with; choose a drafter with --spec")
        return chosen


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


@dataclass
class _Answers:
    """The prompts, and after `run` their answers."""

    flags: GenerateFlags
    jobs: Seq[PromptJob]
    params: SamplingParams
    prediction: Prediction | None
    steps: StepOptions | None
    prompts: list[Prompt] = field(default_factory=list)
    """In token ids; of a speech model files."""
    outputs: list[RequestOutput] = field(default_factory=list)
    wall_s: float = 0.0
    comparison: TimedComparison | None = None
    transcript: Transcript = field(default_factory=Transcript)

    @classmethod
    def read(cls, flags: GenerateFlags) -> _Answers:
        """The prompts; raises `ConfigError` or `RequestError`, before the model is loaded."""
        jobs = read_jobs(flags.prompt, flags.file)
        params = SamplingParams.from_mapping(flags.sampling | flags.constraint())
        expected = None if flags.prediction is None else parse_prediction(read_text(flags.prediction))
        steps = None if flags.reasoning is None else _steps(flags.reasoning)
        if flags.compare and steps is not None:
            raise ConfigError(
                "--compare measures speculation without loss; leave --reasoning out, or --compare"
            )
        if flags.compare and expected is not None:
            raise ConfigError("--compare measures drafters; leave --prediction out, or --compare")
        if isinstance(params.structured, StructuredOutput):
            from slipstream.sampling.grammars.compiler import check_followed

            check_followed(params.structured)
        return cls(flags, jobs, params, expected, steps)

    def prepare(self, llm: LLM) -> None:
        """Encode the prompts, and wait until the constraint is compiled."""
        self.params = recommended(llm, self.params, self.flags.sampling)
        self.params.check_vocabulary(llm.engine.model.vocab_size)
        encoder = llm.engine.intake.encoder_prompts
        if encoder is not None and encoder.texts.speech is not None:
            self.prompts = llm.with_languages([{"audio": job.text or ""} for job in self.jobs])
        else:
            self.prompts = [prepare(llm.engine, job, self.flags.chat) for job in self.jobs]
        if (compiling := llm.engine.intake.compile_grammar(self.params)) is not None:
            with waiting("compiling the constraint"):  # of a large vocabulary it takes seconds
                compiling.result()

    def run(self, llm: LLM) -> None:
        """Answer the prompts."""
        if self.flags.compare:
            self.comparison = self._compare(llm)
            runs = [pair.on for pair in self.comparison.pairs[: len(self.prompts)]]
            self.outputs, self.wall_s = [run.output for run in runs], sum(run.wall_s for run in runs)
            return
        started_s = time.perf_counter()
        self.outputs = llm.generate(
            self.prompts,
            self.params,
            task=[job.task for job in self.jobs],
            prediction=self.prediction,
            reasoning=self.steps,
            on_update=self.transcript.add,
        )
        self.wall_s = time.perf_counter() - started_s

    def _compare(self, llm: LLM) -> TimedComparison:
        """Time every prompt both ways, with a bar on a terminal and lines elsewhere.

        Every prompt has its own seed, the same both ways.
        """
        from slipstream.sampling.noise import draw_seed

        seeds = [self.params.seed if self.params.seed is not None else draw_seed() for _ in self.prompts]
        seeded = [replace(self.params, seed=seed) for seed in seeds]
        num_pairs = len(self.prompts) * self.flags.repeats
        with meter("comparing", num_pairs, refreshes=False) as shown:

            def advance(num_done: int) -> None:
                shown.say(f"pair {num_done} of {num_pairs}")
                shown.show(num_done, num_pairs)

            tasks, repeats = [job.task for job in self.jobs], self.flags.repeats
            return time_pairs(llm, self.prompts, seeded, tasks, repeats, self.transcript.add, advance)

    def print(self, llm: LLM, painter: Painter, streamed: bool) -> None:
        """Print the answers, unless they were `streamed`, and what they cost."""
        if streamed:
            painter.end()
            mark_if_cut(self.outputs[0].outputs[0], self.params)
            _print_logprobs(llm.engine.tokenizer, self.outputs[0].outputs[0])
            _print_prompt_logprobs(llm.engine.tokenizer, self.outputs[0])
        else:
            self._print_all(llm, painter)
        stderr().print()
        timed = _timed(len(self.prompts) * self.params.n, self.flags.compare)
        print_summary(stderr(), summarise(self.outputs, self.wall_s), short_speculation(llm), timed)
        if self.comparison is not None:
            results().print()
            self.comparison.print(results(), short_speculation(llm), llm.engine.verifier.traits())
            for label in labels(llm):
                results().print(f"note: {label}")

    def _print_all(self, llm: LLM, painter: Painter) -> None:
        """Print every answer in the order of the prompts, with headings if there are several."""
        painter.legend()
        several = sum(len(output.outputs) for output in self.outputs) > 1
        for number, (job, output) in enumerate(zip(self.jobs, self.outputs, strict=True), start=1):
            for answer in output.outputs:
                if several:
                    label = f" ({job.label})" if job.label else ""
                    which = f", answer {answer.index + 1}" if len(output.outputs) > 1 else ""
                    painter.heading(f"── prompt {number}{label}{which}")
                painter.write(self.transcript.of(output.request_id, answer.index))
                painter.end()
                mark_if_cut(answer, self.params)
                _print_logprobs(llm.engine.tokenizer, answer)
            _print_prompt_logprobs(llm.engine.tokenizer, output)

    def as_json(self, llm: LLM) -> dict[str, Any]:
        """The answers and all that is known of the run."""
        return {
            "slipstream": __version__,
            "model": model_name(self.flags.model),
            "speculation": describe_speculation(llm),
            "labels": labels(llm),
            "requests": [
                {"label": job.label, "prompt": job.text, **as_json(output)}
                for job, output in zip(self.jobs, self.outputs, strict=True)
            ],
            "summary": summarise(self.outputs, self.wall_s),
            "comparison": None if self.comparison is None else self.comparison.as_json(),
        }


@with_flags
def generate(flags: GenerateFlags) -> None:
    """Answer a prompt, or every prompt of a file in one batch.

    Answers go to standard output; on a terminal, accepted draft tokens and the target's own have different colours.
    """
    answers = _Answers.read(flags)
    with loading(flags.model):
        llm = load(flags.model, flags.speculative(), flags.engine)
    answers.prepare(llm)
    announce(llm)
    if flags.json:
        answers.run(llm)
        print_json(answers.as_json(llm))
        return
    painter = Painter()
    streams = not flags.compare and len(answers.prompts) == answers.params.n == 1
    if streams:
        painter.legend()
        answers.transcript.on_pieces = painter.write
    answers.run(llm)
    answers.print(llm, painter, streams)


def _steps(text: str) -> StepOptions:
    """The value of --reasoning; raises `RequestError`."""
    return parse_step_options(True if text == "on" else parse_json(text, "--reasoning"))


def _timed(num_answers: int, compare: bool) -> str:
    """The basis of the summary's speed, in words."""
    if num_answers == 1:
        return "prompt included"
    if compare:
        return "prompts included; the first run of each, one after another"
    return f"prompts included; {num_answers} answers in one batch"


def mark_if_cut(answer: CompletionOutput, params: SamplingParams) -> None:
    """Print a note if an answer ended at the end of the context, or under a constraint before it was complete."""
    if answer.finish_reason == "length" and len(answer.token_ids) < (params.max_tokens or sys.maxsize):
        stderr().print(
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
    stderr().print(f"note: the answer was cut {why}, before its form was whole{more}", markup=False)


def _print_logprobs(tokenizer: Any, answer: CompletionOutput) -> None:
    """Print the answer's tokens to standard output; nothing without `logprobs`."""
    if answer.token_logprobs is not None:
        _print_table(tokenizer, "token", answer.token_ids, answer.token_logprobs)


def _print_prompt_logprobs(tokenizer: Any, output: RequestOutput) -> None:
    """Print the prompt's tokens to standard output; nothing without `prompt_logprobs`."""
    if output.prompt_token_logprobs is not None:
        _print_table(tokenizer, "prompt token", output.prompt_token_ids, output.prompt_token_logprobs)


def _print_table(tokenizer: Any, title: str, token_ids: Seq[int], entries: Seq[TokenLogprob | None]) -> None:
    """A token a line: its text, its log-probability (a prompt's first token has none), the alternatives."""

    def text(token_id: int) -> str:
        return dumps(tokenizer.decode([token_id]), ensure_ascii=False)

    shown = [text(token_id) for token_id in token_ids]
    width = max(map(len, [title, *shown]))
    print(f"\n{title:<{width}}  logprob  alternatives")
    for token, entry in zip(shown, entries, strict=True):
        logprob, top = ("", ()) if entry is None else (f"{entry.logprob:.3f}", entry.top)
        alternatives = "  ".join(f"{text(other)} {value:.3f}" for other, value in top)
        print(f"{token:<{width}}  {logprob:>7}  {alternatives}".rstrip())

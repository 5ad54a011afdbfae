"""`slipstream train`: trains a drafter for a target."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from slipstream.cli.flags.faults import Faults
from slipstream.cli.flags.flags import FlagSet, PlainHelp, Values, filled, refuse, with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    ModelArgument,
    SpeculationValues,
    announce,
    chosen_speculation,
    load,
    model_name,
)
from slipstream.cli.flags.remote import SERVER_PANEL, ServerFlags, Url
from slipstream.cli.output.console import stderr
from slipstream.cli.output.loading import loading, say_loading
from slipstream.draft.methods import DFLASH, DRAFT_MODEL, EAGLE3, HYDRA, MEDUSA, METHODS, PARD, PEAGLE
from slipstream.errors import ConfigError
from slipstream.train.block_options import DSPARK, BlockTrainOptions
from slipstream.train.options import (
    DistillOptions,
    EagleTrainOptions,
    EvaluationOptions,
    HeadTrainOptions,
    MaskOptions,
    PardTrainOptions,
    PEagleTrainOptions,
    RegenerateOptions,
    TrainOptions,
)

if TYPE_CHECKING:
    from slipstream.train.answerers import Answerer
    from slipstream.train.batches import TrainingDocument
    from slipstream.train.regenerate import Tally
    from slipstream.train.target import FrozenTarget
    from slipstream.train.trainer import Student

app = typer.Typer(
    help="Train a drafter for a target: let the target answer prompts, then train on its answers."
)


@dataclass(frozen=True, kw_only=True)
class RegenerateFlags:
    """Which prompts are answered, and by whom."""

    model: ModelArgument = None
    data: Path | None = None
    """JSON lines with `prompt`, `text`, `question`, `instruction`, `turns` or `messages` (or see --key), and `task`;
    answers are dropped."""
    output: Path | None = None
    """File for the conversations; run again to continue."""
    url: Url = None
    server: Annotated[ServerFlags, SERVER_PANEL]
    options: Annotated[Values, FlagSet(RegenerateOptions, "Prompts and answers")]
    speculation: SpeculationValues
    engine: EngineValues

    def answerer(self) -> tuple[Answerer, dict[str, Any]]:
        """Who answers, and what is noted of that; an engine is loaded, or the server's model is looked up."""
        if self.url is not None:
            return self._server(self.url.rstrip("/"))
        refuse(
            {"served_model": self.server.served_model, "api_key_env": self.server.api_key_env},
            "needs the --url of a server",
        )
        with loading(self.model):
            llm = load(self.model, chosen_speculation(self.speculation, self.model), self.engine)
        announce(llm)
        from slipstream.train.answerers import EngineAnswerer

        who = {"model": model_name(self.model), "quantization": llm.engine.config.quantization}
        return EngineAnswerer(llm.engine), who

    def _server(self, url: str) -> tuple[Answerer, dict[str, Any]]:
        from slipstream.train.answerers import ServerAnswerer

        if self.model is not None or self.speculation:
            raise ConfigError("a server has its own model and drafter; omit MODEL and --spec with --url")
        others = {name: value for name, value in self.engine.items() if name != "max_num_seqs"}
        refuse(others, "cannot be used with --url")
        server = self.server.address(url, self.server.served_model)
        who = {"model": server.model, "server": server.url}
        return ServerAnswerer(server, self.engine.get("max_num_seqs", 32)), who


@app.command(cls=PlainHelp)
@with_flags
def regenerate(flags: RegenerateFlags) -> None:
    """Let the target answer the prompts of a file, as training data for its drafter.

    Each conversation is written when it is complete. The same command continues a run that was stopped.
    """
    data, output = flags.data, flags.output
    with Faults() as faults:
        faults.check_paths(None if data is None else [data], None if output is None else output.parent, None)
    say_loading(flags.model if flags.url is None else flags.url, "answers come from")

    from slipstream.train.regenerate import check_data
    from slipstream.train.regenerate import regenerate as run

    assert data is not None
    assert output is not None
    with Faults() as faults:
        requested = faults.made(lambda: RegenerateOptions(**flags.options))
        if not faults.found:
            faults.made(lambda: check_data(data, requested))
    answerer, who = flags.answerer()
    tally = run(data, output, requested, answerer, who, _reporter())
    stderr().print(str(tally), markup=False)
    if tally.num_skipped:
        stderr().print(
            f"skipped: {tally.num_skipped} that cannot be answered; {tally.why_skipped}", markup=False
        )
    stderr().print(f"written: {output}", markup=False)


MASK_PANELS = {field.name: "Masks" for field in fields(MaskOptions)}
"""The heading of flags that several kinds of drafters have, so that one table describes them."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """A training run, whatever the method."""

    model: ModelArgument = None
    data: Annotated[list[Path] | None, Option(rich_help_panel="Training")] = None
    """JSON lines of conversations, as written by `regenerate`; may be repeated."""
    output: Annotated[Path | None, Option(rich_help_panel="Training")] = None
    """A folder for checkpoint, log, plot and result; run again to continue."""
    device: Annotated[str | None, Option(rich_help_panel="Training")] = None
    """cpu or cuda; by default cuda if there is one."""
    threads: Annotated[int | None, Option(min=1, rich_help_panel="Training")] = None
    """CPU threads."""
    feature_folder: Annotated[Path | None, Option(rich_help_panel="Training")] = None
    """With --cache-features: where they are kept, so that several runs with the same target and data share them; the
    folder `features` in the output by default."""
    own: Values
    options: Annotated[Values, FlagSet(TrainOptions, "Training")]
    evaluation: Annotated[Values, FlagSet(EvaluationOptions, "Evaluation")]


@dataclass(frozen=True, kw_only=True)
class DraftTrainFlags(TrainFlags):
    """The training of a draft model."""

    own: Annotated[Values, FlagSet(DistillOptions, "Draft model")]


@dataclass(frozen=True, kw_only=True)
class EagleTrainFlags(TrainFlags):
    """The training of an EAGLE head."""

    own: Annotated[Values, FlagSet(EagleTrainOptions, "EAGLE head")]


@dataclass(frozen=True, kw_only=True)
class PEagleTrainFlags(TrainFlags):
    """The training of a P-EAGLE head."""

    own: Annotated[Values, FlagSet(PEagleTrainOptions, "P-EAGLE head", panels=MASK_PANELS)]


@dataclass(frozen=True, kw_only=True)
class PardTrainFlags(TrainFlags):
    """The training of a draft model that reads masks."""

    own: Annotated[
        Values,
        FlagSet(
            PardTrainOptions,
            "Draft model",
            skip=frozenset({"on_policy", "on_policy_tokens"}),
            panels=MASK_PANELS,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class BlockTrainFlags(TrainFlags):
    """The training of a block drafter."""

    own: Annotated[Values, FlagSet(BlockTrainOptions, "Block head", panels=MASK_PANELS)]


@dataclass(frozen=True, kw_only=True)
class MedusaTrainFlags(TrainFlags):
    """The training of Medusa heads."""

    own: Annotated[Values, FlagSet(HeadTrainOptions, "Heads")]


@dataclass(frozen=True, kw_only=True)
class HydraTrainFlags(TrainFlags):
    """The training of Hydra heads."""

    own: Annotated[Values, FlagSet(HeadTrainOptions, "Heads", skip=frozenset({"joint", "joint_weight"}))]


Maker = Callable[[Any, int, "FrozenTarget", Any, "Seq[TrainingDocument]"], "Student"]
"""(options of the method, seed, target, its tokenizer, the documents) -> the student."""


def _method(flags_of: type[TrainFlags], options: type) -> Callable[[Maker], Maker]:
    """A command from a function that makes a student; the function's name is the method, its docstring the help."""

    def register(make: Maker) -> Maker:
        def command(flags: TrainFlags) -> None:
            _train(make, flags, options)

        command.__doc__ = make.__doc__
        command.__annotations__["flags"] = flags_of
        app.command(make.__name__, cls=PlainHelp)(with_flags(command))
        return make

    return register


def _workload(measured: EvaluationOptions) -> None:
    """Raises `RequestError` for an invalid evaluation workload."""
    from slipstream.assets.workload.reading import read_workload

    read_workload(measured.eval_workload)


def _with_embedded(method: str, own: dict[str, Any]) -> dict[str, Any]:
    """Options with `--init embedded` replaced by the embedded target's own drafter of this kind."""
    if own.get("init") != "embedded":
        return own
    from slipstream.assets import EMBEDDED_DRAFTERS

    known = {METHODS[name].trainer: folder for name, folder in EMBEDDED_DRAFTERS.items()}
    # These begin with a drafter that does not read masks yet.
    known |= {PARD.trainer: known[DRAFT_MODEL.trainer], PEAGLE.trainer: known[EAGLE3.trainer]}
    if method not in known:
        raise ConfigError(
            f"there is no embedded {method}; --init embedded is for {' and '.join(map(str, known))}"
        )
    return {**own, "init": known[method]}


@_method(DraftTrainFlags, DistillOptions)
def draft(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Distil a small draft model from the target; use OUTPUT/draft with --spec draft:PATH.

    Begins with a checkpoint, fresh weights or some layers of the target. Ctrl-C saves; the same command continues.
    """
    from slipstream.train.distillation import DraftStudent, make_draft

    return DraftStudent(make_draft(wanted, target, seed), tokenizer, wanted, seed)


@_method(EagleTrainFlags, EagleTrainOptions)
def eagle3(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train an EAGLE-3 head for the target; use OUTPUT/eagle3 with --spec eagle3:PATH, vLLM or SGLang.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.eagle import EagleStudent

    return EagleStudent(wanted, target, documents, 3, seed)


@_method(EagleTrainFlags, EagleTrainOptions)
def eagle(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train an EAGLE-1 head, also for EAGLE-2's trees; use OUTPUT/eagle with --spec eagle:PATH.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.eagle import EagleStudent

    return EagleStudent(wanted, target, documents, 1, seed)


@_method(PEagleTrainFlags, PEagleTrainOptions)
def peagle(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train a P-EAGLE head, an EAGLE-3 head that drafts in one pass; use OUTPUT/peagle with --spec peagle:PATH or vLLM.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.peagle import PEagleStudent

    return PEagleStudent(wanted, target, tokenizer, documents, seed)


@_method(PardTrainFlags, PardTrainOptions)
def pard(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Teach a draft model to draft in one pass behind masks (PARD); use OUTPUT/pard with --spec pard:PATH or vLLM.

    Begins with a checkpoint, best a trained draft model, with fresh weights or some layers of the target. With
    --feature-layers it also reads the target's hidden states (PARD-2). Ctrl-C saves; the same command continues.
    """
    from slipstream.train.pard import PardStudent

    return PardStudent(wanted, target, tokenizer, documents, seed)


@_method(BlockTrainFlags, BlockTrainOptions)
def dflash(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train a head that drafts a whole block in one pass (DFlash); use OUTPUT/dflash with --spec dflash:PATH.

    Also JetSpec (--causal --loss forward_kl --position-weights uniform), and, with --left-to-right, DFlash2 and Domino.
    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.dflash import BlockStudent

    return BlockStudent(wanted, target, tokenizer, documents, DFLASH.name, seed)


@_method(BlockTrainFlags, BlockTrainOptions)
def dspark(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train a block drafter that corrects its draft from left to right and says how sure it is (DSpark).

    Use OUTPUT/dspark with --spec dflash:PATH. Ctrl-C saves; the same command continues.
    """
    from slipstream.train.dflash import BlockStudent

    return BlockStudent(wanted, target, tokenizer, documents, DSPARK, seed)


@_method(MedusaTrainFlags, HeadTrainOptions)
def medusa(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train Medusa heads; use OUTPUT/medusa with --spec medusa:PATH.

    Medusa-1 does not change the target. With --joint (Medusa-2) a copy of the target is trained with the heads, and
    OUTPUT/medusa/target is then the target to serve. Ctrl-C saves; the same command continues.
    """
    from slipstream.train.heads import HeadStudent, JointStudent

    if wanted.joint:
        return JointStudent(wanted, target, tokenizer, seed)
    return HeadStudent(wanted, target, MEDUSA.name, seed)


@_method(HydraTrainFlags, HeadTrainOptions)
def hydra(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train Hydra heads; use OUTPUT/hydra with --spec hydra:PATH.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.heads import HeadStudent

    return HeadStudent(wanted, target, HYDRA.name, seed)


def _train(make: Maker, flags: TrainFlags, options_of: type) -> None:
    """Check everything that the flags say, run it, and report how it ended."""
    method, console = make.__name__, stderr()
    with Faults() as faults:
        faults.check_paths(flags.data, flags.output, flags.own.get("init"))
        wanted = faults.made(lambda: options_of(**_with_embedded(method, flags.own)))
        options = faults.made(lambda: TrainOptions(**flags.options))
        evaluation = faults.made(lambda: EvaluationOptions(**flags.evaluation))
        if evaluation is not None:
            faults.made(lambda: _workload(evaluation))
    say_loading(flags.model, f"training {method} for")
    from slipstream.train.runs import TrainingRun, run

    plan = filled(TrainingRun, flags, options=options, evaluation=evaluation)
    with interruptible() as asked_to_stop:
        progress = run(
            plan,
            lambda *made_of: make(wanted, options.seed, *made_of),
            method,
            asdict(wanted),
            lambda line: console.print(line, markup=False),
            asked_to_stop,
        )
    if asked_to_stop():
        console.print(f"stopped at step {progress.step}; the same command continues from there")
        raise typer.Exit(130)
    console.print(f"written: {plan.output / method}", markup=False)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT and SIGTERM; yields a function that returns True once one has been received."""
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in numbers}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reporter(every_s: float = 15.0) -> Any:
    """A callback that prints the progress at intervals."""
    said_s = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= every_s:
            said_s = time.monotonic()
            stderr().print(str(tally), markup=False)

    return report

"""`slipstream train`: trains a drafter for a target."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import FlagSet, Values, with_flags
from slipstream.cli.flags.help import PlainHelp
from slipstream.cli.flags.options import (
    ENGINE,
    SPECULATION,
    ModelArgument,
    announce,
    chosen_speculation,
    load,
    model_name,
    with_model,
)
from slipstream.cli.flags.remote import ApiKeyEnv, ServedModel, TimeoutS, Url, api_key_of
from slipstream.cli.output.console import notes
from slipstream.cli.output.faults import Faults
from slipstream.cli.output.loading import loading, say_loading
from slipstream.draft.methods import HYDRA, MEDUSA, METHODS
from slipstream.errors import ConfigError
from slipstream.train.options import (
    DistillOptions,
    EagleTrainOptions,
    EvaluationOptions,
    HeadTrainOptions,
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

_REGENERATE = FlagSet(RegenerateOptions, "Prompts and answers")
_TRAIN = FlagSet(TrainOptions, "Training")
_EVALUATION = FlagSet(EvaluationOptions, "Evaluation")
_DRAFT = FlagSet(DistillOptions, "Draft model")
_EAGLE = FlagSet(EagleTrainOptions, "Head")
_MEDUSA = FlagSet(HeadTrainOptions, "Heads")
_HYDRA = FlagSet(HeadTrainOptions, "Heads", skip=frozenset({"joint", "joint_weight"}))

Data = Annotated[
    list[Path] | None,
    typer.Option(help="JSON lines of conversations, as written by `regenerate`; may be repeated."),
]
Output = Annotated[
    Path | None,
    typer.Option(help="A folder for checkpoint, log, plot and result; run again to continue."),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


@app.command(cls=PlainHelp)
@with_model
@with_flags(options=_REGENERATE, speculation=SPECULATION, engine=ENGINE)
def regenerate(
    model: ModelArgument = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt`, `text`, `question`, `instruction`, `turns` or `messages` (or see --key), "
            "and `task`; answers are dropped."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the conversations; run again to continue.")
    ] = None,
    url: Url = None,
    served_model: ServedModel = None,
    api_key_env: ApiKeyEnv = None,
    timeout_s: TimeoutS = 600.0,
    *,
    options: Values,
    speculation: Values,
    engine: Values,
) -> None:
    """Let the target answer the prompts of a file, as training data for its drafter.

    Each conversation is written when it is complete. The same command continues a run that was stopped.
    """
    with Faults() as faults:
        faults.check_paths(None if data is None else [data], None if output is None else output.parent, None)
    say_loading(model if url is None else url, "answers come from")

    from slipstream.train.regenerate import check_data
    from slipstream.train.regenerate import regenerate as run

    with Faults() as faults:
        asked = faults.made(lambda: RegenerateOptions(**options))
        assert data is not None
        assert output is not None
        if not faults.found:
            file = data
            faults.made(lambda: check_data(file, asked))
    if url is None:
        for name, value in (("--served-model", served_model), ("--api-key-env", api_key_env)):
            if value is not None:
                raise ConfigError(f"{name} needs the --url of a server")
        with loading(model):
            llm = load(model, chosen_speculation(speculation, model), engine)
        announce(llm)
        from slipstream.train.answerers import EngineAnswerer

        answerer: Answerer = EngineAnswerer(llm.engine)
        who: dict[str, Any] = {"model": model_name(model), "quantization": llm.engine.config.quantization}
    else:
        if model is not None or speculation:
            raise ConfigError("a server has its own model and drafter; omit MODEL and --spec with --url")
        answerer, who = _server(url.rstrip("/"), served_model, api_key_env, timeout_s, engine)
    tally = run(data, output, asked, answerer, who, _reporter())
    notes().print(str(tally), markup=False)
    if tally.num_skipped:
        notes().print(
            f"skipped: {tally.num_skipped} that cannot be answered; {tally.why_skipped}", markup=False
        )
    notes().print(f"written: {output}", markup=False)


Maker = Callable[[Any, int, "FrozenTarget", Any, "Seq[TrainingDocument]"], "Student"]
"""(options of the method, seed, target, its tokenizer, the documents) -> the student."""


def _method(flags: FlagSet) -> Callable[[Maker], Maker]:
    """A command from a function that makes a student; the function's name is the method, its docstring the help."""

    def register(make: Maker) -> Maker:
        method = make.__name__

        def command(
            model: ModelArgument = None,
            data: Data = None,
            output: Output = None,
            device: Device = None,
            threads: Threads = None,
            *,
            own: Values,
            options: Values,
            evaluation: Values,
        ) -> None:
            with Faults() as faults:
                faults.check_paths(data, output, own.get("init"))
                wanted = faults.made(lambda: flags.cls(**_with_embedded(method, own)))
                training = faults.made(lambda: TrainOptions(**options))
                measured = faults.made(lambda: EvaluationOptions(**evaluation))
                if measured is not None:
                    faults.made(lambda: _workload(measured))
            assert data is not None
            assert output is not None
            say_loading(model, f"training {method} for")
            _train(
                method,
                lambda *made_of: make(wanted, *made_of),
                asdict(wanted),
                (model, data, output, training, measured),
                (device, threads),
            )

        command.__doc__ = make.__doc__
        app.command(method, cls=PlainHelp)(
            with_model(with_flags(own=flags, options=_TRAIN, evaluation=_EVALUATION)(command))
        )
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
    if method not in known:
        raise ConfigError(
            f"there is no embedded {method}; --init embedded is for {' and '.join(map(str, known))}"
        )
    return {**own, "init": known[method]}


@_method(_DRAFT)
def draft(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Distil a small draft model from the target; use OUTPUT/draft with --draft.

    Begins with a checkpoint, fresh weights or some layers of the target. Ctrl-C saves; the same command continues.
    """
    from slipstream.train.distillation import DraftStudent, make_draft

    return DraftStudent(make_draft(wanted, target, seed), tokenizer, wanted, seed)


@_method(_EAGLE)
def eagle3(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train an EAGLE-3 head for the target; use OUTPUT/eagle3 with --spec eagle3:PATH, vLLM or SGLang.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.eagle import EagleStudent

    return EagleStudent(wanted, target, documents, 3, seed)


@_method(_EAGLE)
def eagle(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train an EAGLE-1 head, also for EAGLE-2's trees; use OUTPUT/eagle with --spec eagle:PATH.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.eagle import EagleStudent

    return EagleStudent(wanted, target, documents, 1, seed)


@_method(_MEDUSA)
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


@_method(_HYDRA)
def hydra(
    wanted: Any, seed: int, target: FrozenTarget, tokenizer: Any, documents: Seq[TrainingDocument]
) -> Student:
    """Train Hydra heads; use OUTPUT/hydra with --spec hydra:PATH.

    Ctrl-C saves; the same command continues.
    """
    from slipstream.train.heads import HeadStudent

    return HeadStudent(wanted, target, HYDRA.name, seed)


def _train(
    method: str,
    make: Callable[[int, FrozenTarget, Any, Seq[TrainingDocument]], Student],
    method_options: dict[str, Any],
    asked: tuple[str | None, list[Path], Path, TrainOptions, EvaluationOptions],
    machine: tuple[str | None, int | None],
) -> None:
    """Run it, and report how it ended."""
    from slipstream.train.runs import TrainingRun, run

    console, wanted = notes(), TrainingRun(*asked, *machine)
    with interruptible() as asked_to_stop:
        progress = run(
            wanted,
            lambda *made_of: make(wanted.options.seed, *made_of),
            method,
            method_options,
            lambda line: console.print(line, markup=False),
            asked_to_stop,
        )
    if asked_to_stop():
        console.print(f"stopped at step {progress.step}; the same command continues from there")
        raise typer.Exit(130)
    console.print(f"written: {wanted.output / method}", markup=False)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT and SIGTERM; yields a function that returns True once one has been received."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _server(
    url: str, model: str | None, api_key_env: str | None, timeout_s: float, engine: Values
) -> tuple[Answerer, dict[str, Any]]:
    from slipstream.rpc.client import ServerAddress, find_model
    from slipstream.train.answerers import ServerAnswerer

    for name in engine:
        if name != "max_num_seqs":
            raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --url")
    key = api_key_of(api_key_env)
    name = model or find_model(url, key, timeout_s)
    server = ServerAddress(url, name, "", key, timeout_s)
    return ServerAnswerer(server, engine.get("max_num_seqs", 32)), {"model": name, "server": url}


def _reporter(every_s: float = 15.0) -> Any:
    """A callback that prints the progress at intervals."""
    said_s = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= every_s:
            said_s = time.monotonic()
            notes().print(str(tally), markup=False)

    return report

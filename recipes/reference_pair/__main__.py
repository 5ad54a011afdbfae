"""Command line of the recipe: `python -m recipes.reference_pair train | evaluate --help`."""

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoTokenizer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from .data import RecipeError, load_conversations, to_pieces
from .evaluate import evaluate as measure
from .model import SHAPES, export
from .tokenizer import Spelling, train_tokenizer
from .train import Progress, TrainConfig
from .train import train as train_model


class OneLineErrors(TyperGroup):
    """Says what cannot be done in one line on stderr and exits with 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (RecipeError, TyperException) as error:
            message = error.format_message() if isinstance(error, TyperException) else str(error)
            print(f"error: {' '.join(message.split())}", file=sys.stderr)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

# sql and api_call are the most regular and learned first; in the others a small model repeats itself.
MIX = "sql=0.4,api_call=0.6,chat=1.5,creative=2,code=1.5"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@contextmanager
def interruptible() -> Iterator[Callable[[Progress], bool]]:
    """Turn SIGINT and SIGTERM into a request to stop after the step; yields whether one has come."""
    asked: list[int] = []
    before = {n: signal.signal(n, lambda n, _: asked.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda _: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{folder} is not the folder of a checkpoint: it has no config.json")


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None


def parse_mix(text: str) -> dict[str, float]:
    """`sql=0.4,chat=1.5` to copies by task."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        task, _, copies = part.partition("=")
        try:
            mix[task.strip()] = float(copies)
        except ValueError:
            raise RecipeError(f"--mix is TASK=COPIES,TASK=COPIES,…, got {part!r}") from None
    if not all(0 <= copies < float("inf") for copies in mix.values()):
        raise RecipeError(f"--mix needs numbers of at least 0, got {text!r}")
    return mix


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="folder with train.jsonl")],
    out: Annotated[Path, typer.Option(help="folder for checkpoints and export/; run again to resume")],
    names: Annotated[list[str], typer.Argument(help="which models, in this order")] = list(SHAPES),  # noqa: B006
    init: Annotated[Path | None, typer.Option(help="a pair (target/ and draft/) to continue from")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="budget of each model, padding not counted")
    ] = None,
    time_limit_minutes: Annotated[
        float | None, typer.Option(min=0.001, help="budget of each model, restarts included")
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="rows a step")] = TrainConfig.batch_rows,
    row_length: Annotated[int, typer.Option(min=2, help="tokens a row")] = TrainConfig.row_length,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, help="leave out conversations with a longer answer")
    ] = 320,
    hold_fraction: Annotated[
        float, typer.Option(min=0, max=0.99, help="of the budget; then the rate falls to zero")
    ] = 0.5,
    mix: Annotated[
        str, typer.Option(help="copies of each conversation an epoch, by task; 1 where absent")
    ] = MIX,
    vocab_size: Annotated[int, typer.Option(min=300, help="tokens of a tokenizer that is learned")] = 4096,
    spelling: Annotated[
        Spelling, typer.Option(help="family of a tokenizer that is learned")
    ] = Spelling.byte_level,
    dtype: Annotated[Dtype, typer.Option(help="of matrix products; weights stay float32")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = default_device(),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="of fresh weights and data order")] = 0,
) -> None:
    """Learn the tokenizer, train the models and export each one to OUT/export as it is done."""
    for name in names:
        if name not in SHAPES:
            raise RecipeError(f"there is no model {name!r}; train {' or '.join(SHAPES)}")
        if init:
            check_model_folder(init / name)
    if max_tokens is None and time_limit_minutes is None:
        raise RecipeError("a run needs a budget: give --max-tokens, --time-limit-minutes or both")
    copies_by_task = parse_mix(mix) if mix else {}
    check_device(device)
    torch.set_num_threads(threads)
    conversations = load_conversations(data / "train.jsonl")
    tokenizer_folder = init / names[0] if init else out / "tokenizer"
    if tokenizer_folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    else:
        contents = (message["content"] for c in conversations for message in c["messages"])
        tokenizer = train_tokenizer(contents, vocab_size, spelling)
        tokenizer.save_pretrained(tokenizer_folder)
    pieces = to_pieces(conversations, tokenizer, row_length, max_answer_tokens)

    for name in names:
        config = TrainConfig(
            name=name,
            init=init / name if init else None,
            max_tokens=max_tokens,
            time_limit_minutes=time_limit_minutes,
            batch_rows=batch_rows,
            row_length=row_length,
            hold_fraction=hold_fraction,
            mix=copies_by_task,
            dtype=dtype.value,
            device=device,
            seed=seed,
        )
        with interruptible() as stop:
            model, progress = train_model(config, pieces, tokenizer, out / f"{name}.pt", stop)
        if progress.fraction(config) < 1.0:
            typer.echo(f"stopped at step {progress.step}; the same command goes on from there", err=True)
            raise typer.Exit(130)
        folder = out / "export" / name
        export(model, tokenizer, folder)
        provenance = {"config": asdict(config), "progress": asdict(progress), "versions": versions()}
        # Of a path only the last part: a published model does not tell where it was made.
        text = json.dumps(provenance, indent=2, default=lambda path: path.name)
        (folder / "training.json").write_text(text + "\n")


@app.command()
def evaluate(
    data: Annotated[Path, typer.Option(help="folder with valid.jsonl and test.jsonl")],
    models: Annotated[list[Path], typer.Argument(help="checkpoint folders")],
    prompts_per_task: Annotated[int, typer.Option(min=1, help="test prompts to answer for each task")] = 24,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = default_device(),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = os.cpu_count() or 1,
) -> None:
    """Print validation loss and greedy loop rate of checkpoints as JSON."""
    for folder in models:
        check_model_folder(folder)
    check_device(device)
    torch.set_num_threads(threads)
    valid, test = (load_conversations(data / f"{split}.jsonl") for split in ("valid", "test"))
    report: dict[str, Any] = {}
    for folder in models:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        report[str(folder)] = measure(folder, tokenizer, valid, test, device, prompts_per_task)
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    app()

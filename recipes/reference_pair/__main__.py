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

from .data import load_conversations, to_pieces
from .evaluate import evaluate as measure
from .model import SHAPES, export
from .tokenizer import train_tokenizer
from .train import Progress, TrainConfig
from .train import train as train_model

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

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


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="folder with train.jsonl")],
    out: Annotated[Path, typer.Option(help="folder for checkpoints and export/; run again to resume")],
    names: Annotated[list[str], typer.Argument(help="which models, in this order")] = list(SHAPES),  # noqa: B006
    init: Annotated[Path | None, typer.Option(help="a pair (target/ and draft/) to continue from")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="budget of each model, padding not counted")] = None,
    time_limit_minutes: Annotated[
        float | None, typer.Option(help="budget of each model, restarts included")
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="rows a step")] = TrainConfig.batch_rows,
    row_length: Annotated[int, typer.Option(help="tokens a row")] = TrainConfig.row_length,
    max_answer_tokens: Annotated[
        int, typer.Option(help="leave out conversations with a longer answer")
    ] = 320,
    hold_fraction: Annotated[float, typer.Option(help="of the budget; then the rate falls to zero")] = 0.5,
    mix: Annotated[
        str, typer.Option(help="copies of each conversation an epoch, by task; 1 where absent")
    ] = MIX,
    dtype: Annotated[Dtype, typer.Option(help="of matrix products; weights stay float32")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = default_device(),
    threads: Annotated[int, typer.Option(help="CPU threads")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="of fresh weights and data order")] = 0,
) -> None:
    """Learn the tokenizer, train the models and export each one to OUT/export as it is done."""
    torch.set_num_threads(threads)
    conversations = load_conversations(data / "train.jsonl")
    tokenizer_folder = init / names[0] if init else out / "tokenizer"
    if tokenizer_folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    else:
        tokenizer = train_tokenizer(m["content"] for c in conversations for m in c["messages"])
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
            mix={
                task: float(copies) for task, copies in (part.split("=") for part in mix.split(",") if part)
            },
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
    prompts_per_task: Annotated[int, typer.Option(help="test prompts to answer for each task")] = 24,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = default_device(),
    threads: Annotated[int, typer.Option(help="CPU threads")] = os.cpu_count() or 1,
) -> None:
    """Print validation loss and greedy loop rate of checkpoints as JSON."""
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

"""Train a drafting head for SmolLM2-135M-Instruct.

python -m recipes.smollm2_head prompts OUT --model FILE.gguf --chat CHAT --mbpp MBPP --held-out MT_BENCH
python -m recipes.smollm2_head answers OUT --model FILE.gguf --minutes 60
python -m recipes.smollm2_head train OUT --model FILE.gguf --kind dspark --minutes 90
python -m recipes.smollm2_head halve OUT --kind eagle3 --to FOLDER
python -m recipes.smollm2_head all OUT --model FILE.gguf --minutes 9
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch

from recipes.smollm2_head.answers import read_prompts, write_answers
from recipes.smollm2_head.heads import OPTIONS, halve, train_head, unpack
from recipes.smollm2_head.target import Target
from slipstream.train.options import OPTIMIZERS

TRAINED = ("eagle3", "dspark")
"""What `all` trains."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """0 when the stage was done, 2 with one line on stderr when it could not begin."""
    options = _parser().parse_args(arguments)
    stages = {"prompts": _prompts, "answers": _answers, "train": _train, "halve": _halve, "all": _all}
    try:
        stages[options.stage](options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m recipes.smollm2_head", description=(__doc__ or "").partition("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    prompts = stages.add_parser("prompts", help="tokenise the prompts; needs all that Slipstream requires")
    prompts.add_argument("out", type=Path, help="folder to write")
    prompts.add_argument("--model", type=Path, required=True, help="the GGUF file, for its tokenizer")
    prompts.add_argument("--chat", type=Path, required=True, help="JSON lines with `task` and `messages`")
    prompts.add_argument("--mbpp", type=Path, required=True, help="JSON lines with `text`")
    prompts.add_argument("--held-out", type=Path, required=True, help="MT-bench, whose prompts are left out")
    helps = {
        "answers": "let the target answer the prompts",
        "train": "train a head on the answers",
        "all": f"answers, unless these are there, and {' and '.join(TRAINED)}, within one budget",
    }
    for name, text in helps.items():
        _add_stage(stages.add_parser(name, help=text), name)
    half = stages.add_parser("halve", help="copy a trained head with weights in 16 bits")
    half.add_argument("out", type=Path, help="folder of `train`")
    half.add_argument("--kind", choices=OPTIONS, required=True)
    half.add_argument("--to", type=Path, required=True, help="folder to write")
    return parser


def _add_stage(stage: argparse.ArgumentParser, name: str) -> None:
    stage.add_argument("out", type=Path, help="folder of `prompts`, to which the results are added")
    stage.add_argument(
        "--model", type=Path, nargs="+", required=True, help="the GGUF file, or its parts in order"
    )
    stage.add_argument("--minutes", type=float, required=True)
    stage.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    stage.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    if name != "train":
        stage.add_argument("--batch", type=int, help="answers at once: 96, or 1,024 on a GPU")
        stage.add_argument("--max-tokens", type=int, default=288, help="the most tokens of an answer")
        stage.add_argument("--part", type=int, default=0, help="this process answers part PART of PARTS")
        stage.add_argument("--parts", type=int, default=1)
    if name != "answers":
        stage.add_argument("--draft-vocab-size", type=int, default=8192)
        stage.add_argument("--init", help="a head of this kind to go on from")
        stage.add_argument("--batch-rows", type=int, help="rows of a training step: 1, or 64 on a GPU")
        stage.add_argument("--row-length", type=int, default=512)
        stage.add_argument("--optimizer", choices=OPTIMIZERS, default="muon")
        stage.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW's")
        stage.add_argument("--muon-learning-rate", type=float, default=0.01)
        stage.add_argument(
            "--cache-features", action="store_true", help="keep the target's features in OUT/features"
        )
    if name == "train":
        stage.add_argument("--kind", choices=OPTIONS, required=True)


def _prompts(options: argparse.Namespace) -> None:
    # The other stages also run where Slipstream's own requirements are not installed.
    from recipes.smollm2_head.prompts import write_prompts
    from slipstream.assets.workload.reading import read_workload
    from slipstream.models import load_tokenizer

    options.out.mkdir(parents=True, exist_ok=True)
    held_out = read_workload(f"spec-bench:{options.held_out}").questions
    tokenizer = load_tokenizer(str(options.model))
    write_prompts(options.chat, options.mbpp, held_out, tokenizer, options.out / "prompts.npz")
    tokenizer.save_pretrained(options.out / "target")


def _answers(options: argparse.Namespace) -> None:
    write_answers(
        Target(options.model, options.device, getattr(torch, options.dtype)),
        read_prompts(options.out / "prompts.npz"),
        options.out / f"answers{options.part}.jsonl",
        batch=options.batch or (96 if options.device == "cpu" else 1024),
        max_tokens=options.max_tokens,
        minutes=options.minutes,
        part=(options.part, options.parts),
    )


def _train(options: argparse.Namespace) -> None:
    unpack(options.model, options.out / "target")
    train_head(
        options.kind,
        options.out,
        options.minutes,
        device=options.device,
        options={
            "dtype": options.dtype,
            "batch_rows": options.batch_rows or (1 if options.device == "cpu" else 64),
            "row_length": options.row_length,
            "optimizer": options.optimizer,
            "learning_rate": options.learning_rate,
            "muon_learning_rate": options.muon_learning_rate,
            "cache_features": options.cache_features,
        },
        shape={"draft_vocab_size": options.draft_vocab_size, "init": options.init},
    )


def _halve(options: argparse.Namespace) -> None:
    num_bytes = halve(options.out / options.kind / options.kind, options.to)
    print(f"{num_bytes:,} bytes in {options.to}")


def _all(options: argparse.Namespace) -> None:
    """Half of the time for the answers, unless these are there, and the rest in like shares for the heads."""
    minutes = options.minutes
    if not any(options.out.glob("answers*.jsonl")):
        options.minutes = minutes / 2
        _answers(options)
        minutes /= 2
    for kind in TRAINED:
        options.kind, options.minutes = kind, minutes / len(TRAINED)
        _train(options)


if __name__ == "__main__":
    sys.exit(main())

"""Enlarge a checkpoint without changing what it computes.

python -m recipes.cost_expanded target SOURCE TARGET --parameters 300M
python -m recipes.cost_expanded head HEAD SOURCE EXPANDED OUTPUT
python -m recipes.cost_expanded encoder-decoder SOURCE TARGET --times-wider 6 --decoder-layers 12
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import transformers

from recipes.cost_expanded.encoder_decoder import Growth
from recipes.cost_expanded.encoder_decoder import expand as expand_encoder_decoder
from recipes.cost_expanded.head import expand_head
from recipes.cost_expanded.target import expand, parse_count
from slipstream.errors import SlipstreamError


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 when the checkpoint was written, 2 with one line on stderr when it was not."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    parser = Parser(prog="python -m recipes.cost_expanded", description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    target = kinds.add_parser("target", help="a Llama checkpoint")
    target.add_argument("source", help="folder of a Llama checkpoint")
    target.add_argument("target", help="folder to write")
    target.add_argument("--parameters", help="about how many, for example 300M or 1G")
    for name in ("hidden-size", "num-layers", "intermediate-size", "num-heads"):
        target.add_argument(f"--{name}", type=int)
    target.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    head = kinds.add_parser("head", help="an EAGLE, Medusa or Hydra head, to fit an enlarged target")
    head.add_argument("head", help="folder of the head")
    head.add_argument("target", metavar="source", help="folder of the target that it was trained for")
    head.add_argument("expanded", help="folder that `target` wrote for that target")
    head.add_argument("output", help="folder to write")
    both = kinds.add_parser("encoder-decoder", help="a T5 or Whisper checkpoint")
    both.add_argument("source", help="folder of a T5 or Whisper checkpoint")
    both.add_argument("target", help="folder to write")
    both.add_argument("--times-wider", type=int, default=1, help="hidden size and heads")
    both.add_argument("--decoder-layers", type=int)
    both.add_argument("--intermediate-size", type=int)
    options = vars(parser.parse_args(arguments))
    try:
        kind = options.pop("kind")
        if kind == "head":
            num_parameters = expand_head(**options)
        elif kind == "encoder-decoder":
            folders = options.pop("source"), options.pop("target")
            num_parameters = expand_encoder_decoder(*folders, Growth(**options))
        else:
            parameters = options.pop("parameters")
            options["target_parameters"] = parse_count(parameters) if parameters else None
            num_parameters = expand(options.pop("source"), options.pop("target"), **options)
    except (SlipstreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{num_parameters:,} parameters", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

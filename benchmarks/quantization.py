"""What types of weights and of the cache cost in quality: perplexity on held-out text.

    python -m benchmarks.quantization [MODEL ...] [--weights float32,int8] [--caches float32,int8]

Text: the messages of the bundled held-out prompts, as the chat template writes them, each as one sequence; and the same
behind one another in sequences of --packed tokens, where the cache is long. Every token is predicted through the
engine's own cache: keys and values are rounded when they are written, and rows attend to what was rounded. Writes
docs/benchmarks/quantization.json and the table beside it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept, say
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.errors import SlipstreamError
from slipstream.models import CausalLM, RowGroup, load_model, load_tokenizer
from slipstream.models.cpu.native import instructions
from slipstream.provenance import provenance
from slipstream.text.prompts import encode_chat

RESULT = Path(__file__).parent.parent / "docs/benchmarks/quantization.json"
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
"""How each is asked for."""
CACHES = ("float32", "bfloat16", "float16", "int8")
EXACT = ("float32", "float32")
"""What the others are compared with."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="checkpoint folders; the embedded target unless given")
    parser.add_argument("--prompts", type=int, default=350)
    parser.add_argument("--packed", type=int, default=1536, help="tokens of the longer sequences")
    parser.add_argument("--weights", type=names(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--caches", type=names(CACHES), default=list(CACHES))
    options = parser.parse_args()
    kept = Kept(RESULT, {"prompts": options.prompts, "packed": options.packed})
    pairs = [EXACT, *itertools.product(options.weights, options.caches)]
    try:
        rows = [
            kept.cell(
                f"{Path(path).name}, {weights}, {cache_type} cache",
                partial(measure, path, weights, cache_type, options.prompts, options.packed),
            )
            for path in options.models or [EMBEDDED_TARGET]
            for weights, cache_type in dict.fromkeys(pairs)
        ]
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {"provenance": {**provenance(), "instructions": instructions()}, "rows": rows}
    kept.finish(result)
    page = table(result)
    RESULT.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    return 0


def types(weights: str, cache_type: str) -> dict[str, Any]:
    """What `load_model` is asked for."""
    return {**WEIGHTS[weights], "kv_cache_dtype": cache_type}


def names(valid: Sequence[str] | dict[str, Any]) -> Any:
    """An argument's type: some of `valid`, with commas."""

    def read(text: str) -> list[str]:
        chosen = [word.strip() for word in text.split(",")]
        if wrong := [name for name in chosen if name not in valid]:
            raise argparse.ArgumentTypeError(f"unknown {wrong[0]!r}; there are {', '.join(valid)}")
        return chosen

    return read


def measure(path: str, weights: str, cache_type: str, num_prompts: int, packed: int) -> dict[str, Any]:
    """Perplexity of both kinds of sequences, and how many greedy choices are those of float32."""
    row: dict[str, Any] = {"model": Path(path).name, "weights": weights, "cache": cache_type}
    scores = scored(path, weights, cache_type, num_prompts, packed)
    exact = scored(path, *EXACT, num_prompts, packed)
    for kind, (loss, choices) in scores.items():
        exact_loss, exact_choices = exact[kind]
        row[kind] = {
            "tokens": len(choices),
            "perplexity": math.exp(loss / len(choices)),
            "ratio": math.exp((loss - exact_loss) / len(choices)),
            "argmax_equal": float((choices == exact_choices).float().mean()),
        }
    return row


@cache
def scored(
    path: str, weights: str, cache_type: str, num_prompts: int, packed: int
) -> dict[str, tuple[float, torch.Tensor]]:
    """Loss in nats and greedy choices, of single conversations and of packed ones."""
    lm = load_model(path, **types(weights, cache_type))
    tokenizer = load_tokenizer(path)
    texts = [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:num_prompts]]
    single = [text[: lm.context_length] for text in texts]
    return {
        "conversations": score(lm, single),
        "packed": score(lm, pack(texts, min(packed, lm.context_length))),
    }


def pack(texts: Sequence[list[int]], length: int) -> list[list[int]]:
    """All texts behind one another, cut into sequences of `length`; a rest of less than two tokens is left out."""
    tokens = list(itertools.chain.from_iterable(texts))
    pieces = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def score(lm: CausalLM, texts: Sequence[list[int]]) -> tuple[float, torch.Tensor]:
    """Negative log-likelihood in nats, summed over all tokens but the first of each text; and every row's argmax."""
    pool, slots = lm.trial_cache(max(len(text) for text in texts))
    total, choices = 0.0, []
    for number, text in enumerate(texts):
        if number % 50 == 0:
            say(f"  text {number} of {len(texts)}")
        logits = lm.forward([RowGroup(slots, 0, text, range(len(text) - 1))], pool).logits  # [n - 1, vocab]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum")
        total += float(loss)
        choices.append(logits.argmax(-1))
    return total, torch.cat(choices)


def table(result: dict[str, Any]) -> str:
    """The page of a result: one row a pair of types."""
    about = result["provenance"]
    lines = [
        "# What types of weights and of the cache cost in quality",
        "",
        "Written by `python -m benchmarks.quantization`; do not edit. Raw results:",
        "[quantization.json](quantization.json).",
        "",
        "Perplexity of the bundled held-out conversations, each alone and behind one another in long sequences, every",
        "token through the engine's own cache. *Ratio* is over float32 weights and cache; *same choice* is the share",
        "of positions whose most probable token is theirs.",
        "",
        f"{about['cpu']} ({about['instructions']}), {about['date']}, commit {(about['commit'] or 'unknown')[:12]}.",
        "",
        "| model | weights | cache | conversations | ratio | same choice | packed | ratio | same choice |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        figures = [
            figure
            for kind in ("conversations", "packed")
            for figure in (
                f"{row[kind]['perplexity']:.4f}",
                f"{row[kind]['ratio']:.5f}",
                f"{row[kind]['argmax_equal']:.2%}",
            )
        ]
        lines.append(f"| {' | '.join([row['model'], row['weights'], row['cache'], *figures])} |")
    first = result["rows"][0]
    counts = f"{first['conversations']['tokens']:,} and {first['packed']['tokens']:,}"
    return "\n".join([*lines, "", f"Predicted tokens: {counts}.", ""])


if __name__ == "__main__":
    sys.exit(main())

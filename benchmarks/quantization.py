"""What types of weights and of the cache cost in quality: perplexity and divergence on held-out text.

    python -m benchmarks.quantization [MODEL ...] [--weights float32,int8] [--caches float32,int8]

Text: the messages of bundled held-out prompts, as the chat template writes them, each as one sequence; and the same
behind one another in sequences of --packed tokens, where the cache is long. Every token is predicted through the
engine's own cache: keys and values are rounded when they are written, and rows attend to what was rounded. Weights that
are calibrated (`slipstream quantize`) are so on the prompts behind those that are scored, never on the same. Writes
docs/benchmarks/quantization.json, the table beside it and formats.svg, quality against the time of a pass.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.page import machine, table
from benchmarks.harness.pictures import drawing
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models import CausalLM, RowGroup, load_model, load_plain, load_tokenizer
from slipstream.models.cpu.native import instructions
from slipstream.text.prompts import encode_chat
from slipstream.tools.quantize.calibration import as_rows, read_texts, round_layers
from slipstream.tools.quantize.job import FORMATS, QuantizeOptions, quantise
from slipstream.tools.quantize.rounding import rounded

RESULT = DOCS / "quantization.json"
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    **{
        name: {"dtype": "float32", "quantization": name} for name in ("int8", "int4", "int4_g64", "int4_g128")
    },
}
"""How each is asked for."""
CALIBRATED = {f"{name} calibrated": name for name in ("int4", "int4_g64", "int4_g128")}
"""Formats of saved checkpoints, and what `slipstream quantize` is asked for."""
CACHES = ("float32", "bfloat16", "float16", "int8")
KINDS = ("conversations", "packed")
"""Texts alone, and behind one another."""
STORED = "bfloat16"
"""What checkpoints hold: kept so, nothing is rounded, and nothing lost."""
EXACT = ("float32", "float32")
"""What the others are compared with."""


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("models", nargs="*", help="checkpoint folders; the embedded target unless given")
    parser.add_argument("--prompts", type=int, default=175, help="that are scored; the rest is calibrated on")
    parser.add_argument("--packed", type=int, default=1536, help="tokens of the longer sequences")
    parser.add_argument("--weights", type=names([*WEIGHTS, *CALIBRATED]), default=[*WEIGHTS, *CALIBRATED])
    parser.add_argument("--caches", type=names(CACHES), default=list(CACHES))
    options = parser.parse_args()
    sizes = {"prompts": options.prompts, "packed": options.packed}
    kept = Kept(RESULT, sizes, instructions=instructions())
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
    kept.finish({"rows": rows}, page, draw)
    print(RESULT.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def types(weights: str, cache_type: str) -> dict[str, Any]:
    """What `load_model` is asked for."""
    return {**WEIGHTS[weights], "kv_cache_dtype": cache_type}


def measure(path: str, weights: str, cache_type: str, num_prompts: int, packed: int) -> dict[str, Any]:
    """Both kinds of sequences beside float32."""
    row: dict[str, Any] = {"model": Path(path).name, "weights": weights, "cache": cache_type}
    for kind, score in scored(path, weights, cache_type, num_prompts, packed).items():
        row[kind] = {
            "tokens": score.tokens,
            "perplexity": math.exp(score.loss / score.tokens),
            "ratio": math.exp((score.loss - score.exact_loss) / score.tokens),
            "kl": score.kl / score.tokens,
            "argmax_equal": score.num_equal / score.tokens,
        }
    return row


@dataclass
class Score:
    """Sums over the predicted tokens of all texts."""

    tokens: int = 0
    loss: float = 0.0
    """Negative log-likelihood in nats."""
    exact_loss: float = 0.0
    """The same of float32."""
    kl: float = 0.0
    """Divergence of the distributions from float32's, in nats."""
    num_equal: int = 0
    """Greedy choices that are float32's."""


@cache
def exact_model(path: str) -> CausalLM:
    return load_model(path, **types(*EXACT))


def scored(path: str, weights: str, cache_type: str, num_prompts: int, packed: int) -> dict[str, Score]:
    """Single conversations and packed ones."""
    exact = exact_model(path)
    with saved(path, weights, num_prompts) as (folder, asked):
        lm = load_model(folder, **asked, kv_cache_dtype=cache_type)
        tokenizer = load_tokenizer(path)
        texts = [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:num_prompts]]
        single = [text[: lm.context_length] for text in texts]
        return {
            "conversations": score(lm, exact, single),
            "packed": score(lm, exact, pack(texts, min(packed, lm.context_length))),
        }


@contextmanager
def saved(path: str, weights: str, num_scored: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The checkpoint of these weights and what `load_model` is asked for; a calibrated one lives for the body."""
    if weights not in CALIBRATED:
        yield path, WEIGHTS[weights]
        return
    others = sample_prompts()[num_scored:]
    if not others:
        raise SystemExit("nothing is left to calibrate on: give fewer --prompts")
    with TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"
        texts.write_text("".join(f"{json.dumps(row)}\n" for row in others), encoding="utf-8")
        out = Path(folder) / "checkpoint"
        options = QuantizeOptions(CALIBRATED[weights])
        try:
            quantise(path, out, options, texts, lambda done: None)
        except (
            ConfigError
        ):  # groups that do not divide a layer's inputs: no layout has them, but quality is quality
            save_numbers(path, out, options, texts)
            yield str(out), WEIGHTS["float32"]
        else:
            # The output layer in 8 bits, as it is where a checkpoint is rounded when it is loaded.
            yield str(out), {"quantization": "int8"}


def save_numbers(path: str, out: Path, options: QuantizeOptions, texts: Path) -> None:
    """A float32 checkpoint of the numbers that calibrated weights stand for; the last group of a row may be short."""
    bits, group = FORMATS[options.quantization]
    assert group is not None
    model = load_plain(path, dtype=torch.float32, attention="sdpa").eval().requires_grad_(False)
    rows = as_rows(load_tokenizer(path), read_texts(texts), options.num_texts, options.length, options.seed)
    for _ in round_layers(
        model, rows, lambda weight, seen: rounded(weight, seen, bits, group, torch.bfloat16)
    ):
        pass
    model.save_pretrained(out)


def pack(texts: Sequence[list[int]], length: int) -> list[list[int]]:
    """All texts behind one another, cut into sequences of `length`; a rest of less than two tokens is left out."""
    tokens = list(itertools.chain.from_iterable(texts))
    pieces = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def score(lm: CausalLM, exact: CausalLM, texts: Sequence[list[int]]) -> Score:
    """All tokens but the first of each text."""
    longest = max(len(text) for text in texts)
    caches = {id(side): side.trial_cache(longest) for side in (lm, exact)}

    def log_probs(side: CausalLM, text: list[int]) -> torch.Tensor:
        pool, slots = caches[id(side)]
        logits = side.forward(
            [RowGroup(slots, 0, text, range(len(text) - 1), owner=0)], pool
        ).logits  # [n - 1, vocab]
        return logits.log_softmax(-1)

    total = Score()
    for number, text in enumerate(texts):
        if number % 50 == 0:
            say(f"  text {number} of {len(texts)}")
        right, found = log_probs(exact, text), log_probs(lm, text)
        wanted = torch.tensor(text[1:])[:, None]
        total.tokens += len(text) - 1
        total.loss -= float(found.gather(1, wanted).sum())
        total.exact_loss -= float(right.gather(1, wanted).sum())
        total.kl += float((right.exp() * (right - found)).sum())
        total.num_equal += int((found.argmax(-1) == right.argmax(-1)).sum())
    return total


def _row(row: dict[str, Any]) -> list[str]:
    figures = [
        figure
        for kind in KINDS
        for figure in (
            f"{row[kind]['perplexity']:.4f}",
            f"{row[kind]['ratio']:.5f}",
            f"{row[kind]['kl']:.5f}",
            f"{row[kind]['argmax_equal']:.2%}",
        )
    ]
    return [row["model"], row["weights"], row["cache"], *figures]


def page(result: dict[str, Any]) -> str:
    """The page of a result: one row a pair of types."""
    about = result["provenance"]
    lines = [
        "# What types of weights and of the cache cost in quality",
        "",
        "Written by `python -m benchmarks.quantization`; do not edit. Raw results:",
        "[quantization.json](quantization.json).",
        "",
        "Perplexity of the bundled held-out conversations, each alone and behind one another in long sequences, every",
        "token through the engine's own cache. *Ratio* is over float32 weights and cache, *KL* the mean divergence",
        "from their distributions in nats, *same choice* the share of positions whose most probable token is theirs.",
        "Calibrated weights are `slipstream quantize`'s, made on prompts that are not scored. Where groups do not",
        "divide a layer's inputs, the numbers alone are scored, with rows that are not rounded.",
        "",
        f"{machine(about)}.",
        "",
        *table(
            (
                "model",
                "weights",
                "cache",
                *(f for kind in KINDS for f in (kind, "ratio", "KL", "same choice")),
            ),
            map(_row, result["rows"]),
        ),
    ]
    first = result["rows"][0]
    counts = f"{first['conversations']['tokens']:,} and {first['packed']['tokens']:,}"
    return "\n".join([*lines, "", f"Predicted tokens: {counts}.", ""])


class Point(NamedTuple):
    """One weight format in the picture."""

    name: str
    step_ms: float
    lost: float
    """Perplexity over float32's, in percent."""


def points(quality: dict[str, Any], speed: dict[str, Any]) -> list[Point]:
    """The formats that both results have, fastest first. A calibrated format's pass is that of the same format."""
    shortest = min(row["context"] for row in speed["rows"])
    times = {row["weights"]: row["step_ms"] for row in speed["rows"] if row["context"] == shortest}
    caches = {row["cache"] for row in quality["rows"]}
    shown = "float32" if "float32" in caches else min(caches)
    found = [
        Point(row["weights"], times[plain], 100 * (row["conversations"]["ratio"] - 1))
        for row in quality["rows"]
        if row["cache"] == shown and (plain := CALIBRATED.get(row["weights"], row["weights"])) in times
    ]
    if STORED in times and STORED not in {point.name for point in found}:
        found.append(Point(f"{STORED}, as stored", times[STORED], 0.0))
    return sorted(dict.fromkeys(found), key=lambda point: (point.step_ms, point.lost))


def draw(quality: dict[str, Any], beside: Path) -> None:
    """A point a format, down and left is better: formats.svg, where `benchmarks.step_cost --contexts` was measured."""
    costs = beside.with_name("context_cost.json")
    if not costs.is_file():
        return
    speed = json.loads(costs.read_text(encoding="utf-8"))
    with drawing(beside.with_name("formats.svg"), 6.4, 3.6) as figure:
        axes = figure.subplots()
        for name, step_ms, lost in points(quality, speed):
            axes.plot(step_ms, lost, "o", color="#1a7f37" if name in CALIBRATED else "#57606a")
            axes.annotate(name, (step_ms, lost), xytext=(6, 4), textcoords="offset points", fontsize=9)
        axes.set_xlabel(f"ms a token, one row ({speed['rows'][0]['model']})")
        axes.set_ylabel("perplexity over float32 (%)")
        axes.set_xlim(left=0)
        axes.margins(x=0.2, y=0.15)
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())

"""What whole passes in the native kernels gain over the layer-by-layer route, family by family.

    python -m benchmarks.families --threads 2 [--families llama,mixtral] [--weights bfloat16] [--rounds 5]

Each family that the fused decoder knows has a model of about 0.3 G parameters, of its own configuration and random
weights, made on the spot: once for the decoder, once for the Transformers model whose linear layers are packed. Passes
of one request behind 128 tokens take turns; a round is some passes of each. The ratio is taken round by round.

Keeps finished families; writes docs/benchmarks/families.json, its page families.md and the picture families.svg.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn
from transformers.initialization import no_init_weights

from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept
from benchmarks.harness.page import table
from benchmarks.harness.pictures import drawing
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, adapt
from slipstream.models.cpu.native import instructions
from slipstream.models.cpu.threads import operators
from slipstream.models.linear.formats import OF_DTYPE, WEIGHT_FORMATS
from slipstream.profiling.provenance import provenance

RESULT = DOCS / "families.json"
NUM_PARAMETERS = 300_000_000
CONTEXT, NUM_PASSES = 128, 4
ROW_COUNTS = (1, 8)
_SHAPE: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = {**_SHAPE, "head_dim": 64}
_WIDE: dict[str, Any] = {**_SHAPE, "intermediate_size": 4096}
"""Shape with an MLP without a gate."""
_NEOX: dict[str, Any] = {key: value for key, value in _WIDE.items() if key != "num_key_value_heads"}
_EXPERTS: dict[str, Any] = {**_HEADS, "intermediate_size": 704, "num_experts_per_tok": 2}
"""Eight, of which a row visits two."""

CONFIGURATIONS: dict[str, Callable[[int], Any]] = {
    "llama": lambda n: tf.LlamaConfig(**_SHAPE, num_hidden_layers=n),
    "mistral": lambda n: tf.MistralConfig(**_SHAPE, num_hidden_layers=n, sliding_window=512),
    "qwen2": lambda n: tf.Qwen2Config(**_SHAPE, num_hidden_layers=n),
    "qwen3": lambda n: tf.Qwen3Config(**_HEADS, num_hidden_layers=n),
    "gemma": lambda n: tf.GemmaConfig(**_HEADS, num_hidden_layers=n),
    "gemma2": lambda n: tf.Gemma2Config(**_HEADS, num_hidden_layers=n, sliding_window=512),
    "gemma3_text": lambda n: tf.Gemma3TextConfig(**_HEADS, num_hidden_layers=n, sliding_window=512),
    "phi3": lambda n: tf.Phi3Config(**_SHAPE, num_hidden_layers=n),
    "granite": lambda n: tf.GraniteConfig(**_SHAPE, num_hidden_layers=n),
    "olmo2": lambda n: tf.Olmo2Config(**_SHAPE, num_hidden_layers=n),
    "smollm3": lambda n: tf.SmolLM3Config(**_SHAPE, num_hidden_layers=n),
    "starcoder2": lambda n: tf.Starcoder2Config(**_WIDE, num_hidden_layers=n),
    "gpt_neox": lambda n: tf.GPTNeoXConfig(**_NEOX, num_hidden_layers=n),
    "mixtral": lambda n: tf.MixtralConfig(**_EXPERTS, num_hidden_layers=n, num_local_experts=8),
    "qwen3_moe": lambda n: tf.Qwen3MoeConfig(
        **_EXPERTS, num_hidden_layers=n, num_experts=8, moe_intermediate_size=704, norm_topk_prob=True
    ),
    "gpt_oss": lambda n: tf.GptOssConfig(**_EXPERTS, num_hidden_layers=n, num_local_experts=8),
}
"""By `model_type`, with so many layers."""


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--families", type=names(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--weights", choices=sorted(WEIGHT_FORMATS.names()), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--finish", action="store_true", help="write what is measured, without the others")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    settings = {"threads": options.threads, "weights": options.weights, "rounds": options.rounds}
    kept = Kept(RESULT, settings)
    for family in options.families:
        measured = partial(measure, family, options.weights, options.rounds, options.threads)
        row = kept.cell(family, measured)
        for line in _lines(row):
            print(line, flush=True)
    missing = [family for family in CONFIGURATIONS if not kept.has(family)]
    if missing and not options.finish:
        print(f"kept; still to measure: {', '.join(missing)}")
        return
    rows = [kept.get(family) for family in CONFIGURATIONS if kept.has(family)]
    about = {
        "context": CONTEXT,
        "passes_a_round": NUM_PASSES,
        "instructions": instructions(),
        "not_measured": missing,
        "load": round(os.getloadavg()[2], 1),
    }
    where = provenance(num_threads=options.threads)
    result = {"provenance": where, "settings": {**settings, **about}, "rows": rows}
    kept.finish(result, page, lambda written, file: draw(written["rows"], file))


def _lines(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['family']}, {cell['rows']} rows: whole {cell['whole_ms']:.2f} ms, layer by layer "
        f"{cell['layers_ms']:.2f} ms, {cell['ratio']:.2f} ({cell['quartiles'][0]:.2f} to {cell['quartiles'][1]:.2f})"
        for cell in row["passes"]
    ]


def measure(family: str, weights: str, num_rounds: int, num_threads: int) -> dict[str, Any]:
    """One family's cell: ms of a pass by both routes, and the median and quartiles of their ratio."""
    whole, layers = (loaded(family, weights, route) for route in ("native", "packed"))
    if (whole.kernels, layers.kernels) != ("decoder", "native"):
        raise SystemExit(f"error: {family} ran as {whole.kernels} and {layers.kernels}")
    whole.executor.num_threads = layers.num_threads = num_threads
    passes = [_cell(whole, layers, num_rows, num_rounds, num_threads) for num_rows in ROW_COUNTS]
    return {
        "family": family,
        "parameters": whole.num_parameters,
        "layers": whole.num_layers,
        "layer_by_layer": layers.kernels,
        "passes": passes,
    }


def _cell(
    whole: CausalLM, layers: CausalLM, num_rows: int, num_rounds: int, num_threads: int
) -> dict[str, Any]:
    runs = [_runner(lm, num_rows) for lm in (whole, layers)]
    with operators(num_threads):
        for run in runs:
            run()
        rounds = [_round(runs, number) for number in range(num_rounds)]
    ratios = sorted(of_layers / of_whole for of_whole, of_layers in rounds)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "rows": num_rows,
        "whole_ms": 1e3 * statistics.median(times[0] for times in rounds),
        "layers_ms": 1e3 * statistics.median(times[1] for times in rounds),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
    }


def _runner(lm: CausalLM, num_rows: int) -> Callable[[], None]:
    """A pass of one request whose entries are there already."""
    pool = KVPool(lm.shapes, CONTEXT + num_rows, lm.dtype, lm.device)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    text = [(7919 * i + 11) % lm.vocab_size for i in range(num_rows)]
    rows = RowGroup(range(pool.num_slots), CONTEXT, text, range(num_rows))

    def run() -> None:
        lm.forward([rows], pool).logits.argmax(-1).tolist()

    return run


def _round(runs: Sequence[Callable[[], None]], number: int) -> tuple[float, float]:
    """Seconds a pass of each, in an order that changes from round to round."""
    taken_s = [0.0, 0.0]
    for turn in range(NUM_PASSES):
        for which in (0, 1) if (number + turn) % 2 else (1, 0):
            started_s = time.perf_counter()
            runs[which]()
            taken_s[which] += time.perf_counter() - started_s
    return taken_s[0] / NUM_PASSES, taken_s[1] / NUM_PASSES


def loaded(family: str, weights: str, route: str) -> CausalLM:
    """The family's model by one route: `native` for whole passes, `packed` for layer by layer."""
    with no_init_weights():
        model: Any = tf.AutoModelForCausalLM.from_config(
            CONFIGURATIONS[family](_num_layers(family)), attn_implementation="slipstream", dtype=torch.float32
        )
    _fill(model)
    kind = next((dtype for dtype, name in OF_DTYPE.items() if name == weights), None)
    return adapt(
        model.eval(),
        canary=False,
        quantization=None if kind == torch.float32 else weights,
        attention_backend=route,
    )


def _fill(model: nn.Module) -> None:
    """Numbers of about the usual size: one piece of random ones over and over, which is quickly done."""
    piece = torch.empty(1_000_003).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.5)  # of norms, biases and sinks
                continue
            flat = parameter.view(-1)
            for begin in range(0, len(flat), len(piece)):
                flat[begin : begin + len(piece)] = piece[: len(flat) - begin]


def _num_layers(family: str) -> int:
    """As many as make about `NUM_PARAMETERS`."""
    with torch.device("meta"):
        counts = [
            sum(
                each.numel()
                for each in tf.AutoModelForCausalLM.from_config(CONFIGURATIONS[family](n)).parameters()
            )
            for n in (2, 4)
        ]
    each = (counts[1] - counts[0]) / 2
    return max(round((NUM_PARAMETERS - counts[0]) / each) + 2, 2)


def page(result: dict[str, Any]) -> str:
    """The Markdown page."""
    about, settings = result["provenance"], result["settings"]
    heads = [f"{rows} row{'s' * (rows > 1)}" for rows in ROW_COUNTS]
    columns = [title for head in heads for title in (f"{head}: whole, ms", "layers, ms", "times as fast")]
    lines = [
        "# Whole passes against layer by layer",
        "",
        "Written by `python -m benchmarks.families`; do not edit. Raw results: [families.json](families.json).",
        "",
        "Each family that the native kernels compute in whole passes, at about 0.3 G parameters of random weights.",
        "Layer by layer its linear layers are packed in the same weight format, and the rest is Transformers' code;",
        "experts are PyTorch's there, in float32. Passes of one request behind "
        f"{settings['context']} tokens, in turns; the",
        f"ratio is the median of {settings['rounds']} rounds, its quartiles behind it.",
        "",
        f"{settings['weights']} weights, {settings['threads']} threads, {about['cpu']} ({settings['instructions']}), "
        f"{about['date']}, commit {(about['commit'] or 'unknown')[:12]}.",
        "",
        f"The load over the last quarter of an hour was {settings['load']}. Where that is above the number of",
        "threads, other work ran beside it. That hurts the route of many small operations more, and the ratios are too",
        "large.",
        "",
        "![Times as fast as layer by layer](families.svg)",
        "",
        *table(["family", *columns], map(_row, result["rows"])),
    ]
    if settings["not_measured"]:
        lines += ["", f"Not measured: {', '.join(settings['not_measured'])}."]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> list[str]:
    cells = [
        f"{cell['whole_ms']:.1f} | {cell['layers_ms']:.1f} | {cell['ratio']:.2f} "
        f"({cell['quartiles'][0]:.2f} to {cell['quartiles'][1]:.2f})"
        for cell in row["passes"]
    ]
    return [f"`{row['family']}`", *cells]


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """A bar a family and number of rows: how many times faster whole passes are."""
    with drawing(file, 6.4, 0.34 * len(rows) + 1.2) as figure:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            for shift, colour, cell in zip((-0.2, 0.2), ("#0969da", "#8c959f"), row["passes"], strict=True):
                low, high = cell["quartiles"]
                spread = [[max(cell["ratio"] - low, 0.0)], [max(high - cell["ratio"], 0.0)]]
                axes.barh(
                    place + shift, cell["ratio"], height=0.38, color=colour, xerr=spread, ecolor="#24292f"
                )
        for colour, num_rows in zip(("#0969da", "#8c959f"), ROW_COUNTS, strict=True):
            axes.barh(0, 0, color=colour, label=f"{num_rows} row{'s' * (num_rows > 1)}")
        axes.set_yticks(range(len(rows)), [row["family"] for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="#24292f", linewidth=0.8)
        axes.set_xlabel("times as fast as layer by layer")
        axes.legend(loc="lower right")


if __name__ == "__main__":
    main()

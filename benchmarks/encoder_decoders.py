r"""What a draft gains on encoder-decoders: whole requests with it and without, on trained pairs at the cost of larger.

    python -m recipes.encoder_decoder_pair --out PAIRS
    python -m benchmarks.encoder_decoders --pairs PAIRS

The trained T5 and Whisper are enlarged without changing their function (`recipes.cost_expanded.encoder_decoder`) by
default to the width, layers and heads' width of the decoders of T5 base and Whisper small; the drafts stay as they are.
A prompt is answered without speculation and with the draft, one right after the other, which of them first in turn,
greedily and with nothing kept of earlier requests, so that both encoders run each time. Texts must be the same, and
the same as the small target's by Transformers' `generate`. What is measured is kept when a run is stopped. Writes
docs/benchmarks/encoder_decoders.json and the page encoder_decoders.md; exit code 1 where texts differ or no draft token
was accepted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    WhisperFeatureExtractor,
)

from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.page import machine as where
from benchmarks.harness.page import table, wrapped
from benchmarks.harness.rounds import median, turns
from benchmarks.peers import machine
from recipes.cost_expanded.encoder_decoder import Growth, expand
from recipes.encoder_decoder_pair.train import TASKS
from slipstream import LLM, SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.models.cpu.native import instructions

RESULT = DOCS / "encoder_decoders.json"
BAR = 1.5
OFF, DRAFT = "off", "draft"
HEAD = (
    *("family", "weights of a pass", "tokens", "off", "with the draft", "times as fast", "95 %"),
    *("tokens a pass", "drafting", "same text", "as Transformers", "right"),
)


def enlarged(source: Path, growth: Growth) -> Path:
    """The enlarged target in the folder of its source, made if it is not there yet."""
    sizes = growth.times_wider, growth.decoder_layers, growth.intermediate_size
    folder = source.with_name("-".join(map(str, (source.name, *sizes))))
    if not (folder / "config.json").is_file():
        partly = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partly, ignore_errors=True)  # of a run that was stopped
        expand(source, partly, growth)
        partly.rename(folder)
    return folder


class Stock:
    """Transformers' own model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._hears: Any = None
        auto: Any = AutoModelForSeq2SeqLM
        if config.model_type == "whisper":
            self._hears, auto = WhisperFeatureExtractor.from_pretrained(folder), AutoModelForSpeechSeq2Seq
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def text(self, prompt: Any, max_tokens: int) -> str:
        """The greedy answer."""
        options = {"max_new_tokens": max_tokens, "do_sample": False, "num_beams": 1}
        if self._hears is None:  # its cache takes the encoder's number of layers for the decoder's
            given, options["use_cache"] = self._tokenizer(prompt, return_tensors="pt").input_ids, False
        else:
            samples, rate = prompt["audio"]
            given = self._hears(samples, sampling_rate=rate, return_tensors="pt").input_features
        made = self._model.generate(given, **options)[0]
        return str(self._tokenizer.decode(made, skip_special_tokens=True)).strip()


def loaded(target: Path, draft: Path, options: argparse.Namespace) -> dict[str, LLM]:
    """An engine for each way."""
    speculative = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": options.depth,
    }
    sizes: dict[str, Any] = {"max_num_seqs": 1, "quantization": options.quantization}
    return {
        OFF: LLM(str(target), **sizes),
        DRAFT: LLM(str(target), speculative_config=speculative, **sizes),
    }


def answered(llm: LLM, prompt: Any, max_tokens: int) -> dict[str, Any]:
    """One request with nothing left of earlier ones: its tokens, its seconds and what was accepted."""
    llm.reset_caches()
    started_s = time.perf_counter()
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - started_s
    found = output.metrics
    return {
        "seconds": seconds,
        "first_token_s": found.time_to_first_token_s,
        "draft_s": found.draft_s,
        "verify_s": found.verify_s,
        "num_tokens": found.num_output_tokens,
        "num_steps": found.num_steps,
        "num_accepted": found.num_accepted_tokens,
        "token_ids": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
    }


def measured(family: str, options: argparse.Namespace, kept: Kept) -> dict[str, Any]:
    """Everything of one family."""
    folder = options.pairs / family
    source = folder / "target"
    times, rest = divmod(options.hidden_size, AutoConfig.from_pretrained(source).d_model)
    if rest or not times:
        raise SystemExit(f"--hidden-size {options.hidden_size} is no multiple of the width of {source}")
    target = enlarged(source, Growth(times, options.decoder_layers, options.intermediate_size))
    stock = Stock(folder / "target")
    held_out = TASKS[family]().held_out(options.prompts)
    cells = [f"{family}, prompt {number + 1}" for number in range(len(held_out))]
    sizes = kept.get(f"{family}, sizes") if kept.has(f"{family}, sizes") else None
    if sizes is None or not all(map(kept.has, cells)):
        engines = loaded(target, folder / "draft", options)
        model: Any = engines[OFF].engine.runner.model
        reads = model.executor.reads
        sizes = kept.put(
            f"{family}, sizes", {"decoder_parameters": reads.number, "pass_bytes": reads.num_bytes}
        )
        for llm in engines.values():
            answered(llm, held_out[0][0], options.max_tokens)  # warms up
    pairs: list[dict[str, Any]] = []
    for turn, (cell, (prompt, text)) in enumerate(zip(cells, held_out, strict=True)):
        if not kept.has(cell):
            rows = {
                name: answered(engines[name], prompt, options.max_tokens)
                for name in turns((OFF, DRAFT), turn)
            }
            kept.put(cell, {**rows, "stock": stock.text(prompt, options.max_tokens), "right": text})
        pairs.append(kept.get(cell))
        say(f"{cell} of {len(held_out)}: {_ratio(pairs[-1]):.2f} times as fast")
    return {**sizes, "num_target_layers": options.decoder_layers, **summary(pairs), "pairs": pairs}


def _ratio(pair: dict[str, Any]) -> float:
    return float(pair[OFF]["seconds"] / pair[DRAFT]["seconds"])


def summary(pairs: Seq[dict[str, Any]]) -> dict[str, Any]:
    """What the pairs of one family come to."""
    drafted = [pair[DRAFT] for pair in pairs]
    steps = sum(each["num_steps"] for each in drafted)
    return {
        "speedup": median([_ratio(pair) for pair in pairs]),
        "off_s": statistics.median(pair[OFF]["seconds"] for pair in pairs),
        "drafted_s": statistics.median(each["seconds"] for each in drafted),
        "first_token_s": statistics.median(pair[OFF]["first_token_s"] for pair in pairs),
        "draft_share": sum(each["draft_s"] for each in drafted) / sum(each["seconds"] for each in drafted),
        "num_tokens": sum(each["num_tokens"] for each in drafted),
        "tau": sum(each["num_tokens"] for each in drafted) / steps,
        "num_accepted": sum(each["num_accepted"] for each in drafted),
        "num_pairs": len(pairs),
        "num_identical": sum(pair[OFF]["token_ids"] == pair[DRAFT]["token_ids"] for pair in pairs),
        "num_as_transformers": sum(pair[OFF]["text"].strip() == pair["stock"] for pair in pairs),
        "num_right": sum(pair[OFF]["text"].strip() == pair["right"] for pair in pairs),
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What must not be, in words."""
    found = []
    for family, row in result["families"].items():
        if row["num_identical"] != row["num_pairs"]:
            found.append(f"{family}: {row['num_pairs'] - row['num_identical']} texts differ with the draft")
        if row["num_as_transformers"] != row["num_pairs"]:
            found.append(
                f"{family}: {row['num_pairs'] - row['num_as_transformers']} differ from Transformers'"
            )
        if not row["num_accepted"]:
            found.append(f"{family}: no draft token was accepted")
    return found


def page(result: dict[str, Any], raw: Path) -> str:
    """The page, in Markdown."""
    origin, settings = result["provenance"], result["settings"]
    said = [
        f"{name} {'met' if row['speedup']['median'] >= BAR else '**missed**'}"
        for name, row in result["families"].items()
    ]
    text = f"""# Drafts of encoder-decoders

Written by `python -m benchmarks.encoder_decoders`; do not edit. Raw results: [{raw.name}]({raw.name}).

Pairs trained by `recipes.encoder_decoder_pair`: a T5 that writes records out in sentences, and a Whisper that names \
the tones that it hears. These are simple tasks, on which a small draft is right more often than on texts of people. \
The targets are [cost-expanded](../guides/cost-expanded-models.md): they compute what they were trained to, at the \
cost of {settings["decoder_layers"]} decoder layers of width {settings["hidden_size"]}. The encoders keep their \
number of layers. The drafts are not expanded.

Whole requests, the encoder included, one at a time and greedy, up to {settings["depth"]} draft tokens a pass, \
weights in {settings["quantization"] or "float32"}. Each prompt is answered without and with the draft, one right \
after the other, which first in turn. *Times as fast* is the median of these pairs' ratios with its interval by \
bootstrap, *drafting* the draft's share of the time. *As Transformers* compares with the unexpanded target's text by \
Transformers' `generate`, *right* with the reference text. Other programs used {origin["cores_in_use_before"]:.2f} \
cores as it began{": the machine was loaded, and seconds are not those of a quiet one" if origin["is_loaded"] else ""}.

{where(origin)}.

The bar, {BAR} times as fast with all texts equal: {", ".join(said)}.
"""
    lines = [*faults(result), ""] if faults(result) else []
    if "note" in result:  # of a result that was put together by hand
        lines += [wrapped(result["note"]), ""]
    return (
        wrapped(text) + "\n" + "\n".join([*lines, *table(HEAD, map(_row, result["families"].items()))]) + "\n"
    )


def _row(named: tuple[str, dict[str, Any]]) -> list[object]:
    family, row = named
    speedup, of_all = row["speedup"], f"of {row['num_pairs']}"
    return [
        family,
        f"{row['decoder_parameters'] / 1e6:.0f} M",
        row["num_tokens"],
        f"{row['off_s']:.2f} s",
        f"{row['drafted_s']:.2f} s",
        f"{speedup['median']:.2f}",
        f"{speedup['low']:.2f} to {speedup['high']:.2f}",
        f"{row['tau']:.2f}",
        f"{row['draft_share']:.0%}",
        f"{row['num_identical']} {of_all}",
        f"{row['num_as_transformers']} {of_all}",
        f"{row['num_right']} {of_all}",
    ]


def arguments(given: Seq[str] | None) -> argparse.Namespace:
    parser = command(__doc__, RESULT)
    parser.add_argument(
        "--pairs", type=Path, required=True, help="what recipes.encoder_decoder_pair has written"
    )
    parser.add_argument("--families", type=names(TASKS), default=list(TASKS), help="with a comma")
    parser.add_argument("--prompts", type=int, default=12, help="of each family, a pair of runs each")
    parser.add_argument("--depth", type=int, default=5, help="draft tokens a pass at most")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--hidden-size", type=int, default=768, help="a multiple of the trained target's")
    parser.add_argument("--decoder-layers", type=int, default=12)
    parser.add_argument("--intermediate-size", type=int, default=3072)
    parser.add_argument("--quantization", help="of the target: int8, int4; float32 without it")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(given)


def main(given: Seq[str] | None = None) -> int:
    options = arguments(given)
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "pairs")}
    share = machine.others_share()
    loaded_before: dict[str, Any] = {
        "cores_in_use_before": round(share, 3),
        "is_loaded": share > machine.BUSY_SHARE,
    }
    kept = Kept(
        options.output, settings, threads=options.threads, instructions=instructions(), **loaded_before
    )
    try:
        families = {family: measured(family, options, kept) for family in options.families}
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {"settings": settings, "bar": BAR, "families": families}
    kept.finish(result, partial(page, raw=options.output))
    for family, row in families.items():
        print(f"{family}: {row['speedup']['median']:.2f} times as fast, {row['tau']:.2f} tokens a pass")
    for fault in (found := faults(result)):
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

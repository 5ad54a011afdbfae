"""Our own heads, exported for llama.cpp and run by the wheels of `xllamacpp`: are as many draft tokens accepted?

    python -m benchmarks.export_heads --xllamacpp-python VENV/bin/python --questions mt_bench.jsonl --trained OUT

SmolLM2's EAGLE-3 head drafts for the weights of its GGUF file, as they are (Q4_1) and widened to float32; `--questions`
is MT-bench's file of questions, of which two a category are asked. Block drafters draft for the embedded target: those
that `slipstream train dflash --output OUT/dflash` and `… dspark --output OUT/dspark` wrote. Greedy, one request at a
time, a chain; what is compared is what `benchmarks.export_engines` compares. Writes docs/benchmarks/export_heads.json,
which is part of that program's page. A run that is stopped goes on when it is called again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.export_engines import (
    NUM_TOKENS,
    RESULT,
    Answers,
    Request,
    alone,
    answered,
    answers_in,
    asked,
    compared,
    ours,
    theirs,
)
from benchmarks.export_page import HEADS_RESULT, write_page
from benchmarks.harness.command import command
from benchmarks.harness.kept import Kept
from benchmarks.real_models import encoded, questions
from recipes.real_models import SMOLLM2, fetch
from recipes.smollm2_head.heads import unpack
from slipstream.assets import EMBEDDED_TARGET
from slipstream.assets.embedded import SMOLLM2_DRAFTERS
from slipstream.draft.methods import DFLASH, EAGLE3
from slipstream.models import load_tokenizer
from slipstream.tools.export import SpeculativeRecord
from slipstream.tools.export.contract import ExportedSetting
from slipstream.train.block_options import DSPARK

PER_CATEGORY = 2


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--xllamacpp-python", required=True, help="Python of an environment with xllamacpp")
    parser.add_argument("--questions", type=Path, required=True, help="MT-bench's questions")
    parser.add_argument("--trained", type=Path, help="a folder with a training run's output a block drafter")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--only", default="", help="cells whose name contains this; others stay as they were")
    options = parser.parse_args()
    kept = Kept(HEADS_RESULT, vars(options))
    kept.origin["command"] = "python -m benchmarks.export_heads"
    before = {}
    if options.only and HEADS_RESULT.exists():
        before = {cell["name"]: cell for cell in json.loads(HEADS_RESULT.read_text())["cells"]}
    with tempfile.TemporaryDirectory() as scratch:
        for name, record, request in cases(options, Path(scratch)):
            if options.only in name:
                found = kept.cell(name, partial(measured, name, record, request, options))
                before[name] = {**found, "commit": kept.origin["commit"]}
    cells = list(before.values())
    for cell in cells:
        print(json.dumps(cell), flush=True)
    kept.finish({"max_tokens": options.max_tokens, "depth": NUM_TOKENS, "cells": cells})
    write_page(RESULT)


def cases(
    options: argparse.Namespace, scratch: Path
) -> Iterator[tuple[str, SpeculativeRecord, partial[Request]]]:
    """What is called how: the setting, and what makes its request."""
    file = fetch(SMOLLM2)
    texts = [text for _, text in questions(options.questions, PER_CATEGORY)]
    head = SMOLLM2_DRAFTERS[EAGLE3.name]
    wide = widened(file, scratch / "smollm2")
    for name, target in (("SmolLM2, float32", wide), ("SmolLM2, Q4_1", str(file))):
        record = SpeculativeRecord(method=EAGLE3.name, target=target, model=head, depth=NUM_TOKENS)
        yield f"{name}, EAGLE-3", record, partial(of_questions, target, file, texts, options.max_tokens)
    for kind, name in ((DFLASH.name, "DFlash"), (DSPARK, "DSpark")):
        if options.trained is not None and (folder := options.trained / kind / kind).is_dir():
            record = SpeculativeRecord(
                method=DFLASH.name, target=EMBEDDED_TARGET, model=str(folder), depth=NUM_TOKENS
            )
            yield f"embedded target, {name}", record, partial(asked, 28, options.max_tokens)


def widened(file: Path, folder: Path) -> str:
    """The file's weights in float32, as a folder with its tokenizer."""
    unpack([file], folder)
    for weights in folder.glob("*.safetensors"):
        wide = {name: tensor.float() for name, tensor in load_file(weights).items()}
        save_file(wide, weights, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    load_tokenizer(str(file)).save_pretrained(folder)
    return str(folder)


def of_questions(target: str, file: Path, texts: list[str], max_tokens: int) -> Request:
    return answered(alone(target), encoded(file, texts), max_tokens)


def measured(
    name: str, record: SpeculativeRecord, make: partial[Request], options: argparse.Namespace
) -> dict[str, Any]:
    """Raises RuntimeError where llama.cpp does not run it."""
    request = make()
    there = theirs("llama-cpp", options.xllamacpp_python, xllamacpp, record, request)
    if "answers" not in there:
        raise RuntimeError(f"{name}: {there}")
    here = ours(record, request, [num for _, num, _ in there["answers"]])
    found = compared(here, there, request, record.target or EMBEDDED_TARGET)
    return {"name": name, "num_prompts": len(request["prompts"]), **found}


def xllamacpp(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    return answers_in(python, "xllamacpp", {"argv": list(setting.argv[1:]), **request})


if __name__ == "__main__":
    main()

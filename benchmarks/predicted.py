"""What a prediction gains: edits by program of code and prose, on a target of 0.3 G parameters in int8.

    python -m benchmarks.predicted             # 6 texts, 4 kinds of prediction, a few minutes
    python -m benchmarks.predicted --texts 2 --rounds 1

The embedded model is too small to edit, so its logits are raised at the tokens of a given text: that is the answer, at
the cost of real passes (a cost-expanded copy, made once in `--folder`). The prediction is this text with a share of its
words replaced, left out or put in, one by one or in runs of up to six, or a wholly different text. Speculation is
otherwise off. Each answer is made with and without its prediction in turn; times are of the decoding alone, and the
tokens must be equal.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept, say
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.types import Verdict
from slipstream.profiling.provenance import provenance
from slipstream.verify.base import Judgement
from slipstream.verify.coupled import CoupledVerifier
from slipstream.verify.registry import VERIFIERS

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs/benchmarks/predicted.json"
TEXTS = {
    "code": [
        "src/slipstream/draft/lookup/suffix.py",
        "src/slipstream/kv/slots.py",
        "src/slipstream/text/jsonl.py",
    ],
    "prose": ["docs/concepts/exactness.md", "docs/guides/control.md", "docs/guides/plan.md"],
}
NUM_TOKENS = 300
PROMPT = [2, 100, 200]
RAISED = 1e4
KINDS = {
    "as it is": (0.0, 1),
    "3 % in runs": (0.03, 6),
    "3 % one by one": (0.03, 1),
    "15 % in runs": (0.15, 6),
    "15 % one by one": (0.15, 1),
    "all wrong": (1.0, 1),
}
"""Share of the words that are edited, and the longest run."""


class ScriptedVerifier(CoupledVerifier):
    """Raises the logits of a given text, so that it becomes the answer."""

    name = "scripted"
    script: Seq[int] = ()

    @torch.inference_mode()
    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        for judgement in judgements:
            first = judgement.noise.root_position - len(PROMPT)
            for row, depth in enumerate((0, *judgement.proposal.depths)):
                if first + depth < len(self.script):
                    judgement.log_probs[row, self.script[first + depth]] += RAISED
        return super().verify(judgements)


def words_of(text: str) -> list[str]:
    return re.findall(r"\s*(?:\w+|[^\w\s])|\s+$", text)


def edited(text: str, other: str, share: float, longest: int, seed: int) -> str:
    """`text` with a share of its words replaced, left out or put in, in runs of up to `longest`; `other` for all."""
    if share == 1:
        return other
    rng = random.Random(seed)
    words, vocabulary = words_of(text), words_of(text)
    left = round(share * len(words))
    while left > 0:
        num = rng.randint(1, min(left, longest))
        left -= num
        at = rng.randrange(len(words) - num)
        new = [rng.choice(vocabulary) for _ in range(num)]
        kind = rng.randrange(3)
        words[at : at + (0 if kind == 0 else num)] = [] if kind == 1 else new
    return "".join(words)


def decoding_s(llm: LLM, prediction: str | None) -> tuple[float, Any]:
    """Seconds from the first token to the last, and the output."""
    params = SamplingParams(temperature=0, max_tokens=len(ScriptedVerifier.script), ignore_eos=True)
    [output] = llm.generate([PROMPT], params, prediction=prediction)
    assert output.outputs[0].token_ids == list(ScriptedVerifier.script)
    return output.metrics.total_s - output.metrics.time_to_first_token_s, output


def measure(llm: LLM, text: str, prediction: str, rounds: int) -> dict[str, Any]:
    """One prediction against none, in pairs."""
    ScriptedVerifier.script = llm.get_tokenizer()(text, add_special_tokens=False).input_ids[:NUM_TOKENS]
    ratios, metrics = [], None
    for number in range(rounds + 1):
        order = [None, prediction] if number % 2 else [prediction, None]
        times: dict[str | None, float] = {}
        for one in order:
            times[one], output = decoding_s(llm, one)
            metrics = output.metrics if one is not None else metrics
        if number:  # the first pair warms up
            ratios.append(times[None] / times[prediction])
    assert metrics is not None
    return {
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "num_steps": metrics.num_steps,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "accepted_prediction_tokens": metrics.num_accepted_prediction_tokens,
        "rejected_prediction_tokens": metrics.num_rejected_prediction_tokens,
    }


def expanded(folder: Path) -> Path:
    """The target of 0.3 G parameters, made if need be."""
    target = folder / "300M"
    if not target.exists():
        say(f"making the cost-expanded target in {target} …")
        command = [sys.executable, "-m", "slipstream.testing.expand", str(EMBEDDED_TARGET), str(target)]
        subprocess.run([*command, "--parameters", "300M"], check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/control"), help="for the cost-expanded target"
    )
    parser.add_argument("--texts", type=int, default=3, help="texts of each sort")
    parser.add_argument("--rounds", type=int, default=3, help="timed pairs of each prediction")
    options = parser.parse_args()
    VERIFIERS.register("scripted", ScriptedVerifier)
    llm = LLM(
        str(expanded(options.folder)),
        speculative_config={"method": "off", "verifier": "scripted"},
        quantization="int8",
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    kept = Kept(RESULT, {name: value for name, value in vars(options).items() if name != "folder"})
    tokenizer = llm.get_tokenizer()
    texts: list[tuple[str, str, str]] = []
    for sort, paths in TEXTS.items():
        for path in paths[: options.texts]:
            whole = (ROOT / path).read_text()
            half = whole[len(whole) // 3 :]
            begun = half[half.index("\n\n") + 2 :]
            ids = tokenizer(begun[: 8 * NUM_TOKENS], add_special_tokens=False).input_ids[:NUM_TOKENS]
            texts.append((sort, path, tokenizer.decode(ids)))
    cells = []
    started_s = time.monotonic()
    for number, (sort, path, text) in enumerate(texts):
        other = texts[(number + len(texts) // 2) % len(texts)][2]
        for kind, (share, longest) in KINDS.items():
            prediction = edited(text, other, share, longest, seed=number)
            found = kept.cell(f"{path}, {kind}", partial(measure, llm, text, prediction, options.rounds))
            cells.append({"sort": sort, "text": path, "prediction": kind, **found})
            say(
                f"  {found['speedup']:.2f} in {found['num_steps']} steps, {time.monotonic() - started_s:.0f} s"
            )
    summary = {
        f"{sort}, {kind}": statistics.mean(
            cell["speedup"] for cell in cells if (cell["sort"], cell["prediction"]) == (sort, kind)
        )
        for sort in TEXTS
        for kind in KINDS
    }
    kept.finish({"provenance": provenance(), "summary": summary, "cells": cells})
    for name, speedup in summary.items():
        print(f"{name}: {speedup:.2f} times off")


if __name__ == "__main__":
    main()

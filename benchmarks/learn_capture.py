"""What keeping records of served answers costs: the same prompts with and without it, in turns.

`python benchmarks/learn_capture.py [--rounds 9] [--model FOLDER --draft FOLDER]` prints progress and, at the end, one
JSON object; `--output FILE` keeps it. A round answers all prompts once with capture and once without, in an order that
changes from round to round; the ratio of a round is that of its two times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.learn.capture import MAX_SHARE, Capture
from slipstream.learn.disk_ring import DiskRing
from slipstream.learn.folder import LearnFolder
from slipstream.learn.identity import identity_of
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat


def answer_all(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, at_once: int
) -> tuple[float, list[Any]]:
    """(seconds, token ids) of answering all prompts, `at_once` at a time."""
    tokens: list[Any] = []
    began_s = time.perf_counter()
    for first in range(0, len(prompts), at_once):
        outputs = llm.generate(prompts[first : first + at_once], params, use_tqdm=False)
        tokens += [list(one.outputs[0].token_ids) for one in outputs]
    return time.perf_counter() - began_s, tokens


def measure(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, at_once: int, rounds: int, share: float | None
) -> dict[str, Any]:
    """The figures of one load; `share` is `Capture`'s `max_share`."""
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        folder = LearnFolder(Path(place) / "learn")
        ring = DiskRing(folder, identity_of(llm.engine))
        capture = Capture(ring, max_share=share)
        num_steps = 0

        def observe(items: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            capture.observe(items)

        llm.engine.on_checked = observe
        while share is not None and not capture.facts().num_skipped:  # what was saved up is used first
            answer_all(llm, prompts, params, at_once)
            capture.flush(60)
        for number in range(rounds + 1):
            times: dict[bool, float] = {}
            texts: dict[bool, Any] = {}
            for on in (True, False) if number % 2 else (False, True):
                llm.engine.on_checked = observe if on else None
                llm.reset_caches()
                times[on], texts[on] = answer_all(llm, prompts, params, at_once)
                capture.flush(60)
            assert texts[True] == texts[False], "capture changed a text"
            if number:  # the first round warms up
                ratios.append(times[True] / times[False])
                print(f"{at_once} at once, round {number}: {ratios[-1]:.4f}", flush=True)
        llm.engine.on_checked = None
        facts, full = capture.facts(), ring.facts()
        num_tokens = sum(len(one.token_ids) for one in ring.read())
        capture.close()
        ring.close()
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "at_once": at_once,
        "max_share": share,
        "rounds": rounds,
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "engine_thread_us_per_step": round(1e6 * facts.capture_s / num_steps, 1),
        "own_thread_us_per_step": round(1e6 * facts.reduce_s / num_steps, 1),
        "num_records": facts.num_records,
        "skipped": dict(facts.num_skipped),
        "bytes_per_token": round(full.num_bytes / max(num_tokens, 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    llm = LLM(
        given.model,
        speculative_config={"method": "draft_model", "model": given.draft},
        kv_cache_bytes=256 * 2**20,
    )
    prompts = [
        encode_chat(llm.engine.tokenizer, row["messages"]) for row in sample_prompts()[: given.prompts]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens)
    result = {
        "provenance": provenance(),
        "model": "embedded" if given.model is None else Path(given.model).name,
        "vocab_size": llm.engine.model.vocab_size,
        "loads": [
            measure(llm, prompts, params, at_once, given.rounds, share)
            for at_once in given.at_once
            for share in (MAX_SHARE, None)
        ],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

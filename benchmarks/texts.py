"""The texts of 500 requests over all drafters, greedy and seeded, to be the same before and after a change.

    python -m benchmarks.texts --record build/texts.json   # on the commit before
    python -m benchmarks.texts --compare build/texts.json  # on the commit after: exit code 1 where anything differs

A record also has how many tokens were drafted and accepted, so that a drafter which guesses otherwise shows too, though
no text tells of it. The CPU kernels are held to AVX2 instructions: then a record of one machine holds on others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("SLIPSTREAM_CPU_ISA", "avx2")

from benchmarks.drafters.lineup import DRAFT, UNTRAINED
from benchmarks.harness.command import command
from benchmarks.harness.kept import say, write_result
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3, sample_prompts
from slipstream.profiling.provenance import provenance

NUM_REQUESTS = 500
_EAGLE3 = {"method": "eagle3", "model": EMBEDDED_EAGLE3, "num_speculative_tokens": 4}
_TREE = {"tree_top_k": 3, "num_draft_nodes": 12}
_SUFFIX = {"method": "suffix", "tree": True, "num_draft_nodes": 16}
SPECS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    **{entry.name: entry.spec for entry in UNTRAINED},
    "eagle3, chain": _EAGLE3,
    "eagle3, tree": {**_EAGLE3, **_TREE},
    "eagle3, verifier rejection": {**_EAGLE3, "verifier": "rejection"},
    "tli": {**DRAFT, "method": "tli"},
    "slem": {**DRAFT, "method": "slem"},
    "siblings": {"method": "siblings"},
    "ensemble": {
        "method": "ensemble",
        "num_draft_nodes": 16,
        "members": [_SUFFIX, {**DRAFT, **_TREE, "num_draft_nodes": 16}],
    },
    "int8 target, suffix": _SUFFIX,
}


def texts_of(name: str, spec: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Each answer's token ids, greedy and at temperature 0.8 by turns, and what was drafted for all of them."""
    options = {"quantization": "int8"} if name.startswith("int8 target") else {}
    llm = LLM(speculative_config=spec, kv_cache_bytes=128 * 2**20, **options)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=48, n=2 if name == "siblings" else 1)
        for i in range(len(prompts))
    ]
    outputs = llm.chat([row["messages"] for row in prompts], params)
    answers = [answer for output in outputs for answer in output.outputs]
    return {
        "token_ids": [list(answer.token_ids) for answer in answers],
        "drafted": sum(answer.metrics.num_draft_tokens for answer in answers),
        "accepted": sum(answer.metrics.num_accepted_tokens for answer in answers),
    }


def main() -> int:
    parser = command(__doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--record", type=Path, help="write the texts of this commit")
    kind.add_argument("--compare", type=Path, help="compare this commit's texts with a record")
    args = parser.parse_args()
    prompts = sample_prompts()
    share = -(-NUM_REQUESTS // len(SPECS))
    found = {}
    for i, (name, spec) in enumerate(SPECS.items()):
        found[name] = texts_of(name, spec, [prompts[(i * share + j) % len(prompts)] for j in range(share)])
        say(f"{name}: {found[name]['drafted']} drafted, {found[name]['accepted']} accepted")
    if args.record:
        write_result(args.record, {"provenance": provenance(), "texts": found})
        return 0
    before = json.loads(args.compare.read_text())["texts"]
    differ = [name for name in SPECS if before.get(name) != found[name]]
    for name in differ:
        say(f"DIFFERS: {name}")
    say(f"{len(SPECS) - len(differ)} of {len(SPECS)} drafters as recorded, {share * len(SPECS)} requests")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

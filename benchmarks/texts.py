"""The texts of requests over all drafters, to be the same before and after a change, and as without drafts.

    python -m benchmarks.texts --record build/texts.json   # on the commit before: 500 requests
    python -m benchmarks.texts --compare build/texts.json  # on the commit after: exit code 1 where anything differs
    python -m benchmarks.texts --off                       # drafters that are heads, 350 prompts each, beside none

A record also has how many tokens were drafted and accepted, so that a drafter which guesses otherwise shows too, though
no text tells of it. The CPU kernels are held to AVX2 instructions: then a record of one machine holds on others.

With --off every prompt is answered without drafts and with each drafter, greedily and at temperature 0.8 with a seed;
exit code 1 where a text is another or a draft failed. Heads that no run has trained guess few tokens. What
`slipstream train dflash --output OUT/dflash` and its kin wrote is used instead with `--trained OUT`. A run that is
stopped goes on when it is called again with the same options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.drafters.lineup import DRAFT, UNTRAINED
from benchmarks.drafters.untrained_heads import untrained
from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept, say, write_result
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3, sample_prompts
from slipstream.draft.methods import MTP
from slipstream.profiling.provenance import provenance

NUM_REQUESTS = 500
CACHE = 128 * 2**20
TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}
HEADS = ("dflash", "dspark", "peagle", "pard", "mtp", "eagle3")
"""What --off compares unless told otherwise."""
_EAGLE3 = {"method": "eagle3", "model": EMBEDDED_EAGLE3, "num_speculative_tokens": 4}
_CHAIN = {"tree_top_k": 1, "num_draft_nodes": None}
_TREE = {"tree_top_k": 3, "num_draft_nodes": 12}
_SUFFIX = {"method": "suffix", "tree": True, "num_draft_nodes": 16}
SPECS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    **{entry.name: entry.spec for entry in UNTRAINED},
    "eagle3, chain": {**_EAGLE3, **_CHAIN},
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


def main() -> int:
    parser = command(__doc__, DOCS / "texts.json")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--record", type=Path, help="write the texts of this commit")
    kind.add_argument("--compare", type=Path, help="compare this commit's texts with a record")
    kind.add_argument(
        "--off",
        nargs="?",
        const=list(HEADS),
        type=names(HEADS),
        help=f"compare with no drafts; some of {', '.join(HEADS)}, all by default",
    )
    parser.add_argument("--prompts", type=int, default=350, help="with --off")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer, with --off")
    parser.add_argument(
        "--trained", type=Path, help="with --off: a folder with a training run's output a head"
    )
    options = parser.parse_args()
    if options.off is None and options.trained is not None:
        parser.error("--trained is for --off: a record is of heads that are the same everywhere")
    with tempfile.TemporaryDirectory() as scratch:
        made = untrained(Path(scratch))
        if options.off is not None:
            return compare_with_off(options, made)
        return record_or_compare(options, {**SPECS, **specs_of(made)})


def specs_of(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """A chain and a tree of each head, in the default depth."""
    plain = {name: {"method": name, "model": str(folder)} for name, folder in folders.items()}
    return {
        **{f"{name}, chain": {**spec, **_CHAIN} for name, spec in plain.items()},
        **{f"{name}, tree": {**spec, **_TREE} for name, spec in plain.items()},
    }


def record_or_compare(args: argparse.Namespace, specs: dict[str, dict[str, Any]]) -> int:
    prompts = sample_prompts()
    share = -(-NUM_REQUESTS // len(specs))
    found = {}
    for i, (name, spec) in enumerate(specs.items()):
        found[name] = texts_of(name, spec, [prompts[(i * share + j) % len(prompts)] for j in range(share)])
        say(f"{name}: {found[name]['drafted']} drafted, {found[name]['accepted']} accepted")
    if args.record:
        write_result(args.record, {"provenance": provenance(), "texts": found})
        return 0
    before = json.loads(args.compare.read_text())["texts"]
    differ = [name for name in specs if before.get(name) != found[name]]
    for name in differ:
        say(f"DIFFERS: {name}")
    say(f"{len(specs) - len(differ)} of {len(specs)} drafters as recorded, {share * len(specs)} requests")
    return 1 if differ else 0


def texts_of(name: str, spec: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Each answer's token ids, greedy and at temperature 0.8 by turns, and what was drafted for all of them."""
    options = {"quantization": "int8"} if name.startswith("int8 target") else {}
    llm = LLM(speculative_config=spec, kv_cache_bytes=CACHE, **options)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=48, n=2 if name == "siblings" else 1)
        for i in range(len(prompts))
    ]
    return _answered(llm, prompts, params)


def compare_with_off(options: argparse.Namespace, made: dict[str, Path]) -> int:
    """Write the result of --off, a row a drafter and way to sample."""
    prompts = sample_prompts()[: options.prompts]
    trained = trained_in(options.trained, made)
    specs = specs_of(made | trained) | {name: SPECS[name] for name in ("eagle3, chain", "eagle3, tree")}
    settings = {
        "num_prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "temperatures": TEMPERATURES,
        "trained": sorted(trained),
    }
    kept = Kept(options.output, settings)
    kept.origin["command"] = _without_folder(kept.origin["command"])
    ask = partial(both_ways, prompts, options.max_tokens)
    expected = kept.cell("off", lambda: ask(SPECS["off"]))
    rows = []
    for name, spec in specs.items():
        if name.split(",")[0] in options.off:
            found = kept.cell(name, partial(ask, spec))
            rows += [
                {"drafter": name, "sampling": way, **compared(found[way], expected[way])} for way in found
            ]
            for row in rows[-len(found) :]:
                say(f"{name}, {row['sampling']}: {row['equal']} of {row['texts']} texts equal to off")
    kept.finish({**settings, "rows": rows})
    return int(any(row["equal"] < row["texts"] or row["failures"] for row in rows))


def trained_in(folder: Path | None, made: dict[str, Path]) -> dict[str, Path]:
    """Where a training run left a head that takes the place of one in `made`."""
    if folder is None:
        return {}
    found = {name: folder / name / name for name in made if (folder / name / name).is_dir()}
    if not found:
        wanted = ", ".join(f"{name}/{name}" for name in made if name != MTP.name)
        raise SystemExit(f"--trained {str(folder)!r} has none of {wanted}")
    return found


def both_ways(prompts: list[dict[str, Any]], max_tokens: int, spec: dict[str, Any]) -> dict[str, Any]:
    """As `texts_of`, all prompts greedily and all seeded, each time with empty caches."""
    llm = LLM(speculative_config=spec, kv_cache_bytes=CACHE)
    found = {}
    for way, temperature in TEMPERATURES.items():
        llm.reset_caches()
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
            for i in range(len(prompts))
        ]
        found[way] = _answered(llm, prompts, params)
    return found


def _answered(llm: LLM, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> dict[str, Any]:
    failures = llm.engine.stats().num_draft_failures
    outputs = llm.chat([row["messages"] for row in prompts], params)
    answers = [answer for output in outputs for answer in output.outputs]
    return {
        "token_ids": [list(answer.token_ids) for answer in answers],
        "drafted": sum(answer.metrics.num_draft_tokens for answer in answers),
        "accepted": sum(answer.metrics.num_accepted_tokens for answer in answers),
        "failures": llm.engine.stats().num_draft_failures - failures,
    }


def compared(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """How many texts are equal, which prompts' are not, and what was drafted."""
    pairs = zip(found["token_ids"], expected["token_ids"], strict=True)
    differ = [number for number, (mine, without) in enumerate(pairs) if mine != without]
    counts = {name: found[name] for name in ("drafted", "accepted", "failures")}
    texts = len(found["token_ids"])
    tokens = sum(map(len, found["token_ids"]))
    return {"texts": texts, "equal": texts - len(differ), "differ": differ, "tokens": tokens, **counts}


def _without_folder(command_line: str) -> str:
    """Without the name of a folder on this machine."""
    words = command_line.split(" ")
    if "--trained" in words:
        words[words.index("--trained") + 1] = "OUT"
    return " ".join(words)


if __name__ == "__main__":
    os.environ.setdefault("SLIPSTREAM_CPU_ISA", "avx2")  # read when the kernels are first used
    sys.exit(main())

r"""What speculation gains on small pretrained models, beside llama.cpp and OpenVINO GenAI on the same files.

    python -m benchmarks.real_models --prompts mt_bench.jsonl --environments xllamacpp=DIR,openvino=DIR
    python -m benchmarks.real_models --prompts mt_bench.jsonl --models smollm2 --per-category 2 \
        --also 'mine={"speculative_config": {"method": "eagle3", "model": "HEAD"}}'

`--prompts` is MT-bench's file of questions: JSON lines with `category` and `turns`, of which the first is asked. All
ways of a model stay loaded and take turns prompt by prompt, in an order drawn for each; each is a process of its own.
`--also` adds ways of Slipstream's, by what is given to `LLM`. Prompts are token ids, made once: by the model's chat
template, or the plain text for a base model. Greedy, up to `--max-tokens` tokens, answers end where the model ends
them. A peer's environment is named with `--environments`; those that are not are left out. What is measured is kept
when a run is stopped. Writes docs/benchmarks/real_models.json, the page real_models.md and the picture real_models.svg.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.processes import Worker, WorkerRefused
from benchmarks.peers import machine
from benchmarks.peers.environments import process_environment
from benchmarks.real_models_page import draw, page
from recipes.real_models import GEMMA3, SMOLLM2, fetch
from slipstream.assets.embedded import SMOLLM2_DRAFTERS, SMOLLM2_NAME, SMOLLM2_SHAPE
from slipstream.errors import SlipstreamError
from slipstream.models import load_tokenizer
from slipstream.models.cpu.native import instructions
from slipstream.text.jsonl import read_rows
from slipstream.text.prompts import encode_chat

RESULT = DOCS / "real_models.json"
MODELS = {SMOLLM2_NAME: SMOLLM2, "gemma3": GEMMA3}
MAX_MODEL_LEN = 2048
LOAD_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Way:
    """One setting of one engine."""

    peer: str
    name: str
    load: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.peer}/{self.name}"


def slipstream(name: str, **speculative: Any) -> Way:
    config = {"method": name, **speculative}
    return Way("slipstream", name, {"dtype": "auto", "speculative_config": config})


WAYS = (
    *(slipstream(name) for name in ("off", "ngram", "suffix", "auto", "self", "layer_skip")),
    Way("xllamacpp", "off"),
    Way("xllamacpp", "ngram-mod", {"speculative": "ngram_mod"}),
    Way("openvino", "off"),
    Way(
        "openvino",
        "prompt lookup",
        {"prompt_lookup": True},
        {"num_assistant_tokens": 4, "max_ngram_size": 3},
    ),
)


def questions(file: Path, per_category: int | None) -> list[tuple[str, str]]:
    """Category and first turn of each question."""
    found: list[tuple[str, str]] = []
    for _, row in read_rows(file):
        category = row["category"]
        if per_category is None or sum(each == category for each, _ in found) < per_category:
            found.append((category, row["turns"][0]))
    return found


def encoded(model: Path, texts: Seq[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(str(model))
    if tokenizer.chat_template:
        return [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    return [list(tokenizer(text).input_ids) for text in texts]


def start(way: Way, model: Path, options: argparse.Namespace, logs: Path) -> tuple[Worker, Mapping[str, Any]]:
    """A process that has loaded the model, and what it said of itself; raises `WorkerRefused`."""
    python = options.environments[way.peer] / "bin/python" if way.peer != "slipstream" else sys.executable
    variables = process_environment(way.peer, Path(), options.threads)
    command = [str(python), "-m", f"benchmarks.peers.workers.{way.peer}"]
    worker = Worker(command, logs / f"{way.key.replace('/', '-')}.log", variables)
    request = {
        "op": "load",
        "target": str(model),
        "draft": "",
        "weights": "",
        "threads": options.threads,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 1,
        "options": dict(way.load),
    }
    try:
        return worker, worker.ask(request, timeout_s=LOAD_TIMEOUT_S)
    except WorkerRefused:
        worker.close()
        raise


def measure(
    name: str, ways: Seq[Way], asked: Seq[tuple[str, str]], options: argparse.Namespace, kept: Kept
) -> dict[str, Any]:
    """All samples of one model, and what its engines said of themselves."""
    model = fetch(MODELS[name])
    prompts = encoded(model, [text for _, text in asked])
    workers: dict[str, Worker] = {}
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for way in ways:
                say(f"{name}: loading {way.key} …")
                try:
                    workers[way.key], ready = start(way, model, options, Path(folder))
                except WorkerRefused as refusal:
                    reason = str(refusal).replace(str(model.parent), "…")
                    say(f"{name}: {way.key} cannot run: {reason}")
                    about[way.key] = {"refused": reason}
                    continue
                about[way.key] = {
                    "versions": ready["versions"],
                    "notes": ready["notes"],
                    "load": without_model_folder(way.load),
                    "call": dict(way.call),
                }
                warm_up(workers[way.key], way, prompts[0])
            samples = take_turns(name, ways, workers, asked, prompts, options, kept)
        finally:
            for worker in workers.values():
                worker.close()
    return {"file": model.name, "about": about, "samples": samples}


def without_model_folder(load: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a result shows them: a head by its folder's name."""
    shown, speculative = dict(load), dict(load.get("speculative_config", {}))
    if "model" in speculative:
        shown["speculative_config"] = {**speculative, "model": Path(speculative["model"]).name}
    return shown


def warm_up(worker: Worker, way: Way, prompt: Seq[int]) -> None:
    request = {"op": "generate", "prompts": [list(prompt)], "max_tokens": 8, "options": dict(way.call)}
    worker.ask(request, timeout_s=CALL_TIMEOUT_S)


def take_turns(
    name: str,
    ways: Seq[Way],
    workers: dict[str, Worker],
    asked: Seq[tuple[str, str]],
    prompts: Seq[Seq[int]],
    options: argparse.Namespace,
    kept: Kept,
) -> list[dict[str, Any]]:
    """Each prompt by each way that has a worker, one after another; one that fails is left out from then on."""
    samples: list[dict[str, Any]] = []
    calls = [(number, index) for number in range(options.rounds) for index in range(len(asked))]
    started_s, measured = time.monotonic(), 0
    for done, (number, index) in enumerate(calls):
        cell = f"{name}, round {number + 1}, prompt {index + 1}"
        if not kept.has(cell):
            order = [way for way in ways if way.key in workers]
            random.Random(f"{options.seed} {cell}").shuffle(order)
            rows = []
            for way in order:
                try:
                    rows.append(call(workers[way.key], way, prompts[index], options))
                except WorkerRefused as refusal:
                    say(f"{name}: {way.key} failed: {refusal}")
                    workers.pop(way.key).close()
            kept.put(cell, rows)
            measured += 1
            left_s = (time.monotonic() - started_s) / measured * (len(calls) - done - 1)
            say(f"{cell} of {len(asked)} ({asked[index][0]}), about {left_s / 60:.0f} minutes left")
        samples += [
            {"round": number, "index": index, "category": asked[index][0], **row} for row in kept.get(cell)
        ]
    return samples


def call(worker: Worker, way: Way, prompt: Seq[int], options: argparse.Namespace) -> dict[str, Any]:
    request = {
        "op": "generate",
        "prompts": [list(prompt)],
        "max_tokens": options.max_tokens,
        "options": {"ignore_eos": False, **way.call},
    }
    before_s, others_before_s = worker.cpu_s(), machine.busy_cpu_s()
    answer = worker.ask(request, timeout_s=CALL_TIMEOUT_S)
    cpu_s = worker.cpu_s() - before_s
    return {
        "way": way.key,
        "seconds": answer["seconds"],
        "first_token_s": answer["first_token_s"],
        "token_ids": answer["token_ids"][0],
        "num_steps": answer["num_steps"],
        "cpu_s": cpu_s,
        "other_cpu_s": machine.busy_cpu_s() - others_before_s - cpu_s,
    }


def environments(text: str) -> dict[str, Path]:
    """`peer=folder,…`; raises `ValueError`, which argparse reports."""
    found: dict[str, Path] = {}
    for part in filter(None, text.split(",")):
        peer, _, folder = part.partition("=")
        if peer not in ("xllamacpp", "openvino"):
            raise argparse.ArgumentTypeError(f"{peer!r} is neither xllamacpp nor openvino")
        if not (Path(folder) / "bin/python").exists():
            raise argparse.ArgumentTypeError(f"{folder!r} is no environment: it has no bin/python")
        found[peer] = Path(folder).absolute()
    return found


def arguments(given: Seq[str] | None) -> argparse.Namespace:
    parser = command(__doc__, RESULT)
    parser.add_argument("--prompts", type=Path, required=True, help="MT-bench's questions, JSON lines")
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS), help="with a comma")
    parser.add_argument("--ways", help="only these, such as slipstream/off,openvino/off")
    parser.add_argument("--environments", type=environments, default={}, help="PEER=FOLDER,…")
    parser.add_argument("--also", type=also, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--per-category", type=int, help="so many questions of each category; default all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


def also(text: str) -> Way:
    name, _, settings = text.partition("=")
    return Way("slipstream", name, {"dtype": "auto", **json.loads(settings)})


def ways_of(name: str, options: argparse.Namespace) -> list[Way]:
    ways = [way for way in WAYS if way.peer == "slipstream" or way.peer in options.environments]
    if name == SMOLLM2_NAME:
        heads = {method: {"model": SMOLLM2_NAME, **SMOLLM2_SHAPE} for method in SMOLLM2_DRAFTERS}
        ways += [slipstream(method, **keys) for method, keys in heads.items()]
        both = [{"method": "suffix"}, *({"method": method, **keys} for method, keys in heads.items())]
        ways.append(replace(slipstream("auto", drafters=both), name="auto with heads"))
        ways += options.also
    if options.ways:
        ways = [way for way in ways if way.key in options.ways.split(",")]
    return ways


def main(given: Seq[str] | None = None) -> int:
    options = arguments(given)
    try:
        asked = questions(options.prompts, options.per_category)
        share = machine.others_share()
        if share > machine.BUSY_SHARE:
            say(f"the machine is BUSY ({share:.2f} cores in use): these figures will not be right")
        settings = {name: value for name, value in vars(options).items() if name not in ("output", "prompts")}
        about = {
            "threads": options.threads,
            "instructions": instructions(),
            "cores_in_use_before": round(share, 3),
        }
        kept = Kept(options.output, {**settings, "num_prompts": len(asked)}, **about)
        models = {
            name: measure(name, ways_of(name, options), asked, options, kept) for name in options.models
        }
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "num_prompts": len(asked),
        "models": models,
    }
    kept.finish(result, partial(page, raw=options.output), draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())

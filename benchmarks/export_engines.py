"""Exported checkpoints in the engines that they are for: is the text ours, and are as many draft tokens accepted?

    python -m benchmarks.export_engines --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --transformers-python VENV/bin/python --llama-server BUILD/bin/llama-server

Each engine gets the setting and the checkpoint that `slipstream export --checkpoint` writes for it, computes in
float32 as far as it can, and answers the same prompts, as token ids, greedily and one at a time. Answers are as long as
ours are before their end token, so that no engine's way of ending counts. Acceptance is what a target pass accepts
behind the prompt's own pass: in that one Transformers and Slipstream check tokens of a draft model, the others check
none. So ours goes on from the tokens that theirs began with, and Transformers gets the first token with the prompt. An
engine that is not named stays as it was in the result, one that does not run a drafter is recorded with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.export_page import page
from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import Kept
from benchmarks.harness.processes import Server, answer_of
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.draft.methods import HEADS
from slipstream.text.prompts import encode_chat
from slipstream.tools.export import ENGINES, SpeculativeRecord
from slipstream.tools.export.contract import ExportedSetting
from slipstream.tools.export.converting import converted
from slipstream.tools.export.refusals import ExportError

HERE = Path(__file__).parent
RESULT = DOCS / "export_engines.json"
NUM_TOKENS = 4
VERSIONS = {"vllm": "0.32", "llama-cpp": "2026-09"}
"""Versions of the environments, where they are not the newest that is known; llama.cpp is that of llama-cpp-python."""
DRAFTS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE3}

Request = dict[str, Any]
"""`prompts` as token ids, the target's `texts` as token ids without the end, and their `lengths`."""
Answers = dict[str, Any]
"""`version` of the engine and `answers`: (token ids, how many of them the answer began with, target passes behind
those) of each prompt."""
Engine = Callable[[str, ExportedSetting, Path, Request], Answers]


def main() -> None:
    parser = command(__doc__)
    for engine in ("vllm", "openvino", "transformers"):
        parser.add_argument(f"--{engine}-python", help=f"Python of an environment with {engine}")
    parser.add_argument("--llama-server", help="the binary")
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    programs: dict[str, tuple[str | None, Engine]] = {
        "llama-cpp": (options.llama_server, llama_cpp),
        "transformers": (options.transformers_python, transformers),
        "openvino": (options.openvino_python, openvino),
        "vllm": (options.vllm_python, vllm),
    }
    kept = Kept(RESULT, vars(options))
    request = kept.cell("the target alone", partial(asked, options.prompts, options.max_tokens))
    settings = {
        "num_prompts": len(request["prompts"]),
        "max_tokens": options.max_tokens,
        "depth": NUM_TOKENS,
        "num_tokens": sum(request["lengths"]),
    }
    cells = earlier(settings, [engine for engine, (program, _) in programs.items() if program is not None])
    for engine, (program, run) in programs.items():
        for method, model in DRAFTS.items():
            if program is None:
                continue
            record = SpeculativeRecord(method=method, target=EMBEDDED_TARGET, model=model, depth=NUM_TOKENS)
            there = kept.cell(f"{engine} {method}", partial(theirs, engine, program, run, record, request))
            cell = {"engine": engine, "method": method, "commit": kept.origin["commit"]}
            if "answers" in there:
                begun = [num for _, num, _ in there["answers"]]
                here = kept.cell(f"ours for {engine} {method}", partial(ours, record, request, begun))
                cells.append({**cell, **compared(here, there, request)})
            else:
                cells.append({**cell, **there})
            print(json.dumps(cells[-1]), flush=True)
    kept.finish({**settings, "cells": cells}, page)


def earlier(settings: dict[str, Any], measured: list[str]) -> list[dict[str, Any]]:
    """Cells of the engines that are not measured now, from a result with the same settings."""
    if not RESULT.exists():
        return []
    before = json.loads(RESULT.read_text())
    if any(before[name] != value for name, value in settings.items()):
        return []
    return [cell for cell in before["cells"] if cell["engine"] not in measured]


def asked(num_prompts: int, max_tokens: int) -> Request:
    """Prompts of every task, answered by our target without speculation."""
    llm = alone(EMBEDDED_TARGET)
    rows = sample_prompts()[:num_prompts]
    prompts = [list(encode_chat(llm.engine.tokenizer, row["messages"])) for row in rows]
    return answered(llm, prompts, max_tokens)


def answered(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Request:
    """The prompts with the answers of `llm`; those with no more than one token are left out."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    ends = llm.engine.tokenizer.eos_token_id
    texts = [[token for token in output.outputs[0].token_ids if token != ends] for output in outputs]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if len(text) > 1]
    return {
        "prompts": [prompt for prompt, _ in pairs],
        "texts": [text for _, text in pairs],
        "lengths": [len(text) for _, text in pairs],
    }


def ours(record: SpeculativeRecord, request: Request, begun: list[int]) -> Answers:
    """A chain, as the other engines run it, request by request, behind the first `begun` tokens of each answer."""
    config = {"method": record.method, "model": record.model, "num_speculative_tokens": record.depth}
    chain = {"tree_top_k": 1, "num_draft_nodes": None}
    llm = LLM(model=record.target, speculative_config=config | chain, kv_cache_dtype="float32")
    answers = []
    drafts_for_prompts = record.method not in HEADS  # a head drafts from the target's hidden states
    for prompt, text, num in zip(request["prompts"], request["texts"], begun, strict=True):
        given = text[:num] if drafts_for_prompts else text[: num - 1]
        tokens, passes = _answer(llm, prompt + given, len(text) - len(given))
        answers.append([given + tokens, num, passes if drafts_for_prompts else passes - 1])
    return {"answers": answers}


def _answer(llm: LLM, prompt: list[int], length: int) -> tuple[list[int], int]:
    if not length:
        return [], 0
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    [output] = llm.generate([prompt], params)
    return list(output.outputs[0].token_ids), output.metrics.num_steps


def theirs(engine: str, program: str, run: Engine, record: SpeculativeRecord, request: Request) -> Answers:
    """What the engine answers with the exported setting and checkpoint, or why it is not run."""
    version = VERSIONS.get(engine)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "checkpoint"
        try:
            there, _ = converted(record, engine, place, version)
            setting = ENGINES[engine].to_engine(there, version)
        except ExportError as error:
            return {"refused": str(error)}
        try:
            return run(program, setting, place, request)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            return {"failed": str(error)[-600:].replace(scratch, "SCRATCH")}


def compared(
    here: Answers, there: Answers, request: Request, target: str = EMBEDDED_TARGET
) -> dict[str, Any]:
    """How many texts are the target's, where the others part from it, and what a pass accepts where they are."""
    parted, passes, num_tokens = [], {"ours": 0, "theirs": 0}, 0
    rows = zip(request["prompts"], request["texts"], here["answers"], there["answers"], strict=True)
    for number, (prompt, expected, mine, other) in enumerate(rows):
        if mine[0] != expected:
            raise RuntimeError(f"prompt {number}: our own text with drafts is another than without")
        tokens, begun, their_passes = other
        if tokens != expected:
            parted.append({"prompt": number, **difference(target, prompt, expected, tokens)})
            continue
        passes["ours"] += mine[2]
        passes["theirs"] += their_passes
        num_tokens += len(expected) - begun
    accepted = {side: num_tokens / count - 1 if count else None for side, count in passes.items()}
    ours, theirs = accepted["ours"], accepted["theirs"]
    return {
        "version": there["version"],
        "same_texts": len(request["texts"]) - len(parted),
        "differences": parted,
        "num_tokens": num_tokens,
        "passes": passes,
        "accepted_per_pass": accepted,
        "theirs_over_ours": theirs / ours if ours and theirs is not None else None,
    }


def difference(target: str, prompt: list[int], expected: list[int], tokens: list[int]) -> dict[str, Any]:
    """Where two texts part first, and by how many nats our target prefers its own token there."""
    pairs = zip(expected, tokens, strict=False)
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(tokens)))
    if position == min(len(expected), len(tokens)):
        return {"position": position, "lengths": [len(expected), len(tokens)]}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    [output] = alone(target).generate([prompt + expected[:position]], params)
    [logprobs] = output.outputs[0].logprobs or [{}]
    mine, other = (logprobs.get(side[position]) for side in (expected, tokens))
    margin = None if mine is None or other is None else mine.logprob - other.logprob
    return {"position": position, "margin": margin}


@cache
def alone(target: str) -> LLM:
    """The target without drafts."""
    return LLM(model=target, speculative_config={"method": "off"}, kv_cache_dtype="float32")


def vllm(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    _, _, target, _, config = setting.argv
    given = {"target": target, "speculative_config": json.loads(config)}
    return answers_in(python, "vllm", given | request)


def openvino(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    script = place / "convert.sh"
    exact = script.read_text().replace("--weight-format fp16", "--weight-format fp32")
    script.write_text(exact)
    path = f"{Path(python).parent}:/usr/bin:/bin"
    subprocess.run(["sh", script], env={**os.environ, "PATH": path}, check=True, capture_output=True)
    return answers_in(python, "openvino", {"values": _values(setting)} | request)


def transformers(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    """With the first token given, so that the pass in which it begins to draft is behind that."""
    prompts = [prompt + text[:1] for prompt, text in zip(request["prompts"], request["texts"], strict=True)]
    lengths = [length - 1 for length in request["lengths"]]
    given = {"values": _values(setting), "prompts": prompts, "lengths": lengths}
    found = answers_in(python, "transformers", given)
    firsts = [text[:1] for text in request["texts"]]
    answers = zip(firsts, found["answers"], strict=True)
    return {**found, "answers": [[first + tokens, 1, passes] for first, (tokens, passes) in answers]}


def _values(setting: ExportedSetting) -> dict[str, Any]:
    [text] = [file.text for file in setting.files if file.name.endswith(".json")]
    return json.loads(text)


def answers_in(python: str, engine: str, request: Request) -> Answers:
    """What the engine's program in `export_workers` says, run by another environment's Python."""
    script = HERE / "export_workers" / f"{engine}_generate.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return answer_of([python, script], request, environment=environment)


class LlamaServer(Server):
    """llama.cpp's own server."""

    ready = "/health"


def llama_cpp(server: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    """The command that was exported, with caches in float32 and one slot."""
    caches = [f"--{whose}type-{kind}" for whose in ("cache-", "spec-draft-") for kind in "kv"]
    flags = [word for flag in caches for word in (flag, "f32")]
    sizes = ["--parallel", "1", "--ctx-size", "2048", "--threads", "1"]
    with LlamaServer([server, *setting.argv[1:], *flags, *sizes], place / "llama-server.log") as running:
        answers = [
            _served(running.url, *each) for each in zip(request["prompts"], request["lengths"], strict=True)
        ]
    return {"version": llama_version(server), "answers": answers}


def _served(url: str, prompt: list[int], length: int) -> list[Any]:
    body = {"prompt": prompt, "n_predict": length, "temperature": 0, "samplers": ["temperature"]}
    body |= {"return_tokens": True, "cache_prompt": False}
    reply = httpx2.post(f"{url}/completion", json=body, timeout=600).json()
    # it drafts no token that the length would cut, so every pass ends with a token of the target's own
    accepted = reply["timings"].get("draft_n_accepted", 0)
    return [reply["tokens"], 1, len(reply["tokens"]) - accepted - 1]


def llama_version(binary: str) -> str:
    """What `llama-server --version` says: version, build and commit."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60)
    lines = (done.stdout + done.stderr).splitlines()
    return next(line.removeprefix("version:").strip() for line in lines if line.startswith("version:"))


if __name__ == "__main__":
    main()

"""Exported checkpoints in the engines that they are for: is the text ours, and are as many draft tokens accepted?

    python -m benchmarks.export_engines --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --transformers-python VENV/bin/python --llama-server BUILD/bin/llama-server

Each engine gets the setting and the checkpoint that `slipstream export --checkpoint` writes for it, in float32, and
answers the same prompts, as token ids, greedily and one at a time. Answers are as long as ours are before their end
token, so that no engine's way of ending counts. Acceptance is compared as target passes, the prompts' included. An
engine that is not named is left out, one that does not run a drafter is recorded with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.export import ENGINES, SpeculativeRecord
from slipstream.export.contract import ExportedSetting, ExportError
from slipstream.export.converting import converted
from slipstream.provenance import provenance
from slipstream.text.prompts import encode_chat

HERE = Path(__file__).parent
RESULT = HERE.parent / "docs/benchmarks/export_engines.json"
NUM_TOKENS = 4
DRAFTS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE3}
VERSIONS = {"vllm": "0.32"}
START_TIMEOUT_S = 300.0

Request = dict[str, Any]
"""`prompts` as token ids, the target's `texts` as token ids without the end, and their `lengths`."""
Answers = dict[str, Any]
"""`version` of the engine and `answers`: (token ids, target passes) of each prompt."""
Engine = Callable[[str, ExportedSetting, Path, Request], Answers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    kept, cells = Kept(RESULT, vars(options)), []
    request = kept.cell("the target alone", partial(asked, options.prompts, options.max_tokens))
    for engine, (program, run) in programs.items():
        for method, model in DRAFTS.items():
            if program is None:
                continue
            record = SpeculativeRecord(method=method, target=EMBEDDED_TARGET, model=model, depth=NUM_TOKENS)
            here = kept.cell(f"slipstream {method}", partial(ours, record, request))
            there = kept.cell(f"{engine} {method}", partial(theirs, engine, program, run, record, request))
            cells.append({"engine": engine, "method": method, **compared(here, there, request)})
            print(json.dumps(cells[-1]), flush=True)
    settings = {
        "num_prompts": len(request["prompts"]),
        "max_tokens": options.max_tokens,
        "depth": NUM_TOKENS,
        "num_tokens": sum(request["lengths"]),
    }
    kept.finish({"provenance": provenance(), **settings, "cells": cells})


def asked(num_prompts: int, max_tokens: int) -> Request:
    """Prompts of every task, answered by our target without speculation."""
    llm = LLM()
    rows = sample_prompts()[:num_prompts]
    prompts = [list(encode_chat(llm.engine.tokenizer, row["messages"])) for row in rows]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    ends = llm.engine.tokenizer.eos_token_id
    texts = [[token for token in output.outputs[0].token_ids if token != ends] for output in outputs]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if len(text) > 1]
    return {
        "prompts": [prompt for prompt, _ in pairs],
        "texts": [text for _, text in pairs],
        "lengths": [len(text) for _, text in pairs],
    }


def ours(record: SpeculativeRecord, request: Request) -> Answers:
    """A chain, as the other engines run it, request by request.

    Our draft models draft in the prompt's own pass, others after the first token. So that the same drafts are
    compared, a draft model here gets the first token with the prompt; `whole` are the passes without that.
    """
    config = {"method": record.method, "model": record.model, "num_speculative_tokens": record.depth}
    chain = {"tree_top_k": 1} | ({"num_draft_nodes": None} if record.method == "eagle3" else {})
    llm, answers, whole = LLM(speculative_config=config | chain), [], []
    for prompt, text in zip(request["prompts"], request["texts"], strict=True):
        given = text[:1] if record.method == "draft_model" else []
        tokens, passes = _answer(llm, prompt + given, len(text) - len(given))
        answers.append([given + tokens, passes + len(given)])
        whole.append(_answer(llm, prompt, len(text))[1] if given else passes)
    return {"answers": answers, "whole": whole}


def _answer(llm: LLM, prompt: list[int], length: int) -> tuple[list[int], int]:
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


def compared(here: Answers, there: Answers, request: Request) -> dict[str, Any]:
    """Both engines' passes over all answers, how many texts are the target's, and where the others part from it."""
    if "answers" not in there:
        return there
    parted = []
    for number, (expected, (tokens, _)) in enumerate(zip(request["texts"], there["answers"], strict=True)):
        if tokens != expected:
            parted.append({"prompt": number, **difference(request["prompts"][number], expected, tokens)})
    passes = {"ours": _passes(here), "theirs": _passes(there)}
    return {
        "version": there["version"],
        "same_texts": len(request["texts"]) - len(parted),
        "differences": parted,
        "passes": passes,
        "tokens_per_pass": {side: sum(request["lengths"]) / count for side, count in passes.items()},
        "theirs_over_ours": passes["ours"] / passes["theirs"],
        "our_passes_with_drafts_for_the_prompt": sum(here["whole"]),
    }


def _passes(side: Answers) -> int:
    return sum(passes for _, passes in side["answers"])


def difference(prompt: list[int], expected: list[int], tokens: list[int]) -> dict[str, Any]:
    """Where two texts part first, and by how many nats our target prefers its own token there."""
    pairs = zip(expected, tokens, strict=False)
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(tokens)))
    if position == min(len(expected), len(tokens)):
        return {"position": position, "lengths": [len(expected), len(tokens)]}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    [output] = _target().generate([prompt + expected[:position]], params)
    [logprobs] = output.outputs[0].logprobs or [{}]
    mine, other = (logprobs.get(side[position]) for side in (expected, tokens))
    margin = None if mine is None or other is None else mine.logprob - other.logprob
    return {"position": position, "margin": margin}


@cache
def _target() -> LLM:
    return LLM()


def vllm(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    _, _, target, _, config = setting.argv
    given = {"target": target, "speculative_config": json.loads(config)}
    return _worker(python, "vllm", given | request)


def openvino(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    script = place / "convert.sh"
    exact = script.read_text().replace("--weight-format fp16", "--weight-format fp32")
    script.write_text(exact)
    path = f"{Path(python).parent}:/usr/bin:/bin"
    subprocess.run(["sh", script], env={**os.environ, "PATH": path}, check=True, capture_output=True)
    return _worker(python, "openvino", {"values": _values(setting)} | request)


def transformers(python: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    return _worker(python, "transformers", {"values": _values(setting)} | request)


def _values(setting: ExportedSetting) -> dict[str, Any]:
    [text] = [file.text for file in setting.files if file.name.endswith(".json")]
    values: dict[str, Any] = json.loads(text)
    return values


def _worker(python: str, engine: str, request: Request) -> Answers:
    script = HERE / "export_workers" / f"{engine}_generate.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    answers: Answers = json.loads(done.stdout.splitlines()[-1])
    return answers


def llama_cpp(server: str, setting: ExportedSetting, place: Path, request: Request) -> Answers:
    """The command that was exported, with caches in float32 and one slot."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    caches = [f"--{whose}type-{kind}" for whose in ("cache-", "spec-draft-") for kind in "kv"]
    more = [
        *(word for flag in caches for word in (flag, "f32")),
        "--parallel",
        "1",
        "--ctx-size",
        "2048",
        "--threads",
        "1",
    ]
    log = place / "llama-server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [server, *setting.argv[1:], *more, "--port", port], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        return _served(f"http://127.0.0.1:{port}", process, request)
    except RuntimeError as error:
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if " E " in line or "error" in line
        ]
        raise RuntimeError(f"{error}: {' / '.join(lines[-4:])}") from None
    finally:
        process.kill()
        process.wait()


def _served(url: str, process: subprocess.Popen[bytes], request: Request) -> Answers:
    until = time.monotonic() + START_TIMEOUT_S
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{shlex.join(map(str, process.args[:1]))} does not start")  # type: ignore[index]
        time.sleep(0.2)
    answers = []
    for prompt, length in zip(request["prompts"], request["lengths"], strict=True):
        body = {"prompt": prompt, "n_predict": length, "temperature": 0, "samplers": ["temperature"]}
        reply = httpx2.post(
            f"{url}/completion", json={**body, "return_tokens": True, "cache_prompt": False}, timeout=600
        ).json()
        # it drafts no token that the length would cut, so every pass ends with a token of the target's own
        accepted = reply["timings"].get("draft_n_accepted", 0)
        answers.append([reply["tokens"], len(reply["tokens"]) - accepted])
    version = httpx2.get(f"{url}/props").json()["build_info"]
    return {"version": version, "answers": answers}


def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/health").status_code == 200
    return False


if __name__ == "__main__":
    main()

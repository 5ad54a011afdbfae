"""Do the engines' own parsers accept what `slipstream export` writes, and refuse what is wrong?

    python -m benchmarks.export_parsers --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --transformers-python VENV/bin/python --llama-server BINARY

Engines that are not given are left as they were in the result. Each engine also gets settings that it must refuse: a
parser that takes anything would prove nothing. No weights of a target are loaded, except by Transformers, whose
exported programs are run.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import write_result
from benchmarks.harness.processes import answer_of
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.profiling.provenance import provenance
from slipstream.tools.export import ENGINES, SpeculativeRecord
from slipstream.tools.export.head_facts import head_facts
from slipstream.tools.export.record import NgramLookup, ScheduleRange, TreeShape
from slipstream.tools.export.settings.openvino import OPTIONS
from slipstream.tools.export.settings.vllm import KEYS

HERE = Path(__file__).parent
RESULT = DOCS / "export.json"
TIMEOUT_S = 500.0
VERSIONS = {"vllm": "0.32", "llama-cpp": "2026-09"}
"""Versions of the environments, where they are not the newest that is known; llama.cpp is that of llama-cpp-python."""

_DRAFT = SpeculativeRecord(method="draft_model", target=EMBEDDED_TARGET, model=EMBEDDED_DRAFT, depth=4)
_EAGLE3 = replace(_DRAFT, method="eagle3", model=EMBEDDED_EAGLE3, head=head_facts(EMBEDDED_EAGLE3))
_NGRAM = SpeculativeRecord(method="ngram", target=EMBEDDED_TARGET, depth=5, ngram=NgramLookup(2, 4))
_SCHEDULE = (ScheduleRange(1, 8, 4), ScheduleRange(9, 64, 2), ScheduleRange(65, None, 0))
RECORDS = {
    "off": SpeculativeRecord(method="off", target=EMBEDDED_TARGET),
    "draft_model": _DRAFT,
    "draft_model, sampled": replace(_DRAFT, draft_sampling="sampled"),
    "draft_model, greedy, rejection": replace(_DRAFT, draft_sampling="one_hot", verify="rejection"),
    "draft_model, block": replace(_DRAFT, draft_sampling="sampled", verify="block"),
    "draft_model, schedule": replace(_DRAFT, schedule=_SCHEDULE),
    "draft_model, threshold": replace(_DRAFT, confidence_threshold=0.3),
    "eagle3, chain": _EAGLE3,
    "eagle3, schedule": replace(_EAGLE3, schedule=_SCHEDULE),
    "eagle3, tree of 6": replace(_EAGLE3, depth=3, tree=TreeShape(top_k=2, num_nodes=6)),
    "eagle3, widest tree": replace(_EAGLE3, depth=3, tree=TreeShape(top_k=2, num_nodes=10)),
    "ngram": _NGRAM,
    "ngram, one length": replace(_NGRAM, ngram=NgramLookup(3, 3)),
    "layer_skip": SpeculativeRecord(method="layer_skip", target=EMBEDDED_TARGET, depth=3, exit_layer=3),
}
_FROM_THE_ENGINE = frozenset(
    {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
)
"""Fields of vLLM's configuration that it fills in itself."""
WRONG: dict[str, dict[str, Any]] = {
    "vllm": {
        "unknown key": [EMBEDDED_TARGET, "--speculative-config", '{"method": "ngram", "num_tokens": 4}'],
        "unknown method": [
            EMBEDDED_TARGET,
            "--speculative-config",
            '{"method": "hydra", "num_speculative_tokens": 4}',
        ],
        "zero tokens": [
            EMBEDDED_TARGET,
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 0}',
        ],
    },
    "openvino": {
        "fewer tokens than levels": {"num_assistant_tokens": 2, "branching_factor": 2, "tree_depth": 3},
        "threshold and number": {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.4},
        "unknown name": {"num_draft_tokens": 4},
    },
    "transformers": {
        "unknown keyword": ENGINES["transformers"]
        .to_engine(_NGRAM)
        .files[1]
        .text.replace("prompt_lookup_num_tokens", "num_draft_tokens")
    },
    "llama-cpp": {
        "unknown flag": ["--model", "t.gguf", "--spec-draft-tokens", "4"],
        "unknown type": ["--model", "t.gguf", "--spec-type", "draft-hydra"],
        "a removed flag": ["--model", "t.gguf", "--draft-max", "4"],
    },
}
UNCHECKED = {
    "openvino": {"widest tree + 1": {"num_assistant_tokens": 11, "branching_factor": 2, "tree_depth": 3}}
}
"""What an engine's documentation excludes; the verdict says whether its parser does."""


def main() -> None:
    parser = command(__doc__, RESULT)
    for engine in ("vllm", "openvino", "transformers"):
        parser.add_argument(f"--{engine}-python", help=f"Python of an environment with {engine}")
    parser.add_argument("--llama-server", help="the binary")
    options = parser.parse_args()
    engines = json.loads(options.output.read_text())["engines"] if options.output.exists() else {}
    runs: dict[str, tuple[str | None, Callable[[str, Mapping[str, Any]], dict[str, Any]]]] = {
        "vllm": (options.vllm_python, _worker("vllm")),
        "openvino": (options.openvino_python, _worker("openvino")),
        "transformers": (options.transformers_python, _worker("transformers")),
        "llama-cpp": (options.llama_server, _llama_server),
    }
    for engine, (program, run) in runs.items():
        if program is not None:
            engines[engine] = judged(engine, program, run)
            print(f"{engine}: {json.dumps(engines[engine]['summary'])}", flush=True)
    origin = {key: value for key, value in provenance().items() if key != "command"}
    write_result(options.output, {"provenance": origin, "engines": engines})


def judged(
    engine: str, program: str, run: Callable[[str, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Verdicts on all records that the engine supports, in its installed version, and on the wrong settings."""
    version = VERSIONS.get(engine)
    given, refused = cases(engine, version)
    found = run(program, {**given, **{f"wrong: {name}": case for name, case in WRONG[engine].items()}})
    verdicts = found["verdicts"]
    if engine == "vllm":
        known = KEYS[str(version)]
        unknown = sorted(set(found["keys"]) - known - _FROM_THE_ENGINE)
        gone = sorted(known - set(found["keys"]))
        print(f"keys of vLLM that are not known here: {unknown}; known here and not there: {gone}")
    beyond = UNCHECKED.get(engine, {})
    unchecked = run(program, beyond)["verdicts"] if beyond else {}
    right = {name: verdicts[name] for name in given}
    wrong = {name: verdicts[f"wrong: {name}"] for name in WRONG[engine]}
    return {
        "version": found["version"],
        "summary": {
            "accepted": sum(each["accepted"] for each in right.values()),
            "of": len(right),
            "wrong ones refused": sum(not each["accepted"] for each in wrong.values()),
            "of wrong ones": len(wrong),
        },
        "records": _without_paths(right),
        "wrong": _without_paths(wrong),
        "beyond its documentation": unchecked,
        "refused by slipstream": _without_paths(refused),
    }


def cases(engine: str, version: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """(name to what the engine's parser reads, name to why Slipstream refuses to write it)."""
    given: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, record in RECORDS.items():
        try:
            setting = ENGINES[engine].to_engine(record, version)
        except ValueError as error:
            refused[name] = str(error)
            continue
        texts = {file.name.rpartition(".")[2]: file.text for file in setting.files}
        if engine == "vllm":
            given[name] = setting.argv[2:]
        elif engine == "llama-cpp":
            given[name] = setting.argv[1:]
        elif engine == "openvino":
            values = json.loads(texts["json"])
            given[name] = {key: values[key] for key in OPTIONS if key in values}
        else:
            given[name] = texts["py"]
    return given, refused


def _worker(name: str) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    def run(python: str, given: Mapping[str, Any]) -> dict[str, Any]:
        return answer_of([python, HERE / "export_workers" / f"{name}_parser.py"], given, timeout_s=TIMEOUT_S)

    return run


def _llama_server(binary: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags are parsed in order and `--version` ends the program, so what comes before it was accepted."""
    verdicts = {}
    for name, words in given.items():
        done = subprocess.run([binary, *words, "--version"], capture_output=True, text=True, timeout=60)
        text = (done.stdout + done.stderr).strip()
        accepted = done.returncode == 0 and "version" in text
        verdicts[name] = {"accepted": accepted} | ({} if accepted else {"error": text.splitlines()[-1:]})
    return {"version": llama_version(binary), "verdicts": verdicts}


def llama_version(binary: str) -> str:
    """What `llama-server --version` says: version, build and commit."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60)
    lines = (done.stdout + done.stderr).splitlines()
    return next(line.removeprefix("version:").strip() for line in lines if line.startswith("version:"))


def _without_paths(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    for path, name in (
        (EMBEDDED_TARGET, "TARGET"),
        (EMBEDDED_DRAFT, "DRAFT"),
        (EMBEDDED_EAGLE3, "EAGLE3"),
    ):
        text = text.replace(path, name)
    return json.loads(text)


if __name__ == "__main__":
    main()

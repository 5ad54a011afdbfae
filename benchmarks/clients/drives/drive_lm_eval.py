"""lm-evaluation-harness: `local-completions` at the server against its own `hf` model, on the tasks in `../tasks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from wire import Job, Report, expect, run

TASKS = Path(__file__).parents[1] / "tasks"
NAMES = ("slipstream_choice", "slipstream_text", "slipstream_write")
TOLERANCE = 2e-3
"""Natural logarithms, of the sum over an answer's or a text's tokens; a text has up to 700."""


def evaluate(
    job: Job, label: str, model: str, arguments: dict[str, Any], *flags: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tool's own results, and its samples by task, in the order of the documents."""
    tasks = Path(job.folder) / "tasks"
    tasks.mkdir(exist_ok=True)
    for file in TASKS.iterdir():
        text = file.read_text(encoding="utf-8").replace("FOLDER", str(tasks))
        (tasks / file.name).write_text(text, encoding="utf-8")
    output = Path(job.folder) / label
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", model),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(NAMES), "--include_path", str(tasks)),
        *("--output_path", str(output), "--log_samples", "--device", "cpu", *flags),
    ]
    environment = {**os.environ, "OPENAI_API_KEY": job.api_key}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:])
    [results] = output.rglob("results_*.json")
    samples = {}
    for name in NAMES:
        [file] = output.rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        samples[name] = sorted(rows, key=lambda row: int(row["doc_id"]))
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))["results"]
    return found, samples


def log_likelihoods(samples: dict[str, Any], task: str) -> list[float]:
    """Return the log-likelihood of every answer, or of every text."""
    return [
        float(answer[0][0] if isinstance(answer[0], list) else answer[0])
        for row in samples[task]
        for answer in row["resps"]
    ]


def greedy(samples: dict[str, Any]) -> list[bool]:
    """Whether each answer is the one that the model would give."""
    return [str(answer[0][1]) == "True" for row in samples["slipstream_choice"] for answer in row["resps"]]


def numbers(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        task: {name.split(",")[0]: value for name, value in results[task].items() if isinstance(value, float)}
        for task in NAMES
    }


def drive(job: Job, report: Report) -> None:
    theirs, their_samples = evaluate(job, "hf", "hf", {"pretrained": job.tokenizer, "dtype": "float32"})
    report.figures["hf"] = numbers(theirs)
    for label, (extra, flags) in {
        "one at a time": ({}, ()),
        "batches of 8, 4 at once": ({"num_concurrent": 4}, ("--batch_size", "8")),
    }.items():
        with report.check(f"local-completions, {label}: the numbers of Transformers") as told:
            arguments = {
                "model": job.model,
                "base_url": f"{job.base_url}/v1/completions",
                "tokenizer": job.tokenizer,
                "max_retries": 1,
                **extra,
            }
            ours, our_samples = evaluate(job, label.replace(" ", "-"), "local-completions", arguments, *flags)
            report.figures[label] = numbers(ours)
            for task in ("slipstream_choice", "slipstream_text"):
                pairs = list(
                    zip(log_likelihoods(our_samples, task), log_likelihoods(their_samples, task), strict=True)
                )
                told[f"{task}_num_scores"] = len(pairs)
                told[f"{task}_largest_difference"] = max(abs(one - other) for one, other in pairs)
                expect(told[f"{task}_largest_difference"] < TOLERANCE, f"{task}: log-likelihoods differ")
            expect(greedy(our_samples) == greedy(their_samples), "what is greedy differs")
            told["num_greedy"] = sum(greedy(our_samples))
            texts = [
                [row["resps"][0][0] for row in samples["slipstream_write"]]
                for samples in (our_samples, their_samples)
            ]
            told["num_texts"] = len(texts[0])
            told["num_equal_texts"] = sum(one == other for one, other in zip(*texts, strict=True))
            expect(texts[0] == texts[1], "greedy texts differ")
            for task, found in numbers(ours).items():
                for name, value in found.items():
                    expect(
                        abs(value - report.figures["hf"][task][name]) < 1e-3 * max(1.0, abs(value)),
                        f"{task}: {name}",
                    )


if __name__ == "__main__":
    run(("lm_eval", "torch", "transformers"), drive)

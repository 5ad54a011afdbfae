"""A process that measures itself while the embedded target runs: `python -m slipstream.engine.process_probe`.

It prints one JSON object with the fields of `slipstream.plan.process.ProcessMemory`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import psutil

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.draft.methods import DRAFT_MODEL
from slipstream.engine.llm import LLM
from slipstream.plan.process import ProcessMemory
from slipstream.sampling.params import SamplingParams

MAX_MODEL_LEN = 256


def main() -> None:
    """Run a few sampled answers, and print the process's memory next to what the embedded pair holds.

    With a draft model, whose tokenizer and code are part of what a process takes.
    """
    draft = {"method": DRAFT_MODEL.name, "model": EMBEDDED_DRAFT}
    llm = LLM(speculative_config=draft, max_model_len=MAX_MODEL_LEN, max_num_seqs=2)
    plan = llm.engine.memory_plan
    weight_bytes = plan.target_bytes + plan.draft_bytes
    loading_bytes = _resident_bytes() - weight_bytes
    prompts = [[5 + (start + place) % 90 for place in range(MAX_MODEL_LEN - 16)] for start in range(4)]
    llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=1))
    stats = llm.engine.stats()
    kv_bytes = plan.kv_bytes * (stats.num_held_slots + stats.num_retained_slots) // plan.num_slots
    running_bytes = _resident_bytes() - weight_bytes - kv_bytes - plan.activation_bytes
    print(json.dumps(asdict(ProcessMemory(loading_bytes, max(running_bytes, loading_bytes)))))


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()

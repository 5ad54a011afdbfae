"""What SGLang and TensorRT-LLM document of their settings, written down here, since neither runs without a GPU.

SGLang: the flags of `python/sglang/srt/arg_groups/fields/spec.py` and the rules of `arg_groups/speculative_hook.py` and
`speculative/adaptive_spec_params.py`. TensorRT-LLM: `docs/source/features/speculative-decoding.md` and the fields and
validators of `tensorrt_llm/llmapi/llm_args.py`. All read in November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SGLANG_FLAGS: dict[str, type | tuple[str, ...] | None] = {
    "--model-path": str,
    "--speculative-algorithm": ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"),
    "--speculative-draft-model-path": str,
    "--speculative-draft-model-revision": str,
    "--speculative-num-steps": int,
    "--speculative-eagle-topk": int,
    "--speculative-num-draft-tokens": int,
    "--speculative-use-rejection-sampling": None,
    "--speculative-use-block-verification": None,
    "--speculative-token-map": str,
    "--speculative-adaptive": None,
    "--speculative-adaptive-config": str,
    "--speculative-ngram-min-bfs-breadth": int,
    "--speculative-ngram-max-bfs-breadth": int,
    "--speculative-ngram-match-type": ("BFS", "PROB"),
    "--speculative-ngram-max-trie-depth": int,
    "--speculative-ngram-capacity": int,
}
"""Flag to the type of its value, its choices, or None for a switch."""

TENSORRT_FIELDS: dict[str, dict[str, type]] = {
    "DraftTarget": {},
    "DFlash": {},
    "NGram": {
        "max_matching_ngram_size": int,
        "is_keep_all": bool,
        "is_use_oldest": bool,
        "is_public_pool": bool,
    },
    "MTP": {"num_nextn_predict_layers": int, "mtp_eagle_one_model": bool},
    "SA": {"max_matching_ngram_size": int, "enable_global_pool": bool},
    "Eagle3": {
        "use_dynamic_tree": bool,
        "dynamic_tree_max_topK": int,
        "eagle3_one_model": bool,
        "eagle3_layers_to_capture": list,
        "eagle3_model_arch": str,
        "sa_config": dict,
    },
}
TENSORRT_BASE: dict[str, type] = {
    "decoding_type": str,
    "max_draft_len": int,
    "max_total_draft_tokens": int,
    "speculative_model": str,
    "max_concurrency": int,
    "draft_len_schedule": dict,
    "load_format": str,
    "acceptance_window": int,
    "acceptance_length_threshold": float,
    "use_rejection_sampling": bool,
}
"""Fields of every `decoding_type`; others are refused (`StrictBaseModel`)."""


def sglang_faults(words: Sequence[str], files: Mapping[str, Any]) -> list[str]:
    """What the server would say against a command; `files` are the JSON files next to it."""
    given: dict[str, Any] = {}
    faults: list[str] = []
    rest = list(words)
    while rest:
        flag = rest.pop(0)
        if flag not in SGLANG_FLAGS:
            faults.append(f"unknown flag {flag}")
            continue
        kind = SGLANG_FLAGS[flag]
        value: Any = True if kind is None else rest.pop(0)
        if kind is int:
            value = int(value)
        elif isinstance(kind, tuple) and value not in kind:
            faults.append(f"{flag} {value}")
        given[flag.removeprefix("--speculative-")] = value
    return faults + _sglang_rules(given, files)


def _sglang_rules(given: Mapping[str, Any], files: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    algorithm = given.get("algorithm")
    if algorithm == "NEXTN":  # another name of EAGLE, with the target's own layer
        algorithm, given = "EAGLE", {"draft-model-path": "", **given}
    if algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        steps, top_k, tokens = (given.get(name) for name in ("num-steps", "eagle-topk", "num-draft-tokens"))
        if steps is None or top_k is None or tokens is None:
            return ["its three numbers are given together"]
        if top_k == 1 and tokens != steps + 1:
            faults.append("a chain has steps + 1 draft tokens")
        if tokens - 1 > top_k + top_k * top_k * (
            steps - 1
        ):  # the scores that `organize_draft_results` chooses from
            faults.append("more draft tokens than the tree has")
        if "draft-model-path" not in given:
            faults.append("no draft model")
    for switch in ("use-rejection-sampling", "use-block-verification"):
        if switch in given and (algorithm not in ("EAGLE", "EAGLE3") or given["eagle-topk"] != 1):
            faults.append(f"{switch} is for EAGLE chains")
    if "adaptive" in given:
        if algorithm not in ("EAGLE", "EAGLE3") or given["eagle-topk"] != 1:
            faults.append("adaptive is for EAGLE chains")
        config = files[given["adaptive-config"]]
        slots = {int(key): slot["candidate_steps"] for key, slot in config.items() if key.isdigit()}
        if config["strategy"] not in ("ema", "throughput_aware") or not slots:
            faults.append("adaptive config without slots")
        if not all(isinstance(step, int) and step >= 0 for steps in slots.values() for step in steps):
            faults.append("candidate_steps must be non-negative numbers")
    return faults


def tensorrt_faults(config: Mapping[str, Any]) -> list[str]:
    """What `llm_args` would say against the `speculative_config` of a YAML file."""
    kind = config.get("decoding_type")
    if kind not in TENSORRT_FIELDS:
        return [f"unknown decoding_type {kind}"]
    fields = {**TENSORRT_BASE, **TENSORRT_FIELDS[kind]}
    faults = [f"unknown field {name}" for name in config if name not in fields]
    faults += [
        f"{name} is no {fields[name].__name__}"
        for name, value in config.items()
        if name in fields and not isinstance(value, fields[name])
    ]
    depth = config.get("num_nextn_predict_layers" if kind == "MTP" else "max_draft_len", 0)
    if depth <= 0:
        faults.append("max_draft_len must be above 0")
    if kind in ("DraftTarget", "Eagle3") and "speculative_model" not in config:
        faults.append("no draft model")
    if config.get("use_dynamic_tree"):
        top_k, total = config["dynamic_tree_max_topK"], config["max_total_draft_tokens"]
        if not depth <= total <= top_k * depth:
            faults.append("max_total_draft_tokens out of range")
    schedule = config.get("draft_len_schedule")
    if schedule is not None:
        if 1 not in schedule or schedule[min(schedule)] != depth:
            faults.append("the smallest key, 1, must have max_draft_len")
        if any(key < 1 or not 0 <= length <= depth for key, length in schedule.items()):
            faults.append("a length is out of range")
    return faults

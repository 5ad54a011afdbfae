"""The tables of `docs/guides/from-vllm.md`, key by key, from what the code accepts. `docs/generate.py` writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from slipstream import vllm_names
from slipstream.config import EngineConfig
from slipstream.sampling.params import SamplingParams
from slipstream.serve.accounts import TaskLabels
from slipstream.serve.api.unsupported import HARMLESS, UNSUPPORTED
from slipstream.serve.metrics.metrics import Metrics
from slipstream.vllm_names import ANYTHING, Unsupported

ENGINE_NOTES = {
    "dtype": "`half` and `float` are `float16` and `float32`; `torch.bfloat16` works too. On a CPU it says how weights "
    "are kept; the arithmetic is float32",
    "quantization": "`int8`, `int4`, `int4_g64`, `int4_g128`, `bfloat16`, `float16`, `float32`, or a package's "
    "[weight format](../extend/weight-format.md): a plain checkpoint is converted while it is loaded",
    "gpu_memory_utilization": "share of the device's whole memory for weights, keys and values; "
    "on a CPU the device is the machine",
    "max_model_len": "`-1` and `auto` are the model's own",
    "attention_backend": "the names are Slipstream's: `auto`, `native`, `native_layers`, `packed`, `cache_adapter`, "
    "or a package's",
    "kv_cache_dtype": "`auto`, `float32`, `bfloat16`, `float16`, `int8`; for `fp8` take `int8`",
    "seed": "where requests give none, their seeds are drawn from it",
}
"""Engine keys that vLLM and Slipstream share, with a remark where the values differ."""
ENGINE_SAME = (
    *("model", "tokenizer", "revision", "trust_remote_code", "dtype", "quantization", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching", "seed"),
    *("generation_config", "override_generation_config", "attention_backend", "kv_cache_dtype"),
)
OUR_SAMPLING = {"structured"}
"""Fields of `SamplingParams` that vLLM has not."""
SAMPLING_NOTES = {
    "seed": "`-1` draws one. A seed gives another text than in vLLM",
    "output_kind": "accepted, changes nothing: `LLM` gives what is finished, `AsyncEngine` what is new",
    "extra_args": "kept; nothing reads them",
    "n": "allowed above 1 with `temperature=0` too: the answers are equal",
    "structured_outputs": "followed by llguidance",
}
SPECULATIVE_SAME = (
    *("model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("draft_sample_method", "quantization", "revision"),
)
"""Keys of `speculative_config` with vLLM's name and meaning, for the drafters that have them."""
METHODS_SAME = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa")


def engine_keys() -> list[str]:
    """`LLM(...)` and `EngineArgs`."""
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    assert own.issuperset(ENGINE_SAME)
    same = [(name, ENGINE_NOTES.get(name, "the same")) for name in ENGINE_SAME]
    same += [
        ("speculative_config", "the same keys, [see below](#speculative_config)"),
        ("kv_cache_memory_bytes", "`kv_cache_bytes`"),
    ]
    return _table("engine key", [*same, *_unsupported_rows(vllm_names.ENGINE)])


def sampling_keys() -> list[str]:
    """`SamplingParams`."""
    own = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in OUR_SAMPLING]
    same = [(name, SAMPLING_NOTES.get(name, "the same")) for name in own]
    return _table("sampling parameter", [*same, *_unsupported_rows(vllm_names.SAMPLING)])


def call_keys() -> list[str]:
    """Arguments of `generate` and `chat`, keys of prompts, methods of `LLM`."""
    return [
        *_table("argument of `generate` or `chat`", _unsupported_rows(vllm_names.CALL)),
        *_table("key of a prompt", _unsupported_rows(vllm_names.PROMPT)),
        *_table("method of `LLM`", [(f"{name}()", advice) for name, advice in vllm_names.METHODS.items()]),
    ]


def speculative_keys(options: Mapping[str, type]) -> list[str]:
    """`speculative_config`: methods, then keys. `options` are the option classes of the drafters, by name."""
    methods = [(name, "the same") for name in METHODS_SAME]
    methods += [(name, f"`{ours}`") for name, ours in vllm_names.METHOD_SYNONYMS.items()]
    methods += [(name, f"not here: {advice}") for name, advice in vllm_names.METHODS_ELSEWHERE.items()]
    keys = [("method", "the same; without it the model's configuration or name tells, as in vLLM")]
    keys += [(name, f"the same, for {', '.join(_drafters_with(name, options))}") for name in SPECULATIVE_SAME]
    keys.append(
        (
            "rejection_sample_method",
            "`block` is `verifier: block`; `standard` leaves our verifier, which is lossless too",
        )
    )
    keys += [
        (name, f"with another drafter: {here}" if name in SPECULATIVE_SAME else here)
        for name, here in _unsupported_rows(vllm_names.SPECULATIVE)
    ]
    return [*_table("`method`", methods), *_table("other key", keys)]


def request_parameters() -> list[str]:
    """Names in the body of a request that are not Slipstream's: vLLM's and those of other servers."""
    rows = []
    for name, advice in UNSUPPORTED.items():
        values = " or ".join(f"`{json.dumps(value)}`" for value in HARMLESS.get(name, ()))
        rows.append(
            (
                name,
                f"{values} is accepted, anything else refused: {advice}" if values else f"refused: {advice}",
            )
        )
    return _table("parameter of a request", rows)


def metric_names() -> list[str]:
    """What `/metrics` shows under vLLM's names with `--metrics-alias vllm`."""
    text = Metrics("m", TaskLabels([], 0), "vllm").exposition().decode()
    found = {
        family.name.removeprefix("vllm:"): family.documentation
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:")
    }
    return _table("metric, with the prefix `vllm:`", sorted(found.items()))


def filled(page: str, options: Mapping[str, type]) -> str:
    """The page with every section between `<!-- keys: NAME -->` and `<!-- end -->` written anew."""
    sections = {
        "engine": engine_keys(),
        "sampling": sampling_keys(),
        "call": call_keys(),
        "speculative": speculative_keys(options),
        "requests": request_parameters(),
        "metrics": metric_names(),
    }
    for name, lines in sections.items():
        begin, end = f"<!-- keys: {name} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]
    return page


def _drafters_with(key: str, options: Mapping[str, type]) -> list[str]:
    """Drafters with an option of this name."""
    return [
        f"`{method}`"
        for method, cls in options.items()
        if any(field.name == key for field in dataclasses.fields(cls))
    ]


def _unsupported_rows(names: Mapping[str, Unsupported]) -> list[tuple[str, str]]:
    return [(name, _said_of(unsupported)) for name, unsupported in names.items()]


def _said_of(unsupported: Unsupported) -> str:
    if any(value is ANYTHING for value in unsupported.neutral):
        return "accepted, changes nothing"
    values = " or ".join(f"`{_shown(value)}`" for value in unsupported.neutral)
    accepted = f"{values} is accepted, anything else " if values else ""
    return f"{accepted}refused: {unsupported.instead}"


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | str) else repr(value)


def _table(first: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each thing that is said, with all names of which it is said."""
    names: dict[str, list[str]] = {}
    for name, here in rows:
        names.setdefault(here.replace("|", "\\|"), []).append(f"`{name}`")
    return [
        f"| {first} | here |",
        "|---|---|",
        *(f"| {', '.join(of)} | {here} |" for here, of in names.items()),
        "",
    ]

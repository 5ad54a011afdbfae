"""OpenVINO GenAI. `options` of a mode: `draft`, `prompt_lookup`, and device properties.

Weights are compressed by NNCF through optimum-intel, as OpenVINO's documentation recommends; float32 rows force float32
arithmetic and a float32 cache, bfloat16 rows bfloat16 for both (the cache only where the processor has it), the others
keep the CPU plugin's own choice, which is its fastest. A GGUF file is read by the pipeline itself.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.loop import Answers, Loaded, serve

PRECISION = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
}


CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of which a processor that computes in bfloat16 has one; the last is ARM's name."""


class OpenVino:
    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        for name, value in options.items():
            setattr(config, name, value)
        width = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        started_s = time.perf_counter()
        result = self.pipeline.generate(inputs, config)
        seconds = time.perf_counter() - started_s
        first_ms = result.perf_metrics.get_ttft().mean
        return Answers([list(tokens) for tokens in result.tokens], seconds, first_ms / 1e3)


def load(request: dict[str, Any]) -> Loaded:
    options = dict(request["options"])
    precision = precision_of(request["weights"])
    properties = {"INFERENCE_NUM_THREADS": request["threads"], **precision}
    arguments: dict[str, Any] = {}
    if options.pop("draft", False):
        arguments["draft_model"] = openvino_genai.draft_model(request["draft"], "CPU", **properties)
    if options.pop("prompt_lookup", False):
        arguments["prompt_lookup"] = True
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the same prompts come again in every round
    scheduler.max_num_seqs = request["max_num_seqs"]
    room = request["max_model_len"] * request["max_num_seqs"]
    scheduler.cache_size = _cache_gib(Path(request["target"]), precision.get("KV_CACHE_PRECISION"), room)
    if "max_num_batched_tokens" in options:
        scheduler.max_num_batched_tokens = options.pop("max_num_batched_tokens")
    if options.get("ATTENTION_BACKEND") != "SDPA":
        arguments["scheduler_config"] = scheduler
    pipeline = openvino_genai.LLMPipeline(request["target"], "CPU", **properties, **options, **arguments)
    notes = [f"{name}={value}" for name, value in {**properties, **options}.items()]
    versions = {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}
    return Loaded(OpenVino(pipeline), versions, [*notes, "prefix caching off"])


def precision_of(weights: str) -> dict[str, str]:
    """A bfloat16 cache is refused on processors without bfloat16: there it is float32."""
    precision = dict(PRECISION.get(weights, {}))
    known = set(CPUINFO.read_text().split()) if CPUINFO.is_file() else BFLOAT16_FLAGS
    if precision.get("KV_CACHE_PRECISION") == "bf16" and not known & BFLOAT16_FLAGS:
        precision["KV_CACHE_PRECISION"] = "f32"
    return precision


def _cache_gib(model: Path, precision: str | None, num_tokens: int) -> int:
    """Whole GiB with room for so many tokens of the target, and a fifth more for a draft model and for blocks.

    One GiB for a GGUF file, which holds a small model where this is used.
    """
    if model.is_file():
        return 1
    config = json.loads((model / "config.json").read_text())
    entries = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    entry_bytes = {"f32": 4, "bf16": 2}.get(precision or "", 1.25)  # eight bits and their scales
    return max(1, math.ceil(1.2 * num_tokens * entries * entry_bytes / 2**30))


def convert(source: Path, target: Path, weights: str) -> None:
    """Write `source` as an OpenVINO model with the given weight format, its tokenizer included."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantization = {
        "float32": None,
        "bfloat16": None,
        "int8": OVWeightQuantizationConfig(bits=8),
        "int4": OVWeightQuantizationConfig(bits=4, group_size_fallback="adjust"),
    }[weights]
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, quantization_config=quantization
    )
    model.save_pretrained(target)
    _save_tokenizer(source, target)


def _save_tokenizer(source: Path, target: Path) -> None:
    """The pipeline wants a tokenizer beside the model, even where it is fed token ids."""
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    openvino.save_model(tokenizer, target / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, target / "openvino_detokenizer.xml")


if __name__ == "__main__":
    serve(load, convert)

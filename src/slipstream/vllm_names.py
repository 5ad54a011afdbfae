"""vLLM's names without an effect here: accepted at their neutral values, refused at any other.

Names with the same meaning are fields of Slipstream's own classes and are not listed here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.draft import methods
from slipstream.errors import ConfigError, SlipstreamError

logger = logging.getLogger(__name__)

ANYTHING = object()
"""Marks a name that changes neither text nor outputs at any value."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One of vLLM's names: its neutral values in addition to None, and advice for the others."""

    neutral: tuple[Any, ...] = ()
    instead: str = "omit it"

    def takes(self, value: Any) -> bool:
        """True for a neutral value."""
        if value is None or any(one is ANYTHING for one in self.neutral):
            return True
        return any(type(one) is type(value) and one == value for one in self.neutral)


def split_off(
    given: Mapping[str, Any],
    names: Mapping[str, Unsupported],
    what: str,
    error: Callable[[str], SlipstreamError],
) -> tuple[dict[str, Any], list[str]]:
    """(the items of `given` whose names are not in `names`, the names that were dropped at neutral values).

    Raises `error` for a value that is not neutral; `what` is what the message calls the name.
    """
    own: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in given.items():
        if name not in names:
            own[name] = value
        elif names[name].takes(value):
            dropped.append(name)
        else:
            raise error(f"{what} {name}={value!r} is vLLM's and is not available here; {names[name].instead}")
    return own, dropped


SAMPLING = {
    "best_of": Unsupported((1,), "ask for n answers with logprobs and choose among them"),
    "use_beam_search": Unsupported((False,), "ask for n answers with logprobs and choose among them"),
    "length_penalty": Unsupported((1.0, 1)),
    "early_stopping": Unsupported((False,)),
    "flat_logprobs": Unsupported((False,), "logprobs are lists of dictionaries"),
    "guided_decoding": Unsupported((), "use structured_outputs"),
    "logits_processors": Unsupported(
        ((), []), "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
    ),
    "logprob_token_ids": Unsupported((), "use logprobs=-1 and pick the tokens"),
    "prompt_logprob_token_ids": Unsupported((), "use prompt_logprobs=-1 and pick the tokens"),
    "prompt_logprob_start": Unsupported((), "use prompt_logprobs, which begin with the prompt"),
    "priority": Unsupported((0,), "requests run in the order in which they come"),
    "repetition_detection": Unsupported((), "use repetition_penalty, or stop"),
    "skip_clone": Unsupported((ANYTHING,)),
    "skip_reading_prefix_cache": Unsupported((False,), "use enable_prefix_caching=False for the engine"),
    "spaces_between_special_tokens": Unsupported(
        (True,), "special tokens are shown as the tokenizer writes them"
    ),
    "stream_interval": Unsupported((1,), "use stream_interval_s of AsyncEngine"),
    "thinking_token_budget": Unsupported((-1,), "use max_tokens"),
    "truncate_prompt_tokens": Unsupported((-1,), "cut the prompt's token ids before the call"),
}
"""vLLM's names in `SamplingParams`."""

CALL = {
    "guided_options_request": Unsupported((), "use structured_outputs of SamplingParams"),
    "lora_request": Unsupported(
        (), "give lora to LLM: one adapter is merged into the model when it is loaded"
    ),
    "mm_processor_kwargs": Unsupported(({},), "models read text only"),
    "priority": Unsupported((0, []), "requests run in the order in which they come"),
    "prompt_adapter_request": Unsupported(),
    "prompt_token_ids": Unsupported((), 'give them as prompts: {"prompt_token_ids": [...]}'),
    "tokenization_kwargs": Unsupported(({},), "tokenize with get_tokenizer() and give token ids"),
    "chat_template_content_format": Unsupported(
        ("auto", "string"), "parts of text are joined, others are refused"
    ),
}
"""vLLM's names in `LLM.generate` and `LLM.chat`."""

PROMPT = {
    "multi_modal_data": Unsupported(({},), "models read text only"),
    "multi_modal_uuids": Unsupported(({},), "models read text only"),
    "mm_processor_kwargs": Unsupported(({},), "models read text only"),
    "cache_salt": Unsupported(("",), "use tenant, which shares nothing with other tenants"),
    "prompt_embeds": Unsupported((), "give text or token ids"),
    "token_type_ids": Unsupported(),
    "type": Unsupported(("text", "token", "tokens")),
}
"""vLLM's keys of a prompt that is a mapping."""

METHODS = {
    "apply_model": "llm.engine.model.model is the Transformers model",
    "beam_search": "ask for n answers with logprobs and choose among them",
    "classify": "models here write text only",
    "collective_rpc": "the engine is one process: llm.engine",
    "embed": "models here write text only",
    "encode": "models here write text only",
    "enqueue": "use AsyncEngine",
    "get_metrics": "outputs carry their own: output.metrics",
    "llm_engine": "llm.engine is ours",
    "reward": "models here write text only",
    "score": "models here write text only",
    "set_tokenizer": "give tokenizer to LLM",
    "sleep": "delete the LLM to free its memory",
    "start_profile": "use a profiler around the call",
    "stop_profile": "use a profiler around the call",
    "wait_for_completion": "use AsyncEngine",
    "wake_up": "make a new LLM",
}
"""Methods of vLLM's `LLM`, and what to do instead."""

_ONE_PROCESS = "a model runs in one process on one device"
_TEXT_ONLY = "models read and write text only"
_CAPTURE = "passes are recorded in sizes of their own, on a GPU; omit it"
_MERGED = "give lora the folder of an adapter, which is merged into the model when it is loaded"
_HUB = "set HF_HOME, HF_TOKEN or HF_HUB_OFFLINE in the environment"
_SPECULATION = "use speculative_config"
_CONFIG = "edit the checkpoint's config.json"

ENGINE = {
    **dict.fromkeys(
        (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "prefill_context_parallel_size",
        ),
        Unsupported((1,), _ONE_PROCESS),
    ),
    "decode_context_parallel_size": Unsupported((1,), _ONE_PROCESS),
    "data_parallel_size_local": Unsupported((1,), _ONE_PROCESS),
    "distributed_executor_backend": Unsupported(("uni", "mp"), _ONE_PROCESS),
    "enable_expert_parallel": Unsupported((False,), _ONE_PROCESS),
    "nnodes": Unsupported((1,), _ONE_PROCESS),
    "worker_cls": Unsupported(("auto",), _ONE_PROCESS),
    "worker_extension_cls": Unsupported(("",), _ONE_PROCESS),
    "kv_transfer_config": Unsupported((), _ONE_PROCESS),
    "kv_events_config": Unsupported((), _ONE_PROCESS),
    "disable_custom_all_reduce": Unsupported((ANYTHING,)),
    "max_parallel_loading_workers": Unsupported((ANYTHING,)),
    "enforce_eager": Unsupported((ANYTHING,)),
    "compilation_config": Unsupported(({}, 0), _CAPTURE),
    "optimization_level": Unsupported((ANYTHING,)),
    "cudagraph_capture_sizes": Unsupported((), _CAPTURE),
    "max_seq_len_to_capture": Unsupported((ANYTHING,)),
    "async_scheduling": Unsupported((ANYTHING,)),
    "disable_log_stats": Unsupported((ANYTHING,)),
    "disable_log_requests": Unsupported((ANYTHING,)),
    "use_tqdm_on_load": Unsupported((ANYTHING,)),
    "use_v2_block_manager": Unsupported((ANYTHING,)),
    "disable_cascade_attn": Unsupported((ANYTHING,)),
    "disable_hybrid_kv_cache_manager": Unsupported((ANYTHING,)),
    "max_logprobs": Unsupported((ANYTHING,)),
    "block_size": Unsupported((ANYTHING,)),
    "swap_space": Unsupported((ANYTHING,)),
    "num_gpu_blocks_override": Unsupported((), "use kv_cache_bytes"),
    "num_lookahead_slots": Unsupported((0,)),
    "num_scheduler_steps": Unsupported((1,)),
    "preemption_mode": Unsupported(("recompute",), "preempted requests are computed again"),
    "cpu_offload_gb": Unsupported((0, 0.0), "use a smaller checkpoint, or quantization on a CPU"),
    "calculate_kv_scales": Unsupported((False,), "kv_cache_dtype int8 has a scale a head and token"),
    "override_attention_dtype": Unsupported((), "set kv_cache_dtype"),
    "enable_chunked_prefill": Unsupported(
        (True,), "prompts are computed in chunks of max_num_batched_tokens; raise that"
    ),
    "long_prefill_token_threshold": Unsupported((0,), "set max_num_batched_tokens"),
    "max_num_partial_prefills": Unsupported((1,), "set max_num_batched_tokens"),
    "max_long_partial_prefills": Unsupported((1,), "set max_num_batched_tokens"),
    "scheduling_policy": Unsupported(("fcfs",), "requests run in the order in which they come"),
    "scheduler_cls": Unsupported((), "requests run in the order in which they come"),
    "disable_sliding_window": Unsupported((False,), _CONFIG),
    "logprobs_mode": Unsupported(
        ("raw_logprobs",), "log-probabilities are the model's own, before any parameter"
    ),
    "logits_processors": Unsupported(
        ([],), "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
    ),
    "logits_processor_pattern": Unsupported(),
    "guided_decoding_backend": Unsupported(("auto", "guidance"), "the backend is llguidance"),
    "structured_outputs_config": Unsupported(
        ({}, {"backend": "auto"}, {"backend": "guidance"}), "the backend is llguidance"
    ),
    "reasoning_parser": Unsupported(("",), "texts are returned unparsed"),
    "task": Unsupported(("auto", "generate"), "models here write text only"),
    "runner": Unsupported(("auto", "generate"), "models here write text only"),
    "convert": Unsupported(("auto", "none"), "models here write text only"),
    "pooler_config": Unsupported((), "models here write text only"),
    "override_pooler_config": Unsupported((), "models here write text only"),
    "model_impl": Unsupported(("auto", "transformers"), "models are those of Transformers"),
    "load_format": Unsupported(("auto", "hf", "safetensors"), "give a folder in Hugging Face format"),
    "config_format": Unsupported(("auto", "hf"), "give a folder in Hugging Face format"),
    "tokenizer_mode": Unsupported(("auto", "hf"), "give a tokenizer in Hugging Face format"),
    "skip_tokenizer_init": Unsupported((False,), "a tokenizer is needed; detokenize=False saves its work"),
    "tokenizer_revision": Unsupported((), "give tokenizer the folder of that revision"),
    "code_revision": Unsupported((), "give model the folder of that revision"),
    "download_dir": Unsupported((), _HUB),
    "hf_token": Unsupported((False,), _HUB),
    "hf_config_path": Unsupported((), _CONFIG),
    "hf_overrides": Unsupported(({},), _CONFIG),
    "rope_scaling": Unsupported(({},), _CONFIG),
    "rope_theta": Unsupported((), _CONFIG),
    "ignore_patterns": Unsupported((), "remove unwanted files from the folder"),
    "model_loader_extra_config": Unsupported(({},)),
    "served_model_name": Unsupported((), "slipstream serve has --served-model-name"),
    "enable_lora": Unsupported((False,), _MERGED),
    **dict.fromkeys(
        (
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "lora_dtype",
            "lora_extra_vocab_size",
            "fully_sharded_loras",
        ),
        Unsupported((ANYTHING,)),
    ),
    "default_mm_loras": Unsupported(({},), _MERGED),
    "enable_prompt_embeds": Unsupported((False,), "give text or token ids"),
    "enable_sleep_mode": Unsupported((False,), "delete the LLM to free its memory"),
    "limit_mm_per_prompt": Unsupported(({}, {"image": 0}, {"image": 0, "video": 0}), _TEXT_ONLY),
    "mm_processor_kwargs": Unsupported(({},), _TEXT_ONLY),
    "media_io_kwargs": Unsupported(({},), _TEXT_ONLY),
    **dict.fromkeys(
        (
            "allowed_local_media_path",
            "mm_processor_cache_gb",
            "disable_mm_preprocessor_cache",
            "skip_mm_profiling",
        ),
        Unsupported((ANYTHING,)),
    ),
    "disable_chunked_mm_input": Unsupported((ANYTHING,)),
    "additional_config": Unsupported(({},)),
    "otlp_traces_endpoint": Unsupported((), "slipstream serve has --otlp-traces-endpoint"),
    "collect_detailed_traces": Unsupported((), "slipstream serve has --otlp-traces-endpoint"),
    "show_hidden_metrics_for_version": Unsupported((ANYTHING,)),
    "speculative_model": Unsupported((), _SPECULATION),
    "num_speculative_tokens": Unsupported((), _SPECULATION),
    "ngram_prompt_lookup_max": Unsupported((), _SPECULATION),
    "ngram_prompt_lookup_min": Unsupported((), _SPECULATION),
}
"""vLLM's names in the engine. Those with `ANYTHING` set speed, memory or logs of parts that Slipstream lacks."""

_ENGINE_SYNONYMS = {"kv_cache_memory_bytes": "kv_cache_bytes"}
_DTYPES = {"half": "float16", "float": "float32"}
_UNSET_BY_NONE = ("enable_prefix_caching", "generation_config", "max_num_batched_tokens", "max_num_seqs")
"""Names whose None means the default in vLLM."""


def own_engine_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine keys as fields of `EngineConfig`; keys without an effect are dropped with a warning.

    Raises `ConfigError` for a value that is not supported, with what to do instead.
    """
    own, dropped = split_off(given, ENGINE, "engine key", ConfigError)
    for theirs, ours in _ENGINE_SYNONYMS.items():
        if theirs in own:
            if own.get(ours) not in (None, own[theirs]):
                raise ConfigError(f"{theirs} and {ours} differ; omit one of them")
            own[ours] = own.pop(theirs)
    own = {name: value for name, value in own.items() if value is not None or name not in _UNSET_BY_NONE}
    if own.get("max_model_len") in (-1, "auto"):
        own["max_model_len"] = None
    if "dtype" in own:
        name = str(own["dtype"]).removeprefix("torch.")  # it may be torch's own
        own["dtype"] = _DTYPES.get(name, name)
    if "kv_cache_dtype" in own:
        name = str(own["kv_cache_dtype"]).removeprefix("torch.")
        if name.startswith("fp8"):
            raise ConfigError(f"kv_cache_dtype {name!r} is not supported; int8 is as small")
        own["kv_cache_dtype"] = _DTYPES.get(name, name)
    if dropped:
        logger.warning("ignored, because it has no effect here: %s", ", ".join(sorted(dropped)))
    return own


_LOOKUPS = tuple(
    name for method in methods.LOOKUPS for name in methods.METHODS[method].elsewhere[methods.VLLM]
)
"""Its names of drafters without a model, which may stand in the model's place."""

SPECULATIVE = {
    "model": Unsupported(_LOOKUPS, "this drafter has no model"),
    "draft_tensor_parallel_size": Unsupported((1,), _ONE_PROCESS),
    "tensor_parallel_size": Unsupported((1,), _ONE_PROCESS),
    "quantization": Unsupported(),
    "revision": Unsupported(),
    "code_revision": Unsupported(),
    "draft_load_config": Unsupported(),
    "kv_cache_dtype": Unsupported(("auto",), "draft models keep theirs as the target does; set the engine's"),
    "draft_sample_method": Unsupported(("greedy",), "this drafter does not sample"),
    "parallel_drafting": Unsupported((False,), "use pard with a draft model that was trained for it"),
    "num_speculative_tokens_per_batch_size": Unsupported(
        (), 'use {"method": "auto"}, which goes by the load'
    ),
    "disable_by_batch_size": Unsupported((), 'use {"method": "auto"}, which goes by the load'),
    "enable_adaptive_verification": Unsupported((False,), 'use {"method": "auto"}'),
    "use_heterogeneous_vocab": Unsupported((False,), 'use {"method": "tli"} or {"method": "slem"}'),
    "synthetic_acceptance_rates": Unsupported((), "drafts are only accepted where the target agrees"),
    "synthetic_acceptance_length": Unsupported((), "drafts are only accepted where the target agrees"),
    "spec_decoding_acceptance_method": Unsupported(("rejection_sampler",), "use verifier"),
    "acceptance_method": Unsupported(("rejection_sampler",), "use verifier"),
    "prompt_lookup_max": Unsupported((0,), "only ngram looks up"),
    "prompt_lookup_min": Unsupported((0,), "only ngram looks up"),
    **dict.fromkeys(
        (
            *("attention_backend", "disable_eagle_block_drop", "disable_mqa_scorer", "enforce_eager"),
            *("disable_padded_drafter_batch", "max_model_len", "moe_backend", "use_local_argmax_reduction"),
        ),
        Unsupported((ANYTHING,)),
    ),
}
"""vLLM's keys of `speculative_config`, for drafters without an option of that name. Those with `ANYTHING` cannot change
the text."""

METHOD_SYNONYMS = {
    theirs: ours for theirs, ours in methods.names_from(methods.VLLM).items() if theirs != ours
}
"""vLLM's other names of methods, to ours."""
METHODS_ELSEWHERE = {
    "custom_class": 'give method the class itself: "my_package.module:MyDrafter"',
    "extract_hidden_states": "slipstream train reads hidden states by itself",
    "mlp_speculator": "train Medusa or EAGLE-3 heads",
}
"""vLLM's methods that are not supported, and what to do instead."""

PARALLEL = {methods.DRAFT_MODEL.name: methods.PARD.name, methods.EAGLE3.name: methods.PEAGLE.name}
"""Our methods to those that draft with the same kind of checkpoint in one pass, as its `parallel_drafting` says."""


def own_method(name: str) -> str:
    """Our name of a method of vLLM's; others unchanged. It also names multi-token prediction by the family."""
    if name.endswith(f"_{methods.MTP.name}") and ":" not in name:
        return methods.MTP.name
    return METHOD_SYNONYMS.get(name, name)


_VERIFIERS = {"standard": None, "block": "block"}


def own_speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `speculative_config` with Slipstream's keys: the method inferred where it is missing, and the verifier.

    `rejection_sample_method` `standard` means any lossless verifier, so the configured one is kept. Raises
    `ConfigError`.
    """
    own = dict(given)
    if own.get("method") is None:
        own["method"] = _method_of(own)
    if isinstance(own["method"], str):
        own["method"] = own_method(own["method"])
    rule = own.pop("rejection_sample_method", None)
    if rule is not None:
        if rule not in _VERIFIERS:
            raise ConfigError(
                f"rejection_sample_method must be standard or block, got {rule!r}: drafts are only accepted where "
                "the target agrees"
            )
        verifier = _VERIFIERS[rule]
        if verifier is not None and own.setdefault("verifier", verifier) != verifier:
            raise ConfigError("rejection_sample_method and verifier differ; omit one of them")
    if own["method"] == methods.DRAFT_MODEL.name and own.get("use_heterogeneous_vocab") is True:
        del own["use_heterogeneous_vocab"]
        own["method"] = methods.TLI.name
    if own.get("parallel_drafting") is True and own["method"] in PARALLEL:
        del own["parallel_drafting"]
        own["method"] = PARALLEL[own["method"]]
    return own


def _method_of(given: Mapping[str, Any]) -> str:
    """The method for a model: by its configuration where it is a folder, else by its name, as vLLM does."""
    model = given.get("model")
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise ConfigError(
            f'speculative_config needs "method", or a "model" that implies it; got keys {list(given)}'
        )
    name = os.fspath(model).lower()
    if name in _LOOKUPS:
        return name.strip("[]")
    marks = _marks(Path(model))
    for mark, method in _MARKS.items():
        if mark in marks:
            return method
    name = name.rstrip("/").rsplit("/", 1)[-1]
    for mark, method in _NAME_MARKS.items():
        if mark in name:
            return method
    is_assistant = name.startswith("gemma-4-") and name.endswith("-assistant")
    return methods.MTP.name if is_assistant else methods.DRAFT_MODEL.name


_BLOCKS = dict.fromkeys((methods.DFLASH.name, *methods.DFLASH.aliases), methods.DFLASH.name)
_MARKS = {mark: mark for mark in sorted((*methods.HEADS, "mlp_speculator"), key=len, reverse=True)} | {
    **_BLOCKS,
    **dict.fromkeys(methods.ASSISTANTS, methods.MTP.name),
}
"""Substring of a configuration's model type to method, longer ones first."""
_NAME_MARKS = {
    f"{methods.EAGLE.name}-": methods.EAGLE.name,
    **{mark: mark for mark in (methods.EAGLE3.name, methods.MEDUSA.name)},
    **_BLOCKS,
}
"""Substring of a model's name to method."""


def _marks(folder: Path) -> str:
    """The model types in a folder's configuration, as one lower-case text; empty without a configuration."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kinds = [
            config.get("model_type"),
            config.get("speculators_model_type"),
            *(config.get("architectures") or ()),
        ]
    except (OSError, ValueError, AttributeError, TypeError):
        return ""
    return " ".join(map(str, kinds)).lower()

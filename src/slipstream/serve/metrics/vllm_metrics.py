"""Metrics that vLLM has too, by their names behind the prefix."""

from __future__ import annotations

PREFIX = "slipstream_"
VLLM_PREFIX = "vllm:"

AS_VLLM = frozenset(
    {
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("spec_decode_num_accepted_tokens_per_pos", "num_requests_running", "num_requests_waiting"),
        *("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_time_per_output_token_seconds", "iteration_tokens_total", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "cache_config_info"),
    }
)
"""Metrics with the meaning of vLLM's metrics of the same name."""
ONCE_AT_VLLM = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
"""Former names of vLLM's metrics, which older boards query."""

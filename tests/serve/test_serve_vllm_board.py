"""What the Grafana boards of vLLM's repository ask for is there under `--metrics-alias vllm`.

The names are those that the panels' queries have: the stock board (`examples/…/prometheus_grafana/grafana.json`), the
boards of performance, queries and speculative decoding beside it, and the list of vLLM's own metrics.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_cases import MakeApp
from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.serve.accounts import TaskLabels
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.metrics.metrics import Metrics

STOCK_BOARD = {
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
}
OTHER_BOARDS = {
    "cache_config_info",
    "gpu_cache_usage_perc",
    "gpu_prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total",
    "iteration_tokens_total_bucket",
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "request_generation_tokens_sum",
    "request_inference_time_seconds_bucket",
    "request_params_max_tokens_bucket",
    "request_params_n_bucket",
    "request_prompt_tokens_sum",
    "request_time_per_output_token_seconds_bucket",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
    "time_per_output_token_seconds_bucket",
}
CANNOT_BE = {
    "num_requests_swapped": "answers that lose their place are computed again, not swapped",
    "cpu_cache_usage_perc": "there is one cache",
    "lora_requests_info": "adapters are merged when the model is loaded",
    "external_prefix_cache_queries_total": "no other process holds keys and values",
    "external_prefix_cache_hits_total": "no other process holds keys and values",
    "mm_cache_queries_total": "text only",
    "mm_cache_hits_total": "text only",
    "engine_sleep_state": "the engine does not sleep",
    "corrupted_requests_total": "an answer whose logits are not finite ends as an error",
}
"""What vLLM shows elsewhere, and why it means nothing here."""


@pytest.fixture
def shown(make_app: MakeApp) -> tuple[dict[str, float], str]:
    """Sample name to the sum over its labels, after two requests; and the text."""
    with TestClient(make_app(metrics_alias="vllm")) as client:
        body = {"prompt": "SELECT a, b FROM", "ignore_eos": True}
        for extra in ({"max_tokens": 30, "temperature": 0}, {"n": 2, "max_tokens": 7}):
            assert client.post("/v1/completions", json={**body, **extra}).status_code == 200
        text = client.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "pair"  # the boards' variable
    return found, text


def test_no_panel_is_empty(shown: tuple[dict[str, float], str]) -> None:
    found, _ = shown
    assert not {name for name in STOCK_BOARD | OTHER_BOARDS if f"vllm:{name}" not in found}
    assert not {name for name in CANNOT_BE if f"vllm:{name}" in found}
    prompt_tokens = found["vllm:prompt_tokens_total"]
    for name, expected in {
        "request_prompt_tokens_sum": prompt_tokens,
        "request_prompt_tokens_count": 2,
        "request_generation_tokens_sum": 30 + 7 + 7,
        "request_generation_tokens_count": 3,
        "request_max_num_generation_tokens_sum": 30 + 7,
        "request_params_n_sum": 3,
        "request_params_max_tokens_sum": 37,
        "request_success_total": 3,
        "cache_config_info": 1,
    }.items():
        assert found[f"vllm:{name}"] == expected, name
        assert found[f"slipstream_{name}"] == expected, name
    both = found["vllm:request_prefill_time_seconds_sum"] + found["vllm:request_decode_time_seconds_sum"]
    inference = found["vllm:request_inference_time_seconds_sum"]
    assert both == pytest.approx(inference)
    latency = found["vllm:e2e_request_latency_seconds_sum"]
    assert inference + found["vllm:request_queue_time_seconds_sum"] == pytest.approx(latency)
    assert 0 < found["vllm:request_prefill_time_seconds_sum"] < latency
    assert (
        found["vllm:time_per_output_token_seconds_sum"] == found["vllm:inter_token_latency_seconds_sum"] > 0
    )


def test_the_cache_is_described(shown: tuple[dict[str, float], str], drafting: LLM) -> None:
    _, text = shown
    [line] = re.findall(r"^vllm:cache_config_info\{(.*)\} 1.0$", text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert (
        int(labels["num_gpu_blocks"]) * int(labels["block_size"]) == int(labels["kv_cache_size_tokens"]) > 0
    )
    assert int(labels["kv_cache_memory_bytes"]) == drafting.engine.memory_plan.kv_bytes
    assert labels["enable_prefix_caching"] == "True"


@pytest.mark.parametrize("cache", ["int8", "float16"])
def test_the_cache_is_described_by_its_own_type(cache: str) -> None:
    """Not by the type that the model computes in."""
    metrics = Metrics("m", TaskLabels((), 0), None)
    metrics.describe_cache(EngineInfo.of(LLM(kv_cache_bytes=2**20, kv_cache_dtype=cache).engine))
    assert f'cache_dtype="{cache}"' in metrics.exposition().decode()

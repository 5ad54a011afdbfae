"""The cost of a response: `usage`, and `metrics` where the server shows them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.metrics.request import RequestMetrics
from slipstream.engine.outputs import RequestOutput


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def prediction_usage(outputs: Seq[RequestOutput]) -> dict[str, int]:
    """OpenAI's `completion_tokens_details` of a request with a prediction: how much of it the finished answers have."""
    metrics = [answer.metrics for output in outputs for answer in output.outputs]
    return {
        "accepted_prediction_tokens": sum(each.num_accepted_prediction_tokens for each in metrics),
        "rejected_prediction_tokens": sum(each.num_rejected_prediction_tokens for each in metrics),
    }


def lossy_usage(outputs: Seq[RequestOutput]) -> dict[str, int]:
    """What a draft wrote of the finished answers of a request with step-level speculation."""
    metrics = [answer.metrics for output in outputs for answer in output.outputs]
    return {
        "drafted_steps": sum(each.num_drafted_steps for each in metrics),
        "kept_steps": sum(each.num_kept_steps for each in metrics),
        "lossy_tokens": sum(each.num_lossy_tokens for each in metrics),
    }


def request_metrics(outputs: Seq[RequestOutput], num_speculative_tokens: int | None) -> dict[str, Any]:
    """A request's own metrics: `speculative_decoding` as in vLLM, which counts only steps that drafted, and times.

    `num_speculative_tokens` is the drafter's configured depth. Several answers are merged by
    `RequestMetrics.merged`.
    """
    merged = RequestMetrics.merged([answer.metrics for output in outputs for answer in output.outputs])
    return {
        "speculative_decoding": _speculative_decoding(merged, num_speculative_tokens),
        "num_target_passes": merged.num_steps,
        "draft_version": merged.draft_version,
        "num_preemptions": merged.num_preemptions,
        "seeds": [answer.seed for output in outputs for answer in output.outputs],
        "reproducible": merged.reproducible,
        "lossy": merged.lossy,
        "queue_s": merged.queue_s,
        "draft_s": merged.draft_s,
        "verify_s": merged.verify_s,
        "other_s": merged.other_s,
        "time_to_first_token_s": merged.time_to_first_token_s,
        "total_s": merged.total_s,
        "tokens_per_s": merged.tokens_per_s,
    }


def _speculative_decoding(
    merged: RequestMetrics, num_speculative_tokens: int | None
) -> dict[str, Any] | None:
    """None where no step drafted."""
    num_drafts = merged.proposed_per_position[0] if merged.proposed_per_position else 0
    if not num_drafts:
        return None
    histogram = list(merged.acceptance_histogram)
    histogram[0] -= merged.num_steps - num_drafts
    return {
        "mean_acceptance_length": 1 + merged.num_accepted_tokens / num_drafts,
        "draft_acceptance_rate": merged.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_drafts,
        "num_accepted_draft_tokens": merged.num_accepted_tokens,
        "num_draft_tokens": merged.num_draft_tokens,
        "num_spec_tokens": num_speculative_tokens,
        "conditional_acceptance": merged.conditional_acceptance,
    }

"""Reports on finished requests, as text and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.output.console import print_rows
from slipstream.core.metrics.request import RequestMetrics

if TYPE_CHECKING:
    from slipstream.engine.outputs import CompletionOutput, RequestOutput


def summarise(outputs: Seq[RequestOutput], wall_s: float) -> dict[str, Any]:
    """Totals of all requests: counts are summed, rates are of the sums, times are means over the answers."""
    answers = [answer.metrics for output in outputs for answer in output.outputs]
    counts = RequestMetrics.merged(answers)
    return {
        "num_requests": len(outputs),
        "num_answers": len(answers),
        "num_prompt_tokens": sum(output.metrics.num_prompt_tokens for output in outputs),
        "num_cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
        "num_output_tokens": counts.num_output_tokens,
        "num_steps": counts.num_steps,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "acceptance_rate": counts.acceptance_rate,
        "conditional_acceptance": counts.conditional_acceptance,
        "acceptance_length": counts.acceptance_length,
        "acceptance_histogram": counts.acceptance_histogram,
        "num_accepted_prediction_tokens": counts.num_accepted_prediction_tokens,
        "num_rejected_prediction_tokens": counts.num_rejected_prediction_tokens,
        "tokens_per_s": counts.num_output_tokens / wall_s,
        "wall_s": wall_s,
        "time_to_first_token_s": statistics.median(m.time_to_first_token_s for m in answers),
        "draft_s": statistics.mean(m.draft_s for m in answers),
        "verify_s": statistics.mean(m.verify_s for m in answers),
        "other_s": statistics.mean(m.queue_s + m.other_s for m in answers),
        "seeds": [m.seed for m in answers],
        "reproducible": counts.reproducible,
        "lossy": any(m.lossy for m in answers),
        "num_drafted_steps": counts.num_drafted_steps,
        "num_kept_steps": counts.num_kept_steps,
        "num_lossy_tokens": counts.num_lossy_tokens,
    }


def print_summary(console: Console, summary: dict[str, Any], speculation: str, timed: str) -> None:
    """What a run cost and what speculation gained, with the words of the documentation.

    `timed` says what the speed is the speed of.
    """
    reused = f" ({summary['num_cached_tokens']} reused)" if summary["num_cached_tokens"] else ""
    rows = [
        ("tokens", f"{summary['num_prompt_tokens']} prompt{reused}, {summary['num_output_tokens']} answered")
    ]
    if summary["num_draft_tokens"]:
        of = f"{summary['num_accepted_tokens']} of {summary['num_draft_tokens']} draft tokens"
        by_position = ", ".join(f"{rate:.2f}" for rate in summary["conditional_acceptance"])
        rows.append(("acceptance rate α", f"{summary['acceptance_rate']:.2f} ({of}; {speculation})"))
        rows.append(("α by position", f"{by_position} (of the steps that reached it)"))
    accepted, rejected = (summary[f"num_{what}_prediction_tokens"] for what in ("accepted", "rejected"))
    if accepted or rejected:
        rows.append(("prediction", f"{accepted} of its tokens accepted, {rejected} rejected"))
    per_pass = f"{summary['acceptance_length']:.2f} tokens a target pass"
    parts = ", ".join(f"{name} {1000 * summary[f'{name}_s']:.0f} ms" for name in ("draft", "verify", "other"))
    mean = " (mean of the answers)" if summary["num_answers"] > 1 else ""
    seeds = summary["seeds"]
    rows += [
        ("acceptance length τ", f"{per_pass}, {summary['num_steps']} passes"),
        ("speed", f"{summary['tokens_per_s']:.1f} tokens/s, {timed}"),
        ("first token", f"{1000 * summary['time_to_first_token_s']:.0f} ms"),
        ("time", parts + mean),
    ]
    if summary["lossy"]:
        kept = f"{summary['num_kept_steps']} of {summary['num_drafted_steps']} drafted steps kept"
        rows.append(("lossy", f"true: {kept}, {summary['num_lossy_tokens']} tokens not the target's own"))
    if summary["lossy"]:
        rows.append(("seed", "none gives these answers again for certain: steps were drafted"))
    elif summary["reproducible"]:
        rows.append(("seed", ", ".join(map(str, seeds[:4])) + (", …" if len(seeds) > 4 else "")))
    else:
        rows.append(("seed", "none gives these answers again: they were sampled under rejection or block"))
    print_rows(console, rows)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A finished request as JSON, with all its figures."""
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": None
        if output.prompt_token_logprobs is None
        else [None if entry is None else asdict(entry) for entry in output.prompt_token_logprobs],
        "outputs": [_answer_json(answer) for answer in output.outputs],
    }


def _answer_json(answer: CompletionOutput) -> dict[str, Any]:
    metrics = answer.metrics
    fields = asdict(answer)
    del fields["texts"]
    fields["logprobs"] = fields.pop("token_logprobs")
    return {
        **fields,
        "metrics": {
            **asdict(metrics),
            "acceptance_rate": metrics.acceptance_rate,
            "conditional_acceptance": metrics.conditional_acceptance,
            "acceptance_length": metrics.acceptance_length,
            "tokens_per_s": metrics.tokens_per_s,
        },
    }

"""What the counters mean, on examples that are worked out by hand."""

from __future__ import annotations

import pytest

from slipstream.core.metrics.request import RequestMetrics


def worked_example() -> RequestMetrics:
    """Five steps of one answer.

    | step | proposed                        | accepted            | emitted |
    |------|---------------------------------|---------------------|---------|
    | 1    | a chain of 3                    | 2, the third wrong  | 3       |
    | 2    | a tree of 5 nodes, 2 levels     | both levels         | 3       |
    | 3    | nothing                         | 0                   | 1       |
    | 4    | a chain of 1                    | 0                   | 1       |
    | 5    | a chain of 4                    | 2, then a stop rule | 2       |
    """
    metrics = RequestMetrics()
    metrics.record_step(proposed_depth=3, num_proposed=3, num_reached=3, num_accepted=2)
    metrics.record_step(proposed_depth=2, num_proposed=5, num_reached=2, num_accepted=2)
    metrics.record_step(proposed_depth=0, num_proposed=0, num_reached=0, num_accepted=0)
    metrics.record_step(proposed_depth=1, num_proposed=1, num_reached=1, num_accepted=0)
    metrics.record_step(proposed_depth=4, num_proposed=4, num_reached=2, num_accepted=2)
    metrics.num_output_tokens = 3 + 3 + 1 + 1 + 2
    return metrics


def test_worked_example() -> None:
    metrics = worked_example()
    assert metrics.num_steps == 5
    assert metrics.num_draft_tokens == 3 + 5 + 0 + 1 + 4
    assert metrics.num_accepted_tokens == 6
    assert metrics.proposed_per_position == [4, 3, 2, 1]
    assert metrics.reached_per_position == [4, 3, 1]
    assert metrics.accepted_per_position == [3, 3, 0][:2]
    assert metrics.acceptance_histogram == [2, 0, 3]
    assert metrics.acceptance_rate == pytest.approx(6 / 13), "pooled, not a mean of the steps' rates"
    assert metrics.conditional_acceptance[:2] == pytest.approx([3 / 4, 3 / 3])
    assert metrics.conditional_acceptance[2:] in ([], [0.0]), "nothing was accepted at the third position"
    assert metrics.acceptance_length == pytest.approx(10 / 5)


def test_nothing_counted_is_nothing_divided() -> None:
    metrics = RequestMetrics()
    assert metrics.acceptance_rate == metrics.acceptance_length == metrics.tokens_per_s == 0
    assert metrics.conditional_acceptance == []


def test_answers_of_one_request_as_one() -> None:
    """Counts add up, the prompt counts once, and times are those of whoever waited longest."""
    first = worked_example()
    first.num_prompt_tokens, first.num_cached_tokens, first.num_preemptions, first.seed = 100, 16, 1, 7
    first.queue_s, first.draft_s, first.verify_s, first.other_s, first.total_s = 0.1, 0.2, 0.5, 0.2, 1.0
    first.time_to_first_token_s = 0.4
    second = RequestMetrics(num_prompt_tokens=100, num_cached_tokens=99, num_preemptions=2, seed=8)
    second.record_step(proposed_depth=1, num_proposed=2, num_reached=1, num_accepted=1)
    second.num_output_tokens = 2
    second.queue_s, second.draft_s, second.verify_s, second.other_s, second.total_s = 0.3, 0.1, 0.9, 0.7, 2.0
    second.time_to_first_token_s = 0.3
    for parts in ([first, second], [first, RequestMetrics(), second]):
        if len(parts) == 3:
            parts[1].time_to_first_token_s = 0.35
        merged = RequestMetrics.merged(parts)
        assert (merged.num_prompt_tokens, merged.num_cached_tokens, merged.seed) == (100, 16, 7)
        assert (merged.num_preemptions, merged.num_output_tokens, merged.num_steps) == (3, 12, 6)
        assert (merged.num_draft_tokens, merged.num_accepted_tokens) == (15, 7)
        assert merged.proposed_per_position == [5, 3, 2, 1]
        assert merged.reached_per_position == [5, 3, 1]
        assert merged.accepted_per_position[:2] == [4, 3]
        assert merged.acceptance_histogram == [2, 1, 3]
        assert merged.acceptance_rate == pytest.approx(7 / 15)
        assert merged.acceptance_length == pytest.approx(12 / 6)
        assert merged.time_to_first_token_s == 0.3
        phases = [merged.queue_s, merged.draft_s, merged.verify_s, merged.other_s]
        assert phases == [0.3, 0.1, 0.9, 0.7]
        assert merged.total_s == 2.0
        assert merged.tokens_per_s == pytest.approx(12 / 2.0)


def test_one_lossy_answer_makes_the_request_lossy() -> None:
    assert RequestMetrics.merged([RequestMetrics(lossy=True), RequestMetrics()]).lossy


def test_merging_one_answer_changes_nothing() -> None:
    metrics = worked_example()
    metrics.num_prompt_tokens, metrics.total_s, metrics.time_to_first_token_s = 9, 1.5, 0.5
    assert RequestMetrics.merged([metrics]) == metrics

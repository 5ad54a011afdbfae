"""The tests of an audit against enumeration, and under honest and dishonest draws."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest

from slipstream.stats.betting import Wealth
from slipstream.tools.audit.statistics.hamming import hamming_kernel, mmd_test
from slipstream.tools.audit.statistics.likelihood import ReferenceTest, TokenScores, score_tokens
from slipstream.tools.audit.statistics.ngrams import NgramCounts, Reading
from slipstream.tools.audit.statistics.power import (
    POWER,
    smallest_rate,
    smallest_shift,
    smallest_temperature,
)
from slipstream.tools.audit.statistics.samples import PAD, code_points, padded
from slipstream.tools.audit.statistics.sequential import SequentialTest
from slipstream.tools.audit.statistics.ties import (
    flip_probabilities,
    flip_test,
    smallest_rejected,
    tail_probability,
)
from slipstream.tools.audit.ties import Rounding

# ---- samples and MMD


def test_answers_are_cut_and_padded() -> None:
    assert padded([[5, 6, 7], [8], []], 2).tolist() == [[5, 6], [8, PAD], [PAD, PAD]]
    assert code_points(["aé", ""], 3).tolist() == [[97, 233, PAD], [PAD, PAD, PAD]]


def test_kernel_counts_positions_that_agree() -> None:
    answers = padded([[1, 2, 3], [1, 9, 3], [2]], 4)
    assert hamming_kernel(answers)[0].tolist() == [1.0, 0.75, 0.25]


def _mmd_by_hand(strata: list[tuple[list[list[int]], list[list[int]]]], length: int) -> float:
    """The definition, answer by answer."""

    def agreement(one: list[int], other: list[int]) -> float:
        rows = padded([one, other], length)
        return float((rows[0] == rows[1]).mean())

    total, weights = 0.0, 0.0
    for first, second in strata:
        within = [agreement(x, y) for x in first for y in first]
        other = [agreement(x, y) for x in second for y in second]
        across = [agreement(x, y) for x in first for y in second]
        weight = len(first) * len(second) / (len(first) + len(second))
        total += weight * (np.mean(within) + np.mean(other) - 2 * np.mean(across))
        weights += weight
    return total / weights


STRATA = [([[1, 2], [1, 3], [1, 2]], [[2, 2], [2, 3]]), ([[4, 4], [4, 4]], [[4, 5], [5, 5]])]


def test_mmd_is_its_definition_and_its_p_value_that_of_all_permutations() -> None:
    test = mmd_test([(padded(a, 3), padded(b, 3)) for a, b in STRATA], num_permutations=4000, seed=1)
    observed = _mmd_by_hand(STRATA, 3)
    assert test.statistic == pytest.approx(observed)
    by_stratum = [
        [
            ([pool[i] for i in chosen], [pool[i] for i in range(len(pool)) if i not in chosen])
            for chosen in itertools.combinations(range(len(pool)), len(first))
        ]
        for first, pool in ((first, [*first, *second]) for first, second in STRATA)
    ]
    values = [_mmd_by_hand(list(relabelled), 3) for relabelled in itertools.product(*by_stratum)]
    exact = np.mean([value >= observed - 1e-9 for value in values])
    assert test.p_value == pytest.approx(exact, abs=0.025)
    assert (test.num_first, test.num_second) == (5, 4)


def test_permutations_stay_within_prompts() -> None:
    """A prompt that one side was asked oftener would betray the sides, though both answer alike."""
    generator = np.random.default_rng(5)
    p_values = []
    for _ in range(200):
        counts = ((9, 2), (2, 9))
        strata = [
            tuple(generator.integers(10 * place, 10 * place + 3, (num, 4)) for num in sides)
            for place, sides in enumerate(counts)
        ]
        p_values.append(mmd_test(strata, num_permutations=99, seed=int(generator.integers(1 << 30))).p_value)
    assert np.mean(np.array(p_values) <= 0.05) < 0.1
    assert np.mean(p_values) > 0.4


def test_mmd_finds_a_difference_and_refuses_nothing_to_compare() -> None:
    generator = np.random.default_rng(6)
    strata = [
        (generator.choice(3, (20, 8), p=[0.6, 0.2, 0.2]), generator.choice(3, (20, 8), p=[0.3, 0.2, 0.5]))
    ]
    test = mmd_test(strata, num_permutations=999)
    assert test.p_value == 0.001
    assert test.statistic > test.smallest_detectable > 0
    with pytest.raises(ValueError, match="both sources"):
        mmd_test([(padded([[1]], 2), padded([], 2))])


def test_no_discrepancy_is_claimed_that_could_not_be_found() -> None:
    generator = np.random.default_rng(7)
    alone = [(generator.integers(0, 9, (1, 8)), generator.integers(0, 9, (1, 8))) for _ in range(30)]
    assert mmd_test(alone, num_permutations=199).smallest_detectable is None, (
        "two answers have no other order"
    )
    strata = [(generator.integers(0, 3, (20, 8)), generator.integers(0, 3, (20, 8)))]
    often, seldom, never = (
        mmd_test(strata, num_permutations=999, level=level).smallest_detectable
        for level in (0.05, 0.005, 5e-4)
    )
    assert often is not None
    assert seldom is not None
    assert often < seldom
    assert never is None, "so few permutations give no p-value below that"


# ---- betting


def test_wealth_remembers_that_it_was_enough() -> None:
    wealth = Wealth(0.05)
    for factor in (4.0, 6.0, 0.01):
        wealth.bet(math.log(factor))
    assert wealth.rejected_after == 2
    assert wealth.rejects
    assert wealth.p_value == pytest.approx(1 / 24)
    with pytest.raises(ValueError, match="number"):
        wealth.bet(math.nan)
    with pytest.raises(ValueError, match="alpha"):
        Wealth(0)


def _answers(generator: np.random.Generator, heat: float, num: int) -> list[list[int]]:
    """Answers of a Markov chain over 12 tokens, less certain with more `heat`."""
    logits = np.random.default_rng(0).normal(size=(12, 12)) * 2
    probs = np.exp(logits / heat)
    probs /= probs.sum(-1, keepdims=True)
    tokens = np.zeros((num, 25), dtype=np.int64)
    for place in range(24):
        rows = probs[tokens[:, place]].cumsum(-1)
        tokens[:, place + 1] = (generator.random((num, 1)) < rows).argmax(-1)
    return tokens[:, 1:].tolist()


def test_what_a_bet_wins_it_loses_if_the_answers_change_places() -> None:
    """The two factors have the mean 1 whatever was learned: the wealth is a martingale."""
    generator = np.random.default_rng(7)
    cold, hot = _answers(generator, 1.0, 40), _answers(generator, 1.6, 40)
    gains = []
    for swap in (False, True):
        test = SequentialTest(0.999, length=24)
        for number in range(39):
            test.add(number % 3, cold[number], hot[number])
        before = test.wealth.log_wealth
        last = (cold[39], hot[39])
        test.add(0, *(reversed(last) if swap else last))
        gains.append(math.exp(test.wealth.log_wealth - before))
    assert sum(gains) == pytest.approx(2.0, abs=1e-9)
    assert abs(gains[0] - 1) > 0.05, "something was bet"


@pytest.mark.long
def test_a_pair_is_not_learned_from_before_it_is_bet_on() -> None:
    """Otherwise even equal sources would be told apart."""
    generator = np.random.default_rng(8)
    rejected, log_wealths = 0, []
    for _ in range(40):
        test = SequentialTest(0.9, length=24)
        for number, (first, second) in enumerate(
            zip(_answers(generator, 1.0, 30), _answers(generator, 1.0, 30), strict=True)
        ):
            test.add(number % 2, first, second)
        rejected += test.rejects
        log_wealths.append(test.wealth.log_wealth)
    assert rejected <= 9, "4 are expected at most"
    assert np.mean(log_wealths) < 0


def test_sequential_test_finds_another_temperature() -> None:
    generator = np.random.default_rng(9)
    test = SequentialTest(0.99, length=24)
    for number, (first, second) in enumerate(
        zip(_answers(generator, 1.0, 300), _answers(generator, 1.25, 300), strict=True)
    ):
        test.add(number % 5, first, second)
        if test.rejects:
            break
    assert test.rejected_after is not None
    assert test.rejected_after < 200
    assert test.e_value >= 100
    assert test.weights["surprise"] < 0, "surprising answers are a sign of the second"
    assert test.num_pairs == test.rejected_after


def test_empty_answers_can_be_compared() -> None:
    test = SequentialTest(0.99)
    for _ in range(30):
        test.add(0, [], [4, 5])
    assert test.rejects


def test_surprise_falls_with_what_was_read() -> None:
    counts = NgramCounts(2)
    text, other = Reading(3, np.array([5, 6, 7])), Reading(3, np.array([7, 6, 5]))
    before = counts.surprise(text)
    counts.add(0, text)
    after = counts.surprise(text)
    assert (after[0] < before[0]).all(), "all together"
    assert (after[1] < before[1]).all(), "the first source"
    assert (after[2] == before[2]).all(), "the second has read nothing"
    assert (counts.surprise(other)[0] > after[0]).all()
    rows = [counts.surprise(Reading(3, np.array([5, token])))[0][1] for token in range(40)]
    assert np.exp(-np.array(rows)).sum() <= 1.0


# ---- likelihood ratios


def _rows(seed: int, num: int, width: int = 7) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(num, width)) * 1.5
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _filtered(rows: np.ndarray, kept: int) -> np.ndarray:
    cut = np.sort(rows, -1)[:, -kept][:, None]
    left = np.where(rows >= cut, rows, -np.inf)
    return left - np.log(np.exp(left).sum(-1, keepdims=True))


@pytest.mark.parametrize("kept", [(7,), (4,), (3, 4), (4, 5)])
def test_no_bet_is_more_than_fair_in_an_honest_world(kept: tuple[int, ...]) -> None:
    """Enumerated over the vocabulary: the mean factor is at most 1 under every claim."""
    raw = _rows(3, 1)
    claims = [_filtered(raw, number) for number in kept]
    for claim in claims:
        mean = 0.0
        for token in np.flatnonzero(np.isfinite(claim[0])):
            test = ReferenceTest(0.99)
            test.add(score_tokens(claims, raw, [int(token)]))
            mean += math.exp(claim[0, token]) * test.e_value
        assert mean <= 1 + 1e-9
        assert mean > 0.5


def test_every_alternative_is_a_distribution() -> None:
    raw = _rows(4, 1)
    claim = _filtered(raw, 5)
    scores = [score_tokens([claim], raw, [token]) for token in range(7)]
    for name in scores[0].alternatives:
        total = sum(math.exp(score.alternatives[name][0]) for score in scores)
        assert total == pytest.approx(1.0), name


def _drawn(generator: np.random.Generator, rows: np.ndarray) -> list[int]:
    return [int(generator.choice(len(row), p=np.exp(row) / np.exp(row).sum())) for row in rows]


def test_a_token_outside_the_filters_is_evidence_by_itself() -> None:
    raw = _rows(5, 3)
    claims = [_filtered(raw, 3), _filtered(raw, 4)]
    order = np.argsort(-raw, -1)
    at_the_edge = ReferenceTest(0.99)
    at_the_edge.add(score_tokens(claims, raw, order[:, 3].tolist()))
    assert not at_the_edge.num_impossible, "one of the claims allows it"
    outside = score_tokens(claims, raw, [int(order[0, 0]), int(order[1, 5]), int(order[2, 0])])
    assert outside.impossible == [1]
    test = ReferenceTest(0.99)
    test.add(outside)
    assert test.rejected_after == 1
    assert test.e_value > 1e300


def test_another_temperature_is_found_and_named() -> None:
    generator = np.random.default_rng(11)
    honest, faulty = ReferenceTest(0.99), ReferenceTest(0.99)
    for number in range(120):
        rows = _rows(100 + number, 40)
        hot = rows / 1.18 - np.log(np.exp(rows / 1.18).sum(-1, keepdims=True))
        honest.add(score_tokens([rows], rows, _drawn(generator, rows)))
        faulty.add(score_tokens([rows], rows, _drawn(generator, hot)))
    assert not honest.rejects
    assert abs(honest.score_z) < 3.5
    assert faulty.rejected_after is not None
    assert faulty.best == "temperature × 1.18"
    assert faulty.score_z < -5


def test_alternatives_of_ones_own() -> None:
    """A second model that the tokens really came from."""
    generator = np.random.default_rng(12)
    test = ReferenceTest(0.99)
    for number in range(30):
        rows = _rows(200 + number, 40)
        others = rows + np.random.default_rng(number).normal(size=rows.shape) * 0.3
        others -= np.log(np.exp(others).sum(-1, keepdims=True))
        tokens = _drawn(generator, others)
        own = {"other weights": np.take_along_axis(others, np.array(tokens)[:, None], -1)[:, 0]}
        test.add(score_tokens([rows], rows, tokens), own)
    assert test.rejects
    assert test.best == "other weights"


# ---- ties, shares, power


def test_tail_of_independent_events_is_the_enumerated_one() -> None:
    chances = np.array([0.5, 0.2, 0.05, 0.9, 1e-9])
    for observed in range(5):
        exact = sum(
            math.prod(c if happens else 1 - c for c, happens in zip(chances, world, strict=True))
            for world in itertools.product((False, True), repeat=5)
            if sum(world) >= observed
        )
        assert tail_probability(chances, observed) == pytest.approx(exact, abs=1e-8)
    assert tail_probability(np.full(1000, 1e-7), 1) == pytest.approx(-math.expm1(-1e-4))


def test_rounding_explains_flips_at_ties_only() -> None:
    noise = np.random.default_rng(1).normal(size=2000) * 1e-5
    margins = np.concatenate((np.full(40, 1e-6), np.full(5000, 0.5)))
    assert flip_test(margins, noise, 18).p_value > 0.2
    assert flip_test(margins, noise, 42).p_value < 1e-4
    assert flip_probabilities([0.5], noise)[0] == 0.0
    identical = flip_test(margins, np.zeros(50), 1)
    assert (identical.expected, identical.p_value) == (0.0, 0.0)
    assert flip_test(margins, np.zeros(50), 0).p_value == 1.0


def test_expected_flips_are_not_underestimated() -> None:
    """Margins and their errors drawn alike, the noise known from a sample: false alarms stay rare."""
    generator = np.random.default_rng(2)
    alarms = 0
    for _ in range(200):
        noise = generator.normal(size=100) * 1e-3
        margins = generator.exponential(1.0, size=4000)
        errors = generator.normal(size=4000) * 1e-3 * math.sqrt(2)
        alarms += flip_test(margins, noise, int((errors > margins).sum())).p_value < 0.01
    assert alarms <= 2


def test_the_fewest_events_that_are_rejected() -> None:
    chances = np.array([0.5, 0.2, 0.05, 0.1])
    for level in (0.5, 0.1, 0.01, 1e-3):
        tails = [tail_probability(chances, number) for number in range(6)]
        assert smallest_rejected(chances, level) == next(n for n, tail in enumerate(tails) if tail < level)
    assert smallest_rejected(np.zeros(9), 0.01) == 1
    assert smallest_rejected(np.ones(3), 0.01) == 4, "more than there are"


def test_rates_that_would_have_shown() -> None:
    assert smallest_rate(0, 0.99) == 1.0
    assert (1 - smallest_rate(100, 0.9)) ** 100 == pytest.approx(0.1)


@pytest.mark.parametrize("information", [2_000.0, 200_000.0])
def test_power_is_what_simulation_says(information: float) -> None:
    """At the smallest detectable temperature one of the alternatives has enough wealth in `POWER` of the draws."""
    generator = np.random.default_rng(3)
    factors = [math.exp(bet) for bet in (-0.05, -0.02, 0.02, 0.05)]
    size = smallest_temperature(information, 0.99, factors, 17)
    draws = generator.normal(size=20_000) * math.sqrt(information)  # of the score
    enough = []
    for bet in (0.02, 0.05):
        log_wealth = (size * bet - bet**2 / 2) * information + bet * draws - math.log(17)
        enough.append(np.mean(log_wealth >= math.log(100)))
    assert max(enough) == pytest.approx(POWER, abs=0.01)


def test_no_temperature_between_the_bets_is_claimed() -> None:
    assert smallest_temperature(1e12, 0.99, (0.98, 1.02), 17) == pytest.approx(-math.log(0.98) / 2, rel=1e-3)
    few, many = (smallest_temperature(2e4, 0.99, (0.98, 1.02), number) for number in (1, 17))
    assert few < many
    assert smallest_temperature(0.0, 0.99, (0.98, 1.02), 17) == smallest_shift(1, 0.99, 8) == math.inf
    assert smallest_shift(13, 0.99, 8, num_waiting=4) == math.inf, (
        "nine bets make 512 of 1, and 800 are needed"
    )
    assert smallest_shift(14, 0.99, 8, num_waiting=4) < math.inf
    assert smallest_shift(1000, 0.99, 8) < smallest_shift(100, 0.99, 8) < smallest_shift(100, 0.999, 8)


def test_scores_without_tokens() -> None:
    empty = np.zeros(0)
    assert TokenScores(empty, empty, empty).impossible == []


def test_a_given_margin_does_not_explain_flips_at_far_larger_ones() -> None:
    far = [np.full(2000, 0.05)]
    test = Rounding(given=1e-3).test(far, 3, 0.0025)
    assert test is not None
    assert test.p_value < 1e-6
    assert test.figures["expected"] < 1e-6
    near = Rounding(given=1e-3).test([np.full(6, 1e-4)], 3, 0.0025)
    assert near is not None
    assert near.p_value > 0.2


def test_differences_of_unknown_margin_are_always_tested_where_some_are_expected() -> None:
    """Else the number of tests, and so the level of each, would depend on what was found."""
    noisy = Rounding(np.full(50, 1e-3))
    for num_unknown in (0, 1):
        test = noisy.unknown_test(1000, num_unknown, 0.0025, most=30)
        assert test is not None
        assert test.p_value > 0.5
    assert "differences of unknown margin" in test.smallest
    exact = Rounding(np.zeros(50))
    assert exact.unknown_test(1000, 0, 0.0025, most=30) is None
    found = exact.unknown_test(1000, 1, 0.0025, most=30)
    assert found is not None
    assert found.p_value == 0.0
    assert found.smallest == "1 differences of unknown margin"


def test_more_differences_than_there_are_answers_are_not_said_to_be_found() -> None:
    noisy = Rounding(np.full(50, 0.01))
    few, many = (noisy.unknown_test(1000, 0, 0.0025, most) for most in (30, 300))
    assert few is not None
    assert many is not None
    assert few.smallest == ""
    assert 30 < int(many.smallest.split()[0]) < 100


def test_what_is_in_favour_of_the_claim_must_be_won_first() -> None:
    raw = _rows(6, 40)
    claims = [_filtered(raw, 4), _filtered(raw, 5)]
    tokens = raw.argmax(-1).tolist()
    test = ReferenceTest(0.99)
    test.add(score_tokens(claims, raw, tokens))
    by_hand = [claims[0][row, token] - claims[1][row, token] for row, token in enumerate(tokens)]
    assert test.favour == pytest.approx(sum(by_hand))
    assert test.favour > 0.5
    size = partial(smallest_temperature, 2e4, 0.99, (0.94, 1.06), 17)
    assert size(test.favour) == pytest.approx(size() + test.favour / (-math.log(0.94) * 2e4))

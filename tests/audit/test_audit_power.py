"""The named faults of benchmarks/audit are wrong, and are found; its page says what its file says."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.audit.detection import by_seeds, by_usage, of_scores
from benchmarks.audit.faults import FAULTS, Answered, Fault
from benchmarks.audit.faulty import OtherTies, UnnormalisedResidual, unprocessed_bonus_rows
from benchmarks.audit.page import page
from slipstream.core.proposal import Proposal, ProposalKind
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.tools.audit.scoring import score_rows
from slipstream.tools.audit.statistics.power import POWER, smallest_shift
from slipstream.tools.audit.statistics.sequential import GAMBLERS, SequentialTest
from slipstream.verify import Judgement, Verifier, create_verifier

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"
PLAIN = SamplingParams(temperature=0.8)


def fault(name: str) -> Fault:
    return next(each for each in FAULTS if name in each.name)


def answered(token_ids: list[int], finish_reason: str = "length") -> Answered:
    return Answered(0, PLAIN, token_ids, finish_reason, len(token_ids))


def first_tokens(verifier: Verifier, num: int) -> np.ndarray:
    """Shares of the first token where p is (0.5, 0.3, 0.2) and the draft is drawn from (0.2, 0.2, 0.6)."""
    target = torch.tensor([0.5, 0.3, 0.2]).log()
    draft = torch.tensor([0.2, 0.2, 0.6])
    counts = np.zeros(3)
    for seed in range(num):
        noise = Noise(seed, 10)
        token = random.Random(seed).choices(range(3), draft.tolist())[0]
        proposal = Proposal.chain((token,), ProposalKind.SAMPLED_IID, draft[None])
        (verdict,) = verifier.verify([Judgement(torch.stack((target, target)), proposal, noise)])
        counts[verdict.token_ids(proposal)[0]] += 1
    return counts / num


def test_the_residual_must_be_divided_by_its_sum() -> None:
    assert first_tokens(create_verifier("rejection"), 600) == pytest.approx([0.5, 0.3, 0.2], abs=0.06)
    assert first_tokens(UnnormalisedResidual(), 600)[1] > 0.4, (
        "what runs past the end is the last that is left"
    )


def test_other_ties_takes_the_second_where_two_are_near() -> None:
    rows = torch.tensor([[1.0, 1.0 + 1e-6, 0.0], [2.0, 1.0, 0.0]])
    judgement = Judgement(rows, Proposal.chain((1,), ProposalKind.ONE_HOT), Noise(1, 5, greedy=True))
    (right,) = create_verifier("coupled").verify([judgement])
    (wrong,) = OtherTies().verify([judgement])
    assert (right.accepted, right.next_token) == ((0,), 0)
    assert (wrong.accepted, wrong.next_token) == ((), 0)


def test_only_the_bonus_row_is_left_unprocessed() -> None:
    processor = LogitsProcessor(SamplingParams(top_k=1), [0], (), (), 4)
    logits = torch.arange(12.0).reshape(3, 4)
    right = processor.log_probs(logits, [], [[], [1], [1, 2]])
    with unprocessed_bonus_rows():
        wrong = processor.log_probs(logits, [], [[], [1], [1, 2]])
        drafting = processor.log_probs(logits[:1], [], [[1, 2]])
    assert torch.equal(right[:2], wrong[:2])
    assert wrong[2].isfinite().all()
    assert drafting.isfinite().sum() == 1, "a drafter's rows are processed"
    assert torch.equal(processor.log_probs(logits, [], [[], [1], [1, 2]]), right)


def test_faults_in_front_of_an_engine() -> None:
    chances = [random.Random(number) for number in range(4000)]
    cut = [fault("cut").after(answered([5] * 64), chance) for chance in chances]
    assert 4 <= sum(len(one.token_ids) < 64 for one in cut) <= 25
    assert {one.finish_reason for one in cut if len(one.token_ids) < 64} == {"stop"}
    prompt = list(range(100, 140))
    stale = [fault("stale").before((prompt, PLAIN), chance)[0] for chance in chances]
    changed = [one for one in stale if list(one) != prompt]
    assert 140 <= len(changed) <= 260
    assert all(list(one[16:]) == prompt[16:] for one in changed)
    assert fault("0.95").before((prompt, PLAIN), chances[0])[1].temperature == 0.95
    assert fault("usage").after(answered([5, 6]), chances[0]).num_output_tokens == 4


def test_what_needs_no_statistics() -> None:
    honest = [answered([1, 2, 3]), answered([4, 5, 6])]
    assert by_usage(honest).after is by_seeds(honest, honest).after is None
    twice = [fault("usage").after(one, random.Random(0)) for one in honest]
    assert by_usage(twice).after == 1
    assert by_seeds([honest[0], answered([4, 5], "stop")], honest).how == "shorter than its replay"
    assert by_seeds([honest[0], answered([4, 5, 7])], honest).after == 2
    assert by_seeds([honest[0], answered([4, 5, 6], "stop")], honest).how == "another finish reason"


def test_rounding_at_the_edge_of_a_nucleus_is_no_alarm() -> None:
    """The token at which the mass reaches top_p: another order of additions lets in the next one."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = torch.tensor([[0.6, 0.3 - 1e-6, 0.06, 0.04]]).log()

    def processor(given: SamplingParams) -> LogitsProcessor:
        return LogitsProcessor(given, [0], (), (), 4)

    edge, outside = (score_rows(logits, [token], params, processor) for token in (2, 3))
    narrow = processor(SamplingParams(temperature=1.0, top_p=0.5)).log_probs(logits, (), [[]])
    assert narrow.isfinite().sum() == 1
    assert edge.impossible == []
    assert outside.impossible == [0]
    assert of_scores([outside]).after == 1
    assert of_scores([edge]).after is None
    plain = score_rows(logits, [3], SamplingParams(temperature=1.0), processor)
    assert plain.log_probs[0] == pytest.approx(math.log(0.04), abs=1e-4)


FILTERS = {
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.15},
    "top_k": {"top_k": 3},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_either_of_two_near_tokens(name: str) -> None:
    """In 16 bits another one may be the last of a nucleus; one that is far behind may not."""
    params = SamplingParams(temperature=1.0, **FILTERS[name])
    logits = torch.tensor([[0.5, 0.342, 0.076, 0.072, 0.01]]).log()

    def impossible(token: int, rounding: float) -> bool:
        found = score_rows(
            logits, [token], params, lambda given: LogitsProcessor(given, [0], (), (), 5), rounding
        )
        alternatives = [float(row[0]) for row in found.alternatives.values()]
        assert bool(found.impossible) or all(map(math.isfinite, alternatives)), "no bet is lost for good"
        return bool(found.impossible)

    assert impossible(3, 0.0)
    assert not impossible(3, 0.1)
    assert impossible(4, 0.1)


def test_an_honest_engine_in_16_bits_is_not_accused_at_the_edges_of_its_filters() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    generator = torch.Generator().manual_seed(3)
    exact = 40 + torch.randn(400, 64, generator=generator) * 2.5  # logits of 40 have steps of a quarter
    served = exact.bfloat16().float()
    rounding = 2 * float((exact - served).abs().max())

    def processor(given: SamplingParams) -> LogitsProcessor:
        return LogitsProcessor(given, [0], (), (), 64)

    paths: list[list[int]] = [[] for _ in exact]
    drawn = processor(params).log_probs(served, (), paths).exp().multinomial(1, generator=generator)
    answer = drawn[:, 0].tolist()
    assert score_rows(exact, answer, params, processor).impossible, "else this shows nothing"
    honest = score_rows(exact, answer, params, processor, rounding)
    assert honest.impossible == []
    assert of_scores([honest]).after is None
    unfiltered = exact.mul(1 / 0.8).softmax(-1).multinomial(1, generator=generator)[:, 0].tolist()
    assert of_scores([score_rows(exact, unfiltered, params, processor, rounding)]).after == 1


@pytest.mark.long
def test_a_shift_of_the_smallest_detectable_size_is_found() -> None:
    """Answers that differ in their lengths alone, by what `smallest_shift` says."""
    num_pairs, found = 120, 0
    shift = smallest_shift(num_pairs, 0.99, len(GAMBLERS))
    generator = np.random.default_rng(4)
    for _ in range(20):
        test = SequentialTest(0.99, length=200)
        lengths = 100 + generator.normal(size=(num_pairs, 2)) * 15
        lengths[:, 1] += shift * 15 * math.sqrt(2)
        for first, second in np.clip(lengths, 1, 199).astype(int):
            test.add(0, [7] * int(first), [7] * int(second))
        found += test.rejects
    assert found >= 20 * POWER - 3


def test_the_page_is_made_from_the_file() -> None:
    result = json.loads((BENCHMARKS / "audit_power.json").read_text(encoding="utf-8"))
    assert (BENCHMARKS / "audit_power.md").read_text(encoding="utf-8") == page(result)

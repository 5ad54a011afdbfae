"""The seeds that requests are given when they bring none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.requests import request_seeds
from slipstream.sampling.noise import derive_seed
from tests.kit.engines import MakeLLM

NUM_REQUESTS = 1000


def drawn(llm: LLM, number: int, n: int = 1) -> list[int]:
    """The seeds of the next `number` requests, and of their `n` answers each."""
    params = SamplingParams(temperature=1.0, max_tokens=1, n=n)
    outputs = llm.generate([[5]] * number, params)
    return [answer.seed for output in outputs for answer in output.outputs]


def test_an_engines_seed_fixes_the_seeds_of_its_requests(make_llm: MakeLLM) -> None:
    first, second, other = (make_llm(seed=seed) for seed in (7, 7, 8))
    seeds = drawn(first, 40)
    assert seeds == drawn(second, 40)
    assert drawn(first, 5, n=3) == drawn(second, 5, n=3), "and so it goes on"
    assert not set(seeds) & set(drawn(other, 40))
    assert seeds == list(itertools.islice(request_seeds(7), 40))


def test_no_two_requests_meet_nor_a_request_and_some_answer() -> None:
    """Were request i seeded with derive_seed(7, i), it would repeat answer i of a request with seed 7 and n > i."""
    seeds = list(itertools.islice(request_seeds(7), NUM_REQUESTS))
    assert len(set(seeds)) == NUM_REQUESTS
    assert not set(seeds) & {derive_seed(7, index) for index in range(10 * NUM_REQUESTS)}
    answers = {derive_seed(seed, index) for seed in seeds for index in range(1, 9)}
    assert len(answers) == 8 * NUM_REQUESTS
    assert not answers & set(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds), "JSON readers keep them"


def test_answers_of_all_requests_are_drawn_apart(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=7)
    seeds = drawn(llm, 60, n=3) + drawn(llm, 60)
    assert len(set(seeds)) == len(seeds)
    unseeded = [seed for _ in range(2) for seed in drawn(make_llm(), 20)]
    assert len(set(unseeded)) == 40, "without a seed they come from the operating system"


def test_a_requests_own_seed_is_kept_and_costs_nobody_theirs(make_llm: MakeLLM) -> None:
    first, second = make_llm(seed=7), make_llm(seed=7)
    own = SamplingParams(temperature=1.0, max_tokens=1, seed=11)
    before = drawn(first, 2)
    assert first.generate([5], own)[0].outputs[0].seed == 11
    assert before + drawn(first, 2) == drawn(second, 4)


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_an_answer_says_whether_its_seed_gives_it_again(verifier: str, make_llm: MakeLLM) -> None:
    """Under the classical verifiers the coins hang on how steps were cut: no seed repeats what was sampled there."""
    prompt = list(range(5, 40))
    drafted = make_llm({"method": "ngram", "verifier": verifier})
    plain = make_llm({"method": "off", "verifier": verifier})
    greedy = SamplingParams(temperature=0, max_tokens=16)
    sampled = SamplingParams(temperature=1.2, max_tokens=16, n=2)
    [first] = drafted.generate(prompt, sampled)
    assert [answer.reproducible for answer in first.outputs] == [verifier == "coupled"] * 2
    assert first.metrics.reproducible is (verifier == "coupled")
    for llm, params in ((drafted, greedy), (plain, greedy), (plain, sampled)):
        [output] = llm.generate(prompt, params)
        for answer in output.outputs:
            assert answer.reproducible
            wanted = replace(params, n=1, seed=answer.seed)
            others = [[5]] * 3  # in another batch
            again = llm.generate([*others, prompt], wanted)[-1].outputs[0]
            assert again.token_ids == answer.token_ids
    learning = make_llm({"method": "suffix", "verifier": verifier})
    for llm in (drafted, learning, make_llm({"method": "auto", "verifier": verifier})):
        [output] = llm.generate(prompt, sampled, max_draft_tokens=0)
        assert output.outputs[0].reproducible
        wanted = replace(sampled, n=1, seed=output.outputs[0].seed)
        for _ in range(2):
            [again] = llm.generate(prompt, wanted, max_draft_tokens=0)
            assert again.outputs[0].token_ids == output.outputs[0].token_ids

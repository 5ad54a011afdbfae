"""The seeds that requests are given when they bring none."""

from __future__ import annotations

import itertools

from conftest import MakeLLM

from slipstream import LLM, SamplingParams
from slipstream.engine.requests import request_seeds
from slipstream.sampling.noise import derive_seed

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

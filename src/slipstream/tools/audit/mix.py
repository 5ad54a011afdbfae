"""The seeded mix of sampling parameters of an audit's requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError

Params = dict[str, Any]

NEUTRAL: Params = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent with every request to a server: some have other defaults than none."""
NEUTRAL_FILTERS: Params = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The same, for servers that know vLLM's names."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of sampling parameters; what is random in it is drawn by the seed of the audit."""

    name: str
    make: Callable[[random.Random, int], Params]
    """From a generator and the number of tokens in the vocabulary."""


def _fixed(**params: Any) -> Callable[[random.Random, int], Params]:
    return lambda _random, _vocabulary: dict(params)


def _biased(chance: random.Random, vocabulary: int) -> Params:
    bias = {chance.randrange(vocabulary): chance.choice([-100.0, -2.0, 2.0, 4.0]) for _ in range(6)}
    return {"temperature": 0.9, "logit_bias": bias}


def _forbidding(chance: random.Random, vocabulary: int) -> Params:
    return {"temperature": 0.8, "bad_words": chance.sample(["the", "and", "select", "of", "is", "a b"], 3)}


def _allowing(chance: random.Random, vocabulary: int) -> Params:
    ids = sorted(chance.sample(range(vocabulary), max(1, vocabulary // 2)))
    return {"temperature": 0.8, "allowed_token_ids": ids}


GREEDY = Profile("greedy", _fixed(temperature=0.0))
SAMPLED = Profile("sampled", _fixed(temperature=0.8))
NUCLEUS = Profile("top_p", _fixed(temperature=0.8, top_p=0.9))

COMMON = (GREEDY, SAMPLED, NUCLEUS)
"""What every OpenAI-compatible server means alike."""
SAMPLES = (SAMPLED, NUCLEUS, SAMPLED, NUCLEUS, GREEDY)
"""The same, for servers that do not repeat what they sample: statistics need many sampled answers."""
SERVED = (
    *COMMON,
    Profile("greedy, ignore_eos", _fixed(temperature=0.0, ignore_eos=True)),
    Profile("sampled, ignore_eos", _fixed(temperature=0.8, ignore_eos=True)),
)
"""With answers whose length is known, for servers that understand `ignore_eos`."""
PLAIN = (GREEDY, SAMPLED)
"""Without filters, which engines apply in different orders."""

FULL = (
    GREEDY,
    SAMPLED,
    NUCLEUS,
    Profile("temperature 1", _fixed(temperature=1.0)),
    Profile("top_k", _fixed(temperature=1.0, top_k=20)),
    Profile("min_p", _fixed(temperature=1.0, min_p=0.05)),
    Profile("repetition penalty", _fixed(temperature=0.8, repetition_penalty=1.15)),
    Profile("presence and frequency", _fixed(temperature=0.8, presence_penalty=0.6, frequency_penalty=0.3)),
    Profile("greedy with penalties", _fixed(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1)),
    Profile("all filters", _fixed(temperature=1.2, top_k=50, top_p=0.95, min_p=0.02)),
    Profile("logit_bias", _biased),
    Profile("stop", _fixed(temperature=0.8, stop=["\n", ". "])),
    Profile("stop kept", _fixed(temperature=0.0, stop=[","], include_stop_str_in_output=True)),
    Profile("min_tokens", _fixed(temperature=1.0, min_tokens=16)),
    Profile("ignore_eos", _fixed(temperature=1.0, ignore_eos=True)),
    Profile("bad_words", _forbidding),
    Profile("allowed_token_ids", _allowing),
    Profile("n", _fixed(temperature=0.8, n=2)),
    Profile("hot", _fixed(temperature=1.5)),
)
"""Every sampling parameter of ours at least once."""

MIXES: Mapping[str, Seq[Profile]] = {
    "full": FULL,
    "served": SERVED,
    "common": COMMON,
    "samples": SAMPLES,
    "plain": PLAIN,
    "greedy": (GREEDY,),
}


def mix_of(name: str) -> Seq[Profile]:
    """The profiles of a mix; raises `ConfigError` for an unknown name."""
    if name not in MIXES:
        raise ConfigError(f"--mix must be {', '.join(MIXES)}, got {name!r}")
    return MIXES[name]


def one_profile(params: Mapping[str, Any]) -> Seq[Profile]:
    """Mix of a single set of parameters, given by the user."""
    return (Profile("given", lambda _random, _vocabulary: dict(params)),)

"""Stateless randomness: every number is a function of (seed, position, purpose).

The target's token at absolute position t is `argmax(log p + g(seed, t))` with Gumbel noise g, which makes it
a sample from p (the Gumbel-max trick) and at the same time a pure function: the same p at the same position
gives the same token, in any batch and after any draft.

A 64-bit key is mixed on the host from Python integers; each token's noise is the splitmix64 output (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) number `token` of the generator
that starts at that key. The integers, and hence the uniforms, are the same bits on a CPU and a GPU; the
logarithms may differ in the last place.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence as Seq
from enum import IntEnum
from functools import lru_cache

import torch

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ULP = 2.0**-53

SMALL_VOCABULARY = 16_384
"""Up to this many tokens a CPU computes noise for all faster than it finds the tokens that can win."""

_LEAD = 5.0
"""Nats. Tokens within this distance of the most probable one are compared first; see `_choose_row`."""


class Stream(IntEnum):
    """The purpose of a random number; numbers of different streams are independent."""

    TARGET = 0
    """The target's own token. Drafters may use this stream, and should under the `coupled` verifier."""
    ACCEPTANCE = 1
    """Acceptance or rejection of a draft token by the classical verifiers."""
    NEXT_TOKEN = 2
    """The recovered or bonus token of the classical verifiers."""
    DRAFT = 3
    """Draft tokens that are sampled independently of the target."""


class Noise:
    """The randomness of one sequence at one step.

    `root_position` is the absolute index of the first token that this step decides. The target's stream
    ignores it, which makes the text independent of where steps begin and end. The classical streams are also
    keyed by it. A step may use numbers of positions that it does not commit: block verification's verdict
    depends on all of them. If the next step used the same numbers again, they would not be independent of the
    text so far, and the output would be biased.
    """

    def __init__(self, seed: int, root_position: int, greedy: bool = False, nonce: int = 0) -> None:
        """`nonce` separates requests with the same seed in all streams but the target's; see `Sequence.nonce`."""
        self.seed = seed
        self.root_position = root_position
        self.greedy = greedy
        self.nonce = nonce

    def key(self, position: int, stream: Stream = Stream.TARGET, index: int = 0) -> int:
        """The 64-bit key of `position`; `index` separates several uses at one position, such as nodes."""
        if stream is Stream.TARGET:
            return _target_key(self.seed, position)
        own = (self.nonce,) if self.nonce else ()
        return _mix(self.seed, stream, self.root_position, position, index, *own)

    def signed_key(self, position: int) -> int:
        """`key` of the target's stream, as the int64 with its bits."""
        return _signed(self.key(position))

    def perturb(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        """`log_probs` [R, V] plus the target's noise at each row's position, float64; greedy: unchanged."""
        return perturb_rows(log_probs, self._target_keys(positions))

    def choose(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        """The target's tokens, int64 [R]: the argmax of `perturb`, without computing all noise."""
        return choose_rows(log_probs, self._target_keys(positions))

    @classmethod
    def choose_all(cls, steps: Seq[tuple[Noise, torch.Tensor, Seq[int]]]) -> list[Seq[int]]:
        """`choose` for many (noise, log_probs [R, V], positions [R]), with one host synchronisation."""
        keys = [key for noise, _, positions in steps for key in noise._target_keys(positions)]
        rows = [log_probs for _, log_probs, _ in steps]
        flat = iter(choose_rows(rows[0] if len(rows) == 1 else torch.cat(rows), keys).tolist())
        return [[next(flat) for _ in positions] for _, _, positions in steps]

    def draw(self, log_probs: torch.Tensor, position: int, stream: Stream, index: int = 0) -> int:
        """One token from `log_probs` [V], which need not be normalised; greedy: the most probable one."""
        key = None if self.greedy else self.key(position, stream, index)
        return int(choose_rows(log_probs[None], [key]))

    def draw_without_replacement(
        self, log_probs: torch.Tensor, k: int, position: int, index: int = 0
    ) -> list[int]:
        """Return at most k different tokens from `log_probs` [V] on the draft stream, in sampling order.

        The top k of log p + Gumbel noise are such a sample (Kool et al., "Stochastic beams and where to find
        them", ICML 2019). Fewer are returned when fewer tokens have a probability above 0.
        """
        key = None if self.greedy else self.key(position, Stream.DRAFT, index)
        best = perturb_rows(log_probs[None], [key])[0].topk(min(k, len(log_probs)))
        return [
            token
            for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if score > -math.inf
        ]

    def accepts(self, probability: float, position: int, candidate: int) -> bool:
        """True with the given probability: never at 0, always at 1. `candidate` is the node."""
        bits = _finalise(self.key(position, Stream.ACCEPTANCE, candidate))
        return ((bits >> 11) | 1) * _ULP < probability

    def _target_keys(self, positions: Seq[int]) -> list[int | None]:
        return [None if self.greedy else self.key(position) for position in positions]


def gumbel(keys: Seq[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise, float64 [len(keys), vocab_size]: row r is a pure function of keys[r]."""
    return gumbel_of_bits(
        uniform_bits(_key_column(keys, device) + token_counters(vocab_size, torch.device(device)))
    )


def gumbel_at(key: int, token_id: int) -> float:
    """The noise of one token: `gumbel([key], vocab_size)[0, token_id]`, but for the logarithm's last place."""
    bits = _finalise((key + (token_id + 1) * _GOLDEN) & _MASK_64) >> 11 | 1
    return -math.log(-math.log(bits * _ULP))


def perturb_rows(log_probs: torch.Tensor, keys: Seq[int | None]) -> torch.Tensor:
    """`log_probs` [R, V] plus the noise of each row's key, float64; rows whose key is None are unchanged.

    Returns `log_probs` itself when no row has a key (all greedy).
    """
    noisy = [row for row, key in enumerate(keys) if key is not None]
    if not noisy:
        return log_probs
    noise = gumbel([key for key in keys if key is not None], log_probs.shape[-1], log_probs.device)  # [R', V]
    if len(noisy) == len(keys):
        return noise.add_(log_probs)
    perturbed = log_probs.double()  # [R, V]
    return perturbed.index_add(0, torch.tensor(noisy, device=log_probs.device), noise)


def choose_rows(log_probs: torch.Tensor, keys: Seq[int | None]) -> torch.Tensor:
    """Argmax of `perturb_rows`, int64 [R]; ties go to the lowest id."""
    if log_probs.is_cuda or log_probs.shape[-1] <= SMALL_VOCABULARY or not len(keys):
        return perturb_rows(log_probs, keys).argmax(-1)
    return torch.stack([_choose_row(row, key) for row, key in zip(log_probs, keys, strict=True)])


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with n > 1: the request's own for index 0, else one derived from it.

    Each answer can be replayed alone, with n = 1 and its own seed. Derived seeds are below 2**53, so that JSON
    readers that store numbers as doubles keep them exact.
    """
    return seed if index == 0 else _mix(seed, index) >> 11


def draw_seed(generator: random.Random | None = None) -> int:
    """A fresh seed below 2**53, from the operating system unless a generator is given."""
    return secrets.randbits(53) if generator is None else generator.getrandbits(53)


def _finalise(word: int) -> int:
    word = ((word ^ word >> 30) * _MULTIPLIERS[0]) & _MASK_64
    word = ((word ^ word >> 27) * _MULTIPLIERS[1]) & _MASK_64
    return word ^ word >> 31


def _mix(*words: int) -> int:
    """64 well-mixed bits of `words`; the chance of a collision is 2**-64."""
    state = 0
    for word in words:
        state = _finalise(((state ^ word) + _GOLDEN) & _MASK_64)
    return state


@lru_cache(maxsize=2**16)
def _target_key(seed: int, position: int) -> int:
    """Kept for a while: drafts and verdicts ask for the same positions, in several steps."""
    return _mix(seed, Stream.TARGET, position)


def _signed(word: int) -> int:
    """The int64 with the bits of `word`."""
    return word - 2**64 if word >= 2**63 else word


def _key_column(keys: Seq[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)[:, None]  # [R, 1]


@lru_cache(maxsize=8)
def token_counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    """(token + 1) * golden ratio, wrapped, int64 [V]: splitmix64's counter at output number `token`."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def uniform_bits(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's output for the counters `words`, as odd 53-bit integers; overwrites `words`.

    int64 products wrap. A right shift copies the sign, so the copies are masked away.
    """
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words ^= _shifted(words, shift)
        words *= _signed(multiplier)
    words ^= _shifted(words, 31)
    return _shifted(words, 11).bitwise_or_(1)


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Odd 53-bit integers over 2**53 are exact and in the open (0, 1): neither logarithm is ever infinite."""
    return bits.double().mul_(_ULP).log_().neg_().log_().neg_()


def _choose_row(log_probs: torch.Tensor, key: int | None) -> torch.Tensor:
    """Argmax of log_probs [V] + noise with a hash a token, without two logarithms for every token.

    The most probable tokens are compared first. Any other token is at least `_LEAD` below the top, so to win
    its uniform must exceed one common threshold. Scores are computed only for the tokens above it.
    """
    possible = log_probs > -math.inf  # [V]
    num_possible = int(possible.sum())
    if key is None or not num_possible:
        return log_probs.argmax()
    vocab_size = len(log_probs)
    counters = token_counters(vocab_size, log_probs.device)
    start = _signed(key)

    def scores(tokens: torch.Tensor) -> torch.Tensor:
        return gumbel_of_bits(uniform_bits(counters[tokens] + start)).add_(log_probs[tokens])

    if num_possible * 8 > vocab_size:
        top = log_probs.max()
        leading = log_probs >= top - _LEAD
        best = scores(leading.nonzero()[:, 0]).max()
        # u > exp(-exp(-needed)) means noise > needed; the margin covers the rounding of the threshold.
        needed = float(best) - (float(top) - _LEAD)
        threshold = math.exp(-math.exp(-needed)) * (1 - 1e-9)
        possible &= leading | (uniform_bits(counters + start) >= int(threshold / _ULP))
    tokens = possible.nonzero()[:, 0]  # ascending, so that ties go to the lowest id
    return tokens[scores(tokens).argmax()]

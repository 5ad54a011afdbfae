"""Processes the target's logits into the request's distribution, exactly and row by row.

The order is fixed and vLLM's:

1. masks: allowed tokens, grammar, bad words, `logit_bias`, stop tokens before `min_tokens`;
2. penalties: repetition, frequency, presence;
3. temperature;
4. filters: min-p, then top-k of the remaining tokens, then top-p of the remaining tokens.

Transformers applies min-p last. Here top-p measures its mass after min-p, there before it, so a request with both has
another distribution there; any other combination of filters is the same.

Every rule that depends on the text uses the text *of its row*: prompt, answer so far and the path to the node. So a
node's row is the same, bit for bit, as the row of that text once it is committed. No row depends on another.

Ties: a filter keeps all tokens at its threshold value, so the result depends neither on a sort's stability nor on the
order of the vocabulary. Greedy takes the lowest id among ties.

A row without an allowed token becomes a stop: only the stop tokens remain, with equal logits. If there are no stop
tokens either, the row is token 0 with probability 1. `permits` rejects that token, so the answer ends before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from slipstream.sampling.params import MIN_TEMPERATURE, SamplingParams

if TYPE_CHECKING:
    from slipstream.sampling.grammars.grammar import Grammar

NUM_NUCLEUS_CANDIDATES = 1024
"""Sorting a vocabulary is slow on a CPU: top-p sorts this many tokens first, all only if their mass is too small."""


class LogitsProcessor:
    """Applies a request's `SamplingParams` to logits. Stateless after construction.

    `stop_token_ids` are all tokens that end the answer, EOS included unless it is ignored. `bad_words` are the
    tokenised bad words. `vocab_size` is the width of the logits; stop tokens and bad words beyond it are ignored.
    `grammar` is the compiled `structured` of this answer. No answer begins with a token of `never_first`. Works on any
    device without a host synchronisation, except that on a CPU the size of top-p's sort depends on the data.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Seq[int],
        stop_token_ids: Iterable[int],
        bad_words: Iterable[Seq[int]],
        vocab_size: int,
        grammar: Grammar | None = None,
        never_first: Iterable[int] = (),
    ) -> None:
        params.check_vocabulary(vocab_size)
        vocabulary = range(vocab_size)
        words = {
            tuple(word) for word in bad_words if len(word) and all(token in vocabulary for token in word)
        }
        self._params = params
        self._vocab_size = vocab_size
        self._grammar = grammar
        self._stop = sorted({token for token in stop_token_ids if token in vocabulary})
        self._bad_tokens = frozenset(word[0] for word in words if len(word) == 1)
        self._never_first = sorted({token for token in never_first if token in vocabulary})
        self._phrases: dict[tuple[int, ...], list[int]] = {}
        """Prefix of bad phrases to the tokens that would complete one."""
        for word in sorted(words):
            if len(word) > 1:
                self._phrases.setdefault(word[:-1], []).append(word[-1])
        self._beginnings = sorted({len(beginning) for beginning in self._phrases})
        reach = self._beginnings[-1] if self._phrases else 0
        self._prompt_end = list(prompt_token_ids[-reach:]) if reach else []
        self._prompt_tokens = frozenset(prompt_token_ids) if params.repetition_penalty != 1 else frozenset()
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    @cached_property
    def is_plain_greedy(self) -> bool:
        """True when the token is the argmax of the raw logits, so that no processing is needed."""
        return self._params.greedy and not (self.masks or self._biases or self._penalises)

    @cached_property
    def filters_only(self) -> SamplingParams | None:
        """The parameters where temperature and filters are all that is done to logits, whatever the text; else None."""
        return None if self.masks or self._biases or self._penalises else self._params

    @cached_property
    def masks(self) -> bool:
        """True when some tokens may be masked."""
        waits = self._params.min_tokens > 0 and bool(self._stop)
        chosen = self._params.allowed_token_ids is not None or self._grammar is not None
        return chosen or bool(self._bad_tokens or self._phrases or self._never_first) or waits

    @cached_property
    def _allowed(self) -> frozenset[int] | None:
        return None if self._params.allowed_token_ids is None else frozenset(self._params.allowed_token_ids)

    @cached_property
    def _biases(self) -> bool:
        return bool(self._params.logit_bias)

    @cached_property
    def _penalises(self) -> bool:
        params = self._params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def log_probs(
        self, logits: torch.Tensor, output_token_ids: Seq[int], paths: Seq[Seq[int]]
    ) -> torch.Tensor:
        """Normalised log-probabilities [R, V] of the processed distributions; forbidden tokens are -inf.

        Row r of `logits` [R, V] follows prompt + `output_token_ids` + `paths[r]`. float64 stays float64,
        everything else is computed in float32. Temperature 0 gives one-hot rows. `logits` is not changed.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.masks or self._biases or self._penalises:
            scores = scores.clone()
        if self._biases:
            self._add_bias(scores)
        if self.masks:
            self._mask(scores, output_token_ids, paths)
            scores = self._revive(scores)
        if self._penalises:
            self._penalise(scores, output_token_ids, paths)
        if self._params.greedy:
            return _one_hot(scores)
        if self._params.temperature != 1:
            scores = scores / self._params.temperature
        return self._filter(scores).log_softmax(-1)

    def permits(self, output_token_ids: Seq[int], token_id: int) -> bool:
        """True where `token_id`, not a stop token, may follow the text. False for a sampled token only if its row had
        no allowed token."""
        if token_id in self._bad_tokens or (self._allowed is not None and token_id not in self._allowed):
            return False
        if not output_token_ids and token_id in self._never_first:
            return False
        if any(token_id in completing for completing in self._completing(output_token_ids, ())):
            return False
        return self._grammar is None or bool(self._grammar.mask(output_token_ids) >> token_id & 1)

    def _add_bias(self, scores: torch.Tensor) -> None:
        bias = self._params.logit_bias or {}
        tokens = self._tensor("bias tokens", lambda: torch.tensor(list(bias)), scores.device)
        values = self._tensor(
            "bias", lambda: torch.tensor(list(bias.values()), dtype=torch.float64), scores.device
        )
        scores[:, tokens] += values.to(scores.dtype)

    def _mask(self, scores: torch.Tensor, output: Seq[int], paths: Seq[Seq[int]]) -> None:
        forbidden = self._tensor("forbidden", self._never, scores.device)  # [V]
        early = [len(output) + len(path) < self._params.min_tokens for path in paths]
        if self._stop and any(early):
            unfinished = self._tensor("forbidden early", self._never_early, scores.device)  # [V]
            rows = torch.tensor(early, device=scores.device).unsqueeze(-1)
            forbidden = torch.where(rows, unfinished, forbidden)  # [R, V]
        scores.masked_fill_(forbidden, -math.inf)
        if self._never_first and not output:
            beginning = [row for row, path in enumerate(paths) if not path]
            begin = torch.tensor(beginning, dtype=torch.int64, device=scores.device)
            never = self._tensor("never first", lambda: torch.tensor(self._never_first), scores.device)
            scores[begin[:, None], never] = -math.inf
        if self._grammar is not None:
            follows = self._grammar.allowed(output, paths, scores.shape[-1]).to(scores.device)  # [R, V]
            scores.masked_fill_(~follows, -math.inf)
        if self._phrases:
            for row, path in enumerate(paths):
                for completing in self._completing(output, path):
                    scores[row, torch.tensor(completing, device=scores.device)] = -math.inf

    def _never(self) -> torch.Tensor:
        """The tokens that are masked in every row, bool [V]."""
        forbidden = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._params.allowed_token_ids is not None:
            forbidden[:] = True
            forbidden[torch.tensor(self._params.allowed_token_ids)] = False
        forbidden[torch.tensor(sorted(self._bad_tokens), dtype=torch.int64)] = True
        return forbidden

    def _never_early(self) -> torch.Tensor:
        """The tokens that are masked before `min_tokens`, bool [V]."""
        return self._never().index_fill_(0, torch.tensor(self._stop), True)

    def _completing(self, output: Seq[int], path: Seq[int]) -> list[list[int]]:
        """The last tokens of bad phrases whose preceding tokens are a suffix of the row's text."""
        if not self._phrases:
            return []
        reach = self._beginnings[-1]
        end = [*self._prompt_end, *output[-reach:], *path][-reach:]
        beginnings = (tuple(end[-length:]) for length in self._beginnings if length <= len(end))
        return [self._phrases[beginning] for beginning in beginnings if beginning in self._phrases]

    def _revive(self, scores: torch.Tensor) -> torch.Tensor:
        """Turn rows without an allowed token into a stop; see the module's docstring."""
        dead = ~(scores.amax(-1, keepdim=True) > -math.inf)  # [R, 1]
        return torch.where(dead, self._tensor("last words", self._last_words, scores.device), scores)

    def _last_words(self) -> torch.Tensor:
        logits = torch.full((self._vocab_size,), -math.inf)
        logits[torch.tensor(self._stop or [0])] = 0.0
        return logits

    def _penalise(self, scores: torch.Tensor, output: Seq[int], paths: Seq[Seq[int]]) -> None:
        """Repetition, frequency and presence, for the few columns whose tokens occur in any row's text."""
        params = self._params
        counts = Counter(output)
        tokens = sorted(self._prompt_tokens.union(counts, *paths))
        if not tokens:
            return
        column = {token: index for index, token in enumerate(tokens)}
        cells = [(row, column[token]) for row, path in enumerate(paths) for token in path]
        base = torch.tensor(
            [float(counts[token]) for token in tokens], dtype=scores.dtype, device=scores.device
        )
        occurrences = base.repeat(len(paths), 1)  # [R, U], U columns
        if cells:
            rows, columns = torch.tensor(cells, device=scores.device).unbind(-1)
            occurrences.index_put_((rows, columns), base.new_ones(len(cells)), accumulate=True)
        columns = torch.tensor(tokens, device=scores.device)
        picked = scores[:, columns]  # [R, U]
        if params.repetition_penalty != 1:
            in_prompt = torch.tensor([token in self._prompt_tokens for token in tokens], device=scores.device)
            penalty = params.repetition_penalty
            repeated = torch.where(picked > 0, picked / penalty, picked * penalty)
            most = (
                torch.finfo(picked.dtype).max * MIN_TEMPERATURE / 2
            )  # infinite logits would make the row NaN
            repeated = repeated.clamp(-most, most).masked_fill(picked == -math.inf, -math.inf)
            picked = torch.where(in_prompt | (occurrences > 0), repeated, picked)
        picked = picked - params.frequency_penalty * occurrences
        scores[:, columns] = picked - params.presence_penalty * occurrences.clamp(max=1)

    def _filter(self, scores: torch.Tensor) -> torch.Tensor:
        """Min-p, top-k and top-p on `scores` [R, V], which are logits over temperature."""
        top_k, top_p, min_p = self._params.top_k, self._params.top_p, self._params.min_p
        if min_p > 0:
            cut = scores.amax(-1, keepdim=True) + math.log(min_p)
            scores = scores.masked_fill(scores < cut, -math.inf)
        if 0 < top_k < self._vocab_size:
            cut = scores.topk(top_k).values[:, -1:]  # [R, 1]
            scores = scores.masked_fill(scores < cut, -math.inf)
        if top_p < 1:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < _nucleus_cut(probs, top_p), -math.inf)
        return scores

    def _tensor(self, name: str, make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
        """The tensor from `make`, cached for each device."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = make().to(device)
        return self._tensors[name, device]


def _one_hot(scores: torch.Tensor) -> torch.Tensor:
    """Log of one-hot rows at the argmax; ties go to the lowest id."""
    return torch.full_like(scores, -math.inf).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)


def _nucleus_cut(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest probability that top-p keeps, [R, 1]: a token is kept while the mass before it is below `top_p`."""
    vocab_size = probs.shape[-1]
    if not probs.is_cuda and vocab_size > NUM_NUCLEUS_CANDIDATES:
        ranked = probs.topk(NUM_NUCLEUS_CANDIDATES).values  # [R, C], descending
        if (
            float(ranked.double().sum(-1).min()) >= top_p + 1e-9
        ):  # with a margin for rounding, the cut is among them
            return _cut_of_ranked(ranked, top_p)
    return _cut_of_ranked(probs.sort(-1, descending=True).values, top_p)


def _cut_of_ranked(ranked: torch.Tensor, top_p: float) -> torch.Tensor:
    mass = ranked.double().cumsum(-1)  # float64: the cut must not depend on the order of additions
    num_kept = (mass - ranked < top_p).sum(-1, keepdim=True).clamp_(min=1)
    return ranked.gather(-1, num_kept - 1)

"""Exact proof, without sampling error, that a verifier and a drafter preserve the target's distribution.

**How.** The real verifier judges the real drafter's proposals over several steps, but every random decision
uses a `BranchingNoise`, which enumerates all outcomes with their exact weights. The result is the full
distribution of the first T tokens in float64, which is compared with the target's own by total variation: about
1e-16 if both are correct, and well above 1e-3 for each of the classical mistakes.

    gap = exactness_gap(Target(TableModel(seed=1), SamplingParams(top_p=0.9)), drafter, verifier,
    num_tokens=3) assert gap < 1e-12

A drafter is any function of (text, noise, max_depth); `TableDrafter` makes many. It may use `noise.draw`,
`noise.draw_without_replacement` and `noise.accepts`.

**Numbers used twice.** Real noise gives the same number to the same (position, stream, index); branching would
give it two independent values. So a second use in one step raises `ValueError`.

**Rows at one position.** Real noise is shared by the rows of one position (cousins in a tree), and the joint
law of their choices is not enumerated. The `coupled` verifier does not need it: its walk reads one row a
depth, hence one row a position, and positions are independent. So a choice is decided when it is read, which
also keeps large trees cheap. A verifier that reads two rows of one position raises, since it cannot be judged
this way.

**Drafts made with the target's noise** are outside this: the joint law of the two choices would be needed. For
them see `slipstream.testing.coupled_identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from slipstream.core.proposal import Proposal
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.noise import Noise, Stream
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.testing.table_model import TableModel, Text
from slipstream.verify.base import Judgement, Verifier

T = TypeVar("T")
Distribution = dict[Text, float]
EnumerableDrafter = Callable[[Text, Noise, int], Proposal]
Use = tuple[int, Stream, int, int]
"""What is drawn of a noise: root position, stream, position, index."""
Mark = tuple[int, float, frozenset[Use]]
"""A place in a run: number of decisions, their probability, what has been drawn."""


class Decisions:
    """The decisions of one run, in order; beyond its end the first branch is taken."""

    def __init__(self) -> None:
        self._branches: list[list[tuple[int, float]]] = []
        """For each decision: its unexplored outcomes with their probabilities, the current one first."""
        self._next = 0
        self._changed = 0
        """The first decision that differs from the run before."""
        self.weight = 1.0
        """The probability of the decisions so far."""
        self.used: set[Use] = set()
        """The random numbers used in this run."""

    def pick(self, probs: Callable[[], Seq[float]]) -> int:
        """An index of `probs`, taken with its probability. Runs repeat most decisions of earlier ones, so `probs` is
        called only for a new decision."""
        if self._next == len(self._branches):
            self._branches.append([(i, p) for i, p in enumerate(probs()) if p > 0])
        outcome, probability = self._branches[self._next][0]
        self._next += 1
        self.weight *= probability
        return outcome

    def advance(self) -> bool:
        """Restart with other decisions; False when all have been enumerated."""
        self._next, self.weight = 0, 1.0
        self.used.clear()
        while self._branches and len(self._branches[-1]) == 1:
            self._branches.pop()
        if self._branches:
            self._branches[-1].pop(0)
        self._changed = len(self._branches) - 1
        return bool(self._branches)

    def mark(self) -> Mark:
        """Return where this run is, for `resume` in the runs that follow it."""
        return self._next, self.weight, frozenset(self.used)

    def resume(self, mark: Mark) -> bool:
        """Go on from `mark`, if the decisions before it are those that were made then; what came of them holds."""
        if self._changed < mark[0]:
            return False
        self._next, self.weight = mark[:2]
        self.used = set(mark[2])
        return True


class BranchingNoise(Noise):
    """`Noise` whose every decision is taken from a script; see `all_runs`."""

    def __init__(self, root_position: int, script: Decisions) -> None:
        super().__init__(seed=0, root_position=root_position)
        self._script = script

    def choose(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        return torch.tensor(list(_LazyChoices(self, log_probs, positions)))

    @classmethod
    def choose_all(cls, steps: Seq[tuple[Noise, torch.Tensor, Seq[int]]]) -> list[Seq[int]]:
        return [_LazyChoices(noise, log_probs, positions) for noise, log_probs, positions in steps]

    def draw(self, log_probs: torch.Tensor, position: int, stream: Stream, index: int = 0) -> int:
        self._use(stream, position, index)
        return self._script.pick(lambda: log_probs.softmax(-1).tolist())

    def draw_without_replacement(
        self, log_probs: torch.Tensor, k: int, position: int, index: int = 0
    ) -> list[int]:
        self._use(Stream.DRAFT, position, index)
        left = log_probs.clone()
        drawn: list[int] = []
        while len(drawn) < k and bool(left.isfinite().any()):
            drawn.append(self._script.pick(lambda: left.softmax(-1).tolist()))
            left[drawn[-1]] = -torch.inf
        return drawn

    def accepts(self, probability: float, position: int, candidate: int) -> bool:
        self._use(Stream.ACCEPTANCE, position, candidate)
        return self._script.pick(lambda: [1.0 - probability, probability]) == 1

    def perturb(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        raise NotImplementedError(
            "the noise itself cannot be enumerated, only decisions; see coupled_identity"
        )

    def key(self, position: int, stream: Stream = Stream.TARGET, index: int = 0) -> int:
        raise NotImplementedError(
            "decide through choose, draw or accepts, so that every outcome can be enumerated"
        )

    def _use(self, stream: Stream, position: int, index: int) -> None:
        """Raise ValueError for a second use: branching would treat it as independent, real noise would not."""
        use = (self.root_position, stream, position, index)
        if use in self._script.used:
            raise ValueError(
                f"{stream.name} noise of position {position}, index {index} is used twice in a step"
            )
        self._script.used.add(use)


class _LazyChoices(Seq[int]):
    """The target's tokens for rows, each decided when it is first read."""

    def __init__(self, noise: Noise, log_probs: torch.Tensor, positions: Seq[int]) -> None:
        assert isinstance(noise, BranchingNoise)
        self._script, self._log_probs, self._positions = noise._script, log_probs, positions
        self._chosen: dict[int, tuple[int, int]] = {}  # position to (row, token)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, row: Any) -> Any:
        position = self._positions[row]
        if position not in self._chosen:
            self._chosen[position] = row, self._script.pick(lambda: self._log_probs[row].softmax(-1).tolist())
        decided_row, token = self._chosen[position]
        if decided_row != row:
            raise NotImplementedError(f"rows {decided_row} and {row} share the noise of position {position}")
        return token


def all_runs(run: Callable[[BranchingNoise], T], root_position: int = 0) -> Iterator[tuple[float, T]]:
    """Every (weight, result) of `run`, which must be a function of its noise; the weights sum to 1."""
    return all_scripts(lambda script: run(BranchingNoise(root_position, script)))


def all_scripts(run: Callable[[Decisions], T]) -> Iterator[tuple[float, T]]:
    """As `all_runs`, for a run that creates several noises, all of which must use its script."""
    script = Decisions()
    while True:
        result = run(script)
        yield script.weight, result
        if not script.advance():
            return


@dataclass
class Target:
    """The target of a proof: a table model with sampling parameters. Texts are without the prompt."""

    model: TableModel
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Text = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[Text, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._processor = LogitsProcessor(
            self.params,
            self.prompt,
            self.stop_token_ids,
            self.bad_words,
            self.model.vocab_size,
            self.grammar,
        )
        self._cache: dict[tuple[Text, tuple[Text, ...]], torch.Tensor] = {}
        self._last: dict[Text, bool] = {}
        """Texts that were checked, to whether their last token ends them."""

    def log_probs(self, output: Text, paths: tuple[Text, ...] = ((),)) -> torch.Tensor:
        """Processed log-probabilities, float64 [len(paths), V], after `output` and each path."""
        if (output, paths) not in self._cache:
            logits = torch.stack([self.model.logits((*self.prompt, *output, *path)) for path in paths])
            self._cache[output, paths] = self._processor.log_probs(logits, output, paths)
        return self._cache[output, paths]

    def judgement(self, output: Text, proposal: Proposal, noise: Noise) -> Judgement:
        """The verifier's input for `proposal` after `output`."""
        nodes = range(len(proposal))
        paths = [tuple(proposal.token_ids[step] for step in proposal.path(node)) for node in nodes]
        return Judgement(self.log_probs(output, ((), *paths)), proposal, noise)

    def ends(self, output: Text, num_tokens: int) -> bool:
        """True at `num_tokens`, at a stop token, and at a token that is not permitted (its row had no other)."""
        if len(output) >= num_tokens or not output:
            return len(output) >= num_tokens
        if output not in self._last:
            permitted = self._processor.permits(output[:-1], output[-1])
            self._last[output] = output[-1] in self.stop_token_ids or not permitted
        return self._last[output]

    def cut(self, output: Text, committed: Seq[int], num_tokens: int) -> Text:
        """`output` with the committed tokens up to the first stop token, or up to `num_tokens` in all."""
        for token in committed:
            if self.ends(output, num_tokens):
                break
            output = (*output, token)
        return output


def plain_distribution(target: Target, num_tokens: int) -> Distribution:
    """The target's own distribution of answers of at most `num_tokens` tokens: products of its rows."""

    def step(output: Text) -> Distribution:
        return {
            (*output, token): p for token, p in enumerate(target.log_probs(output)[0].exp().tolist()) if p > 0
        }

    return _unroll(target, num_tokens, step)


def output_distribution(
    target: Target, drafter: EnumerableDrafter, verifier: Verifier, num_tokens: int
) -> Distribution:
    """The distribution of answers of at most `num_tokens` tokens that speculative decoding gives.

    A draft is at most as deep as the tokens that are left, so that blocks are cut at the limit and at stop
    tokens.
    """

    def step(output: Text) -> Distribution:
        text = (*target.prompt, *output)
        drafted: tuple[Mark, Judgement] | None = None

        def run(script: Decisions) -> Text:
            nonlocal drafted
            # Most runs differ from the one before in the verifier's decisions only: the draft is then the same.
            if drafted is None or not script.resume(drafted[0]):
                noise = BranchingNoise(len(text), script)
                proposal = drafter(text, noise, num_tokens - len(output))
                drafted = script.mark(), target.judgement(output, proposal, noise)
            judgement = drafted[1]
            (verdict,) = verifier.verify([judgement])
            return target.cut(output, verdict.token_ids(judgement.proposal), num_tokens)

        outcomes: Distribution = {}
        for weight, answer in all_scripts(run):
            outcomes[answer] = outcomes.get(answer, 0.0) + weight
        return outcomes

    return _unroll(target, num_tokens, step)


def _unroll(target: Target, num_tokens: int, step: Callable[[Text], Distribution]) -> Distribution:
    """Apply `step` to all texts, shortest first, until each has ended; equal texts are merged."""
    alive: Distribution = {(): 1.0}
    ended: Distribution = {}
    while alive:
        output = min(alive, key=len)
        weight = alive.pop(output)
        for text, probability in step(output).items():
            pool = ended if target.ends(text, num_tokens) else alive
            pool[text] = pool.get(text, 0.0) + weight * probability
    return ended


def total_variation(left: Distribution, right: Distribution) -> float:
    """Half the summed difference: the most that the probability of any event differs."""
    return sum(abs(left.get(text, 0.0) - right.get(text, 0.0)) for text in left.keys() | right.keys()) / 2


def exactness_gap(target: Target, drafter: EnumerableDrafter, verifier: Verifier, num_tokens: int) -> float:
    """Total variation between speculative decoding's answers and the target's own; about 0 if lossless."""
    return total_variation(
        output_distribution(target, drafter, verifier, num_tokens), plain_distribution(target, num_tokens)
    )

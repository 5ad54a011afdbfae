"""Has the verifier decide about what a pass of the target computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Verdict
from slipstream.core.step import StepItem
from slipstream.models.executor.choices import OwnTokens
from slipstream.sampling.noise import Noise
from slipstream.sampling.processors import LogitsProcessor
from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.coupled import walk


def verify_items(verifier: Verifier, items: Seq[StepItem], processors: Seq[LogitsProcessor]) -> None:
    """Set the verdict of each item, whose `processors` are its answer's; the empty proposals are verified too."""
    judged: list[StepItem] = []
    inputs: list[Judgement] = []
    for item, processor in zip(items, processors, strict=True):
        if item.chosen is not None and not item.num_given:
            item.verdict = _walked(item, item.chosen, processor)
        else:
            judged.append(item)
            inputs.append(verify_input(verifier, item, processor))
    for item, verdict in zip(judged, verifier.verify(inputs), strict=True):
        given = tuple(range(item.num_given))
        item.verdict = Verdict(given, verdict.next_token) if given else verdict


def verify_input(verifier: Verifier, item: StepItem, processor: LogitsProcessor) -> Judgement:
    """The processed distributions of one sequence, its proposal and its noise."""
    sequence, proposal, log_probs = item.sequence, item.proposal, item.logits
    given = proposal.token_ids[: item.num_given]
    if given:  # they are text, and nothing is proposed behind them
        proposal, log_probs = EMPTY_PROPOSAL, log_probs[item.num_given :]
    if verifier.needs_distributions or not processor.is_plain_greedy:
        paths = [[proposal.token_ids[n] for n in proposal.path(node)] for node in range(ROOT, len(proposal))]
        log_probs = processor.log_probs(log_probs, [*sequence.output_token_ids, *given], paths)
    return Judgement(log_probs, proposal, _noise(item, len(given)))


def _walked(item: StepItem, chosen: Seq[int], processor: LogitsProcessor) -> Verdict:
    """The verdict of a pass that has chosen tokens.

    A row that it could not choose for is decided here, and only such a row: which arithmetic decides does not depend on
    what else was drafted. The walk is repeated where it met one, and where it may have gone too far: the proposal was
    cut since, or a node's draft was not finite, which the host alone knows. So its entries are where the pass has moved
    them in any case.
    """
    walked, token_ids = item.walked, item.proposal.token_ids
    is_last_word = walked is not None and not item.num_dropped_nodes
    if walked is not None and is_last_word and all(token_ids[node] >= 0 for node in walked.accepted):
        return walked
    chosen = list(chosen[: 1 + len(item.proposal)])
    if left := [row for row, token in enumerate(chosen) if token < 0]:
        noise, depths = _noise(item, 0), (0, *item.proposal.depths)
        log_probs = processor.log_probs(item.logits[left], item.sequence.output_token_ids, [()] * len(left))
        tokens = noise.choose(log_probs, [noise.root_position + depths[row] for row in left]).tolist()
        for row, token in zip(left, tokens, strict=True):
            chosen[row] = token
    return walk(item.proposal, chosen)


def own_tokens(item: StepItem, processor: LogitsProcessor) -> OwnTokens | None:
    """How the token of each row that `item.logits` will have is chosen; None where the text matters for it."""
    params = processor.filters_only
    if params is None:
        return None
    noise = _noise(item, 0)
    if noise.greedy:
        return OwnTokens([0] * (1 + len(item.proposal)), params)
    first, tail = noise.root_position, item.sequence.tail
    keys = [noise.signed_key(first + depth) for depth in (0, *item.proposal.depths)]
    if tail is None or tail.shift is None:
        return OwnTokens(keys, params)
    earlier = [noise.signed_key(position) for position in range(first - tail.most + 1, first)]
    return OwnTokens(keys, params, earlier, tail.shift)


def is_greedy_alone(item: StepItem, processor: LogitsProcessor) -> bool:
    """Whether of each row of `item.logits` only the best token matters."""
    sequence = item.sequence
    if sequence.wants_prompt_logprobs or sequence.params.logprobs is not None:
        return False
    return processor.is_plain_greedy


def _noise(item: StepItem, num_given: int) -> Noise:
    sequence = item.sequence
    greedy = sequence.params.temperature == 0
    return Noise(sequence.seed, len(sequence.token_ids) + num_given, greedy, sequence.nonce)

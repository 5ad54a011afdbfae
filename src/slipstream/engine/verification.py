"""Has the verifier decide about what a pass of the target computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Verdict
from slipstream.core.step import StepItem
from slipstream.sampling.noise import Noise
from slipstream.sampling.processors import LogitsProcessor
from slipstream.verify.base import Judgement, Verifier


def verify_items(verifier: Verifier, items: Seq[StepItem], processors: Seq[LogitsProcessor]) -> None:
    """Set the verdict of each item, whose `processors` are its answer's; the empty proposals are verified too."""
    inputs = [verify_input(verifier, *each) for each in zip(items, processors, strict=True)]
    for item, verdict in zip(items, verifier.verify(inputs), strict=True):
        given = tuple(range(item.num_given))
        item.verdict = Verdict(given, verdict.next_token) if given else verdict


def verify_input(verifier: Verifier, item: StepItem, processor: LogitsProcessor) -> Judgement:
    """The processed distributions of one sequence, its proposal and its noise."""
    sequence, proposal, log_probs = item.sequence, item.proposal, item.logits
    given = proposal.token_ids[: item.num_given]
    if item.chosen is not None and not given:
        return Judgement(log_probs, proposal, _noise(item, 0), item.chosen)
    if given:  # they are text, and nothing is proposed behind them
        proposal, log_probs = EMPTY_PROPOSAL, log_probs[item.num_given :]
    if verifier.needs_distributions or not processor.is_plain_greedy:
        paths = [[proposal.token_ids[n] for n in proposal.path(node)] for node in range(ROOT, len(proposal))]
        log_probs = processor.log_probs(log_probs, [*sequence.output_token_ids, *given], paths)
    return Judgement(log_probs, proposal, _noise(item, len(given)))


def row_choices(item: StepItem, processor: LogitsProcessor) -> list[tuple[int, float]] | None:
    """The key and the temperature of each row that `item.logits` will have, where a pass can choose by them alone."""
    params = processor.filters_only
    if params is None or params.filters:
        return None
    noise = _noise(item, 0)
    positions = (noise.root_position + depth for depth in (0, *item.proposal.depths))
    return [(0 if noise.greedy else noise.signed_key(position), params.temperature) for position in positions]


def _noise(item: StepItem, num_given: int) -> Noise:
    sequence = item.sequence
    greedy = sequence.params.temperature == 0
    return Noise(sequence.seed, len(sequence.token_ids) + num_given, greedy, sequence.nonce)

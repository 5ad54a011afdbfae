"""One target pass: from a plan and its proposals to logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from slipstream.core.pending import PendingNumbers, PendingTail
from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.draft_record import DraftRecord
from slipstream.engine.in_flight import InFlight
from slipstream.kv.cache import KVCache
from slipstream.kv.upload import upload
from slipstream.models import CausalLM, RowGroup
from slipstream.models.batch import side_by_side
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.models.rows import tree_rows

Choose = Callable[[StepItem], OwnTokens | None]


class ModelRunner:
    """Runs the target over the rows of a plan and keeps the cache in step with the verdicts."""

    def __init__(self, model: CausalLM, cache: KVCache, feature_layers: Seq[int] = ()) -> None:
        """`feature_layers` are the hidden states that are kept in addition to keys and values, for a drafter."""
        self.model = model
        self.cache = cache
        self.feature_layers = tuple(feature_layers)

    def launch(
        self, items: Seq[StepItem], drafts: DraftRecord, choose: Choose | None = None, best: bool = False
    ) -> InFlight:
        """Begin one pass over all scheduled rows and all proposals; `InFlight.finish` waits for its results.

        `choose` says how the tokens of an item that decodes are chosen; None where the pass cannot choose. Where the
        executor chooses, `chosen` and `walked` are filled in. With `best` only the best token of each row matters:
        where the executor finds these, `chosen` is filled in, and the logits have no columns.
        """
        if not self.model.executor.chooses:
            for item in items:
                item.resolve()
        groups = [self._row_group(item) for item in items]
        order = side_by_side(groups)
        ordered, groups = [items[i] for i in order], [groups[i] for i in order]
        choices = self._choices(ordered, groups, choose)
        output = self.model.forward(groups, self.cache.pool, self.feature_layers, choices=choices, best=best)
        if self.feature_layers and output.verdicts is None:  # else the pass has kept them
            features = torch.cat([output.hidden[layer] for layer in self.feature_layers], dim=-1)
            self.cache.keep_features(output.rows.slots_on(self.model.device), features)
        return InFlight(items, ordered, drafts, output, choices)

    def encode(self, items: Seq[StepItem]) -> None:
        """Have the encoder run for those whose input it has not read yet: before drafts, which may read the cache."""
        if self.model.encoded_shapes:
            for item in items:
                self.model.encode(self.cache, item.sequence)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted, paused or preempted."""
        self.cache.close_encoded(sequence.id)

    def enter(self, items: Seq[StepItem]) -> None:
        """Count the entries of the computed committed tokens as valid, though the pass may still be running: whatever
        reads, moves or overwrites them is launched behind it."""
        for item in items:
            if not item.is_entered:
                sequence, end = item.sequence, item.sequence.num_computed + item.num_rows
                self.cache.accounting.commit(sequence.id, sequence.entry_ids(sequence.num_computed, end))
                sequence.num_computed, item.is_entered = end, True

    def take_back(self, items: Seq[StepItem]) -> None:
        """The pass has failed, so none of its entries are valid. States of recurrent layers may go back further."""
        for item in items:
            sequence, accounting = item.sequence, self.cache.accounting
            if sequence.id not in accounting:
                continue
            if item.is_entered:
                sequence.num_computed -= item.num_rows
                item.is_entered = False
            accounting.truncate(sequence.id, sequence.num_computed)
            sequence.num_computed = accounting.num_valid(sequence.id)

    def _choices(
        self, items: Seq[StepItem], groups: Seq[RowGroup], choose: Choose | None
    ) -> TokenChoices | None:
        """How the pass chooses tokens; None where it does for no item."""
        if choose is None or not self.model.executor.chooses:
            return None
        choices = TokenChoices()
        for item, group in zip(items, groups, strict=True):
            own = choose(item) if item.decodes else None
            choices.skip(len(group.logit_rows) - (0 if own is None else len(own.keys)))
            if own is not None:
                choices.add(own, item.proposal)
        return choices if any(choices.sizes) else None

    def commit(self, item: StepItem) -> None:
        """Keep the entries of the computed committed tokens and of the kept nodes; forget the others.

        The tokens of the kept nodes are already in `sequence.token_ids`.
        """
        sequence = item.sequence
        num_entered = item.num_rows if item.is_entered else 0
        end = sequence.num_computed - num_entered + item.num_rows + len(item.kept_nodes)
        token_ids = sequence.entry_ids(sequence.num_computed, end)
        if item.walked is not None:  # the pass has moved them into place
            self.cache.accounting.commit(sequence.id, token_ids)
        else:
            rows = [*range(item.num_rows), *(item.num_rows + node for node in item.kept_nodes)][num_entered:]
            self.cache.commit(sequence.id, token_ids, [row - num_entered for row in rows])
        sequence.num_computed = end

    def _row_group(self, item: StepItem) -> RowGroup:
        sequence = item.sequence
        past, num_rows = sequence.num_computed, item.num_rows
        first_logit = num_rows - 1 if item.decodes else num_rows
        if sequence.wants_prompt_logprobs:
            first_logit = 0
        accounting = self.cache.accounting
        slots, shared = accounting.slots(sequence.id), accounting.shared(sequence.id)
        token_ids = sequence.token_ids[past : past + num_rows]
        fast = sequence.num_fast_tokens
        group = tree_rows(slots, past, token_ids, item.proposal, first_logit, fast, shared)
        group.owner = sequence.id
        if sequence.tail is not None:
            group.drafted, group.shift = (
                self._pending_tokens(sequence.tail, item.proposal),
                sequence.tail.shift,
            )
        return group

    def _pending_tokens(self, tail: PendingTail, proposal: Proposal) -> PendingNumbers:
        """The last token of the text, and what is proposed behind it."""
        last, ids = tail.tokens.tensor[-1:], proposal.token_ids
        if not len(ids):
            return PendingNumbers(last)
        own = ids.tensor if isinstance(ids, PendingNumbers) else upload(ids, last.device)
        return PendingNumbers(torch.cat([last, own]))

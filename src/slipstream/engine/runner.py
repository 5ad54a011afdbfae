"""One target pass: from a plan and its proposals to logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from slipstream.core.pending import PendingNumbers
from slipstream.core.step import StepItem
from slipstream.kv.cache import KVCache
from slipstream.kv.upload import download
from slipstream.models import CausalLM, RowGroup
from slipstream.models.batch import side_by_side, tree_rows
from slipstream.models.executor.choices import OwnTokens, PassVerdicts, TokenChoices

Choose = Callable[[StepItem], OwnTokens | None]


class ModelRunner:
    """Runs the target over the rows of a plan and keeps the cache in step with the verdicts."""

    def __init__(self, model: CausalLM, cache: KVCache, feature_layers: Seq[int] = ()) -> None:
        """`feature_layers` are the hidden states that are kept in addition to keys and values, for a drafter."""
        self.model = model
        self.cache = cache
        self.feature_layers = tuple(feature_layers)

    def forward(self, items: Seq[StepItem], choose: Choose | None = None) -> None:
        """One pass over all scheduled rows and all proposals.

        `choose` says how the tokens of an item that decodes are chosen; None where the pass cannot choose. Where the
        executor chooses, `chosen` and `walked` are filled in.

        Fills in each item's `rows`, the logits of its rows that matter: every computed row while prompt
        log-probabilities are wanted, else the last committed token's row and one a draft node (none for a prompt chunk
        that does not reach the end). Of an item that decodes, `logits` are the last of them.
        """
        if not self.model.executor.chooses:
            for item in items:
                _resolve(item)
        groups = [self._row_group(item) for item in items]
        order = side_by_side(groups)
        items, groups = [items[i] for i in order], [groups[i] for i in order]
        choices = self._choices(items, groups, choose)
        output = self.model.forward(groups, self.cache.pool, self.feature_layers, choices=choices)
        verdicts = self._read(output.verdicts, items)
        if self.feature_layers and verdicts is None:  # else the pass has kept them
            features = torch.cat([output.hidden[layer] for layer in self.feature_layers], dim=-1)
            self.cache.keep_features(output.rows.slots_on(self.model.device), features)
        end = 0
        for item, group, rows in zip(items, groups, output.rows.by_group(output.logits), strict=True):
            item.rows = rows
            end += len(group.logit_rows)
            if not item.decodes:
                continue
            size = 1 + len(item.proposal)
            item.logits = rows[len(rows) - size :] if len(rows) > size else rows
            root = end - size
            if choices is not None and verdicts is not None and choices.sizes[root]:
                item.chosen = verdicts.tokens[root:end]
                item.walked = verdicts.verdict(root)

    def _read(self, verdicts: torch.Tensor | None, items: Seq[StepItem]) -> PassVerdicts | None:
        """The verdicts of a pass; resolves the proposals of the items. The one wait of a step."""
        proposals = [item.proposal for item in items if item.proposal.is_pending]
        parts = [part for each in proposals for part in (each.token_ids, each.parents)]
        pending = [part for part in parts if isinstance(part, PendingNumbers) and part.is_pending]
        tensors = [part.tensor for part in pending] + ([] if verdicts is None else [verdicts.flatten()])
        if not tensors:
            return None
        numbers = download(torch.cat(tensors) if len(tensors) > 1 else tensors[0])
        for part in pending:
            part.resolve(numbers[: len(part)])
            del numbers[: len(part)]
        for item in items:
            _resolve(item)
        return None if verdicts is None else PassVerdicts.of(numbers)

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
        end = sequence.num_computed + item.num_rows + len(item.kept_nodes)
        token_ids = sequence.entry_ids(sequence.num_computed, end)
        if item.walked is not None:  # the pass has moved them into place
            self.cache.accounting.commit(sequence.id, token_ids)
        else:
            rows = [*range(item.num_rows), *(item.num_rows + node for node in item.kept_nodes)]
            self.cache.commit(sequence.id, token_ids, rows)
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
        return tree_rows(slots, past, token_ids, item.proposal, first_logit, sequence.num_fast_tokens, shared)


def _resolve(item: StepItem) -> None:
    """Have the item's proposal known to the host."""
    if item.proposal.is_pending:
        known = item.proposal.known()
        if item.drafted is item.proposal:
            item.drafted = known
        item.proposal = known

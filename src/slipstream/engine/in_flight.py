"""A pass that was launched, and what the host knows of it before it has read the results."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from slipstream.core.pending import PendingNumbers, PendingTail
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.draft_record import DraftRecord
from slipstream.kv.upload import Download, upload
from slipstream.models.causal_lm import ForwardOutput
from slipstream.models.executor.choices import PassVerdicts, TokenChoices


class InFlight:
    """One step's pass. Of a sequence that ends or is taken out meanwhile the results are dropped.

    Its slots may be given to others at once: what they write there is launched behind this pass, on the same stream.
    """

    def __init__(
        self, items: Seq[StepItem], ordered: Seq[StepItem], drafts: DraftRecord, output: ForwardOutput,
        choices: TokenChoices | None,
    ) -> None:  # fmt: skip
        """`ordered` are the step's `items` in the order of the pass, whose `output` and `choices` are given."""
        self.items = list(items)
        self.drafts = drafts
        self._verdicts = None if choices is None else output.verdicts
        self._roots: dict[int, int] = {}
        """Of each sequence whose tokens the pass chooses, by id, where its tree begins among the wanted rows."""
        self._share_out(ordered, output, choices)
        proposals = [item.proposal for item in items if item.proposal.is_pending]
        parts = [part for each in proposals for part in (each.token_ids, each.parents)]
        self._pending = [part for part in parts if isinstance(part, PendingNumbers) and part.is_pending]
        tensors = [part.tensor for part in self._pending]
        if output.verdicts is not None:
            tensors.append(output.verdicts.flatten())
        self._download: Download | None = None
        if tensors:
            self._download = Download(torch.cat(tensors) if len(tensors) > 1 else tensors[0])

    def _share_out(self, ordered: Seq[StepItem], output: ForwardOutput, choices: TokenChoices | None) -> None:
        """Fill in each item's `rows`, the logits of its rows that matter: every computed row while prompt
        log-probabilities are wanted, else the last committed token's row and one a draft node (none for a prompt chunk
        that does not reach the end). Of an item that decodes, `logits` are the last of them."""
        end = 0
        for item, rows in zip(ordered, output.rows.by_group(output.logits), strict=True):
            item.rows = rows
            end += len(rows)
            if not item.decodes:
                continue
            size = 1 + len(item.proposal)
            item.logits = rows[len(rows) - size :] if len(rows) > size else rows
            if output.best is not None:
                item.chosen = output.best[end - size : end]
            if choices is not None and self._verdicts is not None and choices.sizes[end - size]:
                self._roots[item.sequence.id] = end - size

    @property
    def decoding(self) -> list[StepItem]:
        """Those that get at least one token."""
        return [item for item in self.items if item.decodes]

    def chooses_for(self, sequence: Sequence) -> bool:
        """Whether the pass chooses the sequence's tokens."""
        return sequence.id in self._roots

    def tails(self, items: Seq[StepItem], drafts: bool) -> list[PendingTail]:
        """What the pass adds to the text of each of these items; a last token is negative where it could not choose it.
        `drafts` is whether more than the last token is asked for."""
        assert self._verdicts is not None
        roots = [self._roots[item.sequence.id] for item in items]
        if not drafts and not any(len(item.proposal) for item in items):
            last = self._verdicts[PassVerdicts._fields.index("last_tokens")]
            return [PendingTail(1, PendingNumbers(last[root : root + 1]), None) for root in roots]
        texts = [item.sequence.token_ids for item in items]
        most = [len(item.proposal) for item in items]
        width = max(max(most) + 1, 2)
        known = [token for text in texts for token in [0] * (width - len(text)) + text[-width:]]
        numbers = upload([*roots, *map(len, texts), *most, *known], self._verdicts.device)
        root, length, longest = numbers[: 3 * len(items)].view(3, -1)
        counts, _, lengths, _, tokens = self._verdicts
        num_accepted = lengths[root] - length
        # The text's last tokens: those that the pass chose, one a row from the root on, and known ones before them.
        row = num_accepted[:, None] + torch.arange(1 - width, 1, device=root.device)
        chosen = tokens[(root[:, None] + row.clamp(min=0)).clamp(min=0)]
        before = numbers[3 * len(items) :].view(-1, width).gather(1, (row + width).clamp(0, width - 1))
        last = torch.where(row < 0, before, chosen)
        # Where the host must choose, the next step is of no use, and must not write over what this one may keep.
        shifts = torch.where(counts[root] < 0, 0, num_accepted - longest)
        return [
            PendingTail(
                number + 1, PendingNumbers(last[place, -max(number + 1, 2) :]), shifts[place : place + 1]
            )
            for place, number in enumerate(most)
        ]

    def drop(self, sequence: Sequence) -> None:
        """What the pass made of the sequence is of no use."""
        self.items = [item for item in self.items if item.sequence is not sequence]

    def finish(self) -> None:
        """Wait for the results: fills in `chosen` and `walked` where the pass chose, and resolves the proposals."""
        if self._download is None:
            return
        numbers = self._download.read()
        for part in self._pending:
            part.resolve(numbers[: len(part)])
            del numbers[: len(part)]
        for item in self.items:
            item.resolve()
            item.length_before = len(item.sequence.token_ids)  # known now, where the step was launched ahead
        if self._verdicts is None:
            return
        verdicts = PassVerdicts.of(numbers)
        for item in self.items:
            root = self._roots.get(item.sequence.id)
            if root is not None:
                item.chosen = verdicts.tokens[root : root + 1 + len(item.proposal)]
                item.walked = verdicts.verdict(root)

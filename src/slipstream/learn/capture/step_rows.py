"""The rows of one step as they are kept: where each lies in the answer, and the target's most probable tokens there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.step import StepItem
from slipstream.learn.records.served import CheckedRows

DEFAULT_WIDTH = 32
"""Tokens that are kept of a row: 192 bytes."""
DEFAULT_BRANCH_ROWS = 8
"""Rows in rejected branches that are kept of a step, the shallowest first."""
_BLOCK = 64
"""Tokens whose largest logit is looked at first."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step checked of one answer, until its logits are reduced; all that it refers to stays as it is."""

    position: int
    """Tokens of the answer when the step began."""
    proposal: Proposal
    kept_nodes: tuple[int, ...]
    logits: Tensor
    """[1 + n, vocab], raw."""

    @classmethod
    def of(cls, item: StepItem) -> StepRows:
        """Return the rows of a sequence whose tokens have been committed."""
        position = item.length_before - item.sequence.num_prompt_tokens
        return cls(position, item.proposal, item.kept_nodes, item.logits)

    def chosen(self, max_branch_rows: int) -> list[int]:
        """The nodes whose rows are kept, in order: `ROOT`, the kept ones, and the first of the others by depth."""
        kept = set(self.kept_nodes)
        others = [node for node in range(len(self.proposal)) if node not in kept]
        others.sort(key=lambda node: self.proposal.depths[node])
        return [ROOT, *sorted([*self.kept_nodes, *others[:max_branch_rows]])]

    def where(self, nodes: Seq[int]) -> tuple[list[int], list[int], list[int], list[int]]:
        """(positions, depths, path ids, path ends) of the rows of `nodes`, as in `CheckedRows`."""
        positions, depths, path_ids, path_ends = [], [], [], []
        for node in nodes:
            path = self.proposal.path(node)
            on_text = 0
            while (
                on_text < min(len(path), len(self.kept_nodes)) and path[on_text] == self.kept_nodes[on_text]
            ):
                on_text += 1
            positions.append(self.position + on_text)
            depths.append(len(path))
            path_ids += [self.proposal.token_ids[one] for one in path[on_text:]]
            path_ends.append(len(path_ids))
        return positions, depths, path_ids, path_ends


def reduced(steps: Seq[StepRows], width: int, max_branch_rows: int) -> list[CheckedRows]:
    """The rows of each step as they are kept, `width` tokens of each; the logits of all are reduced together."""
    chosen = [step.chosen(max_branch_rows) for step in steps]
    taken = [
        step.logits
        if len(nodes) == len(step.logits)
        else step.logits[torch.tensor(nodes, device=step.logits.device) + 1]
        for step, nodes in zip(steps, chosen, strict=True)
    ]
    top_ids, top_log_probs, logsumexps = top_of(taken[0] if len(taken) == 1 else torch.cat(taken), width)
    found: list[CheckedRows] = []
    begin = 0
    for step, nodes in zip(steps, chosen, strict=True):
        end = begin + len(nodes)
        positions, depths, path_ids, path_ends = (np.array(one, np.int32) for one in step.where(nodes))
        found.append(
            CheckedRows(
                positions,
                depths,
                path_ids,
                path_ends,
                top_ids[begin:end].numpy(),
                top_log_probs[begin:end].numpy(),
                logsumexps[begin:end].numpy(),
            )
        )
        begin = end
    return found


def top_of(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [R, k], log-probabilities float16 [R, k], logsumexp float32 [R]) of logits [R, vocab], on the CPU."""
    logits = logits.float()
    logsumexps = logits.logsumexp(dim=1)
    values, ids = _top(logits, min(width, logits.shape[1]))
    log_probs = (values - logsumexps[:, None]).clamp(min=-60000.0).half()
    return ids.int().cpu(), log_probs.cpu(), logsumexps.cpu()


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `Tensor.topk` of each row [R, vocab], in a quarter of the time for a large vocabulary.

    The k largest lie in the k blocks with the largest maxima, so the others are not sorted.
    """
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks < 4 * k:
        top = logits.topk(k, dim=1)
        return top.values, top.indices
    whole = num_blocks * _BLOCK
    blocks = logits[:, :whole].view(len(logits), num_blocks, _BLOCK)
    best = blocks.amax(dim=2).topk(k, dim=1).indices  # [R, k]
    inside = (best[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    behind = torch.arange(whole, logits.shape[1], device=logits.device).expand(len(logits), -1)
    candidates = torch.cat([inside, behind], dim=1)  # [R, k * block + rest]
    top = logits.gather(1, candidates).topk(k, dim=1)
    return top.values, candidates.gather(1, top.indices)


def joined(parts: Seq[CheckedRows], num_tokens: int) -> CheckedRows:
    """The rows of all steps of an answer of `num_tokens` tokens, without those behind its last one."""
    if not parts:
        return CheckedRows()
    ends: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    num_ids = 0
    for part in parts:
        ends.append((part.path_ends + num_ids).astype(np.int32))
        num_ids += len(part.path_ids)
    rows = CheckedRows(
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.depths for part in parts]),
        np.concatenate([part.path_ids for part in parts]),
        np.concatenate(ends),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_log_probs for part in parts]),
        np.concatenate([part.logsumexps for part in parts]),
    )
    behind = (rows.positions >= num_tokens) & (rows.path_lengths() == 0)
    if not behind.any():
        return rows
    return CheckedRows(
        rows.positions[~behind],
        rows.depths[~behind],
        rows.path_ids,  # those rows have no path
        rows.path_ends[~behind],
        rows.top_ids[~behind],
        rows.top_log_probs[~behind],
        rows.logsumexps[~behind],
    )

"""Every family's passes, replayed from poisoned buffers, against the same passes computed anew: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.core.proposal import Proposal
from tests.kit.replayed_steps import TREE, check_replays
from tests.parity.tiny_models import FAMILIES, save_tiny

OURS = [family for family in FAMILIES if not family.startswith(("falcon", "gemma3n"))]
"""Falcon's attention is not ours, and Gemma 3n's states are four streams in every layer but the last."""
STEPS = [
    [(0, 9, Proposal())],
    [(1, 14, Proposal()), (0, 1, Proposal())],
    [(0, 1, TREE), (1, 1, TREE)],
    [(1, 1, Proposal.chain((5, 6))), (0, 2, TREE)],
    *(2 * [[(0, 1, Proposal()), (1, 1, Proposal())], [(0, 1, TREE), (1, 1, TREE)]]),
]
"""A prompt, a chunk beside a decoding sequence, trees, and the next token."""


@pytest.mark.parametrize("family", OURS)
def test_a_replay_has_the_bits_of_the_pass(family: str, tmp_path: Path) -> None:
    folder = str(save_tiny(FAMILIES[family](), tmp_path / family))
    check_replays(folder, "RecordedExecutor", "ComputedExecutor", STEPS, last_layer=False)

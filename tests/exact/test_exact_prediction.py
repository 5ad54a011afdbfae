"""The grid with predictions: whatever is expected, every verifier leaves every processed distribution as it is."""

from __future__ import annotations

import pytest
from exact_cases import EXACT, TARGETS, VERIFIERS

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.lookup.prediction import PredictionDrafter, PredictionOptions
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.testing.enumeration import exactness_gap
from slipstream.testing.stub_drafters import draft_context
from slipstream.testing.table_model import Text
from slipstream.text.expected import ExpectedText
from slipstream.verify import create_verifier

EXPECTED = {"repeats": (0, 1, 0, 0, 1, 2), "other": (2, 2, 1, 0), "short": (1,)}
PARAMS = SamplingParams()


@pytest.mark.parametrize("target", ["plain", "greedy", "top_k", "repetition", "grammar", "combined"])
@pytest.mark.parametrize("expected", EXPECTED)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_processor(verifier: str, expected: str, target: str) -> None:
    goal = TARGETS[target]
    start = len(goal.prompt)

    def draft(text: Text, noise: Noise, max_depth: int) -> Proposal:
        drafter = PredictionDrafter(PredictionOptions(), draft_context(vocab_size=goal.model.vocab_size))
        sequence = Sequence(
            0, "0", 0, list(text), start, PARAMS, 0, expected=ExpectedText(EXPECTED[expected])
        )
        [proposal] = drafter.propose([sequence], [max_depth])
        return proposal

    assert exactness_gap(goal, draft, create_verifier(verifier), 3) < EXACT

"""Sampled answers of two servers that share no noise: tested as they come, and at the end."""

from __future__ import annotations

import math
from dataclasses import asdict

from slipstream.tools.audit.decision import level_of_tests
from slipstream.tools.audit.findings import AuditTest
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.audit.settings import AuditSettings
from slipstream.tools.audit.statistics.hamming import mmd_test
from slipstream.tools.audit.statistics.power import smallest_shift
from slipstream.tools.audit.statistics.samples import Integers, code_points, padded
from slipstream.tools.audit.statistics.sequential import GAMBLERS, MIN_PAIRS, SequentialTest

BETTING, DISCREPANCY = "samples, by betting", "samples, by discrepancy"
CHARACTERS_A_TOKEN = 4
"""Texts are compared up to so many characters for each token that was requested."""


class SampledPairs:
    """Pairs of sampled answers to the same requests."""

    def __init__(self, settings: AuditSettings, enabled: bool) -> None:
        self._settings = settings
        self._enabled = enabled
        self._level = level_of_tests(settings.alpha)  # betting stops an audit only beyond its share
        self._bets = SequentialTest(1 - self._level, settings.max_tokens)
        self._strata: dict[tuple[int, str], tuple[list[AuditAnswer], list[AuditAnswer]]] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._by_text: bool | None = None
        self._num_symbols = 0

    @property
    def is_enabled(self) -> bool:
        """Whether sampled answers are compared as samples, and not token for token."""
        return self._enabled

    def add(self, request: AuditRequest, replies: list[AuditReply]) -> bool:
        """Take both sides' replies; True once the sides differ beyond doubt."""
        if not self._enabled or request.is_greedy:
            return False
        key = (request.prompt, request.profile)
        first, second = self._strata.setdefault(key, ([], []))
        number = self._numbers.setdefault(key, len(self._numbers))
        for mine, theirs in zip(replies[0].answers, replies[1].answers, strict=False):
            if self._by_text is None:
                self._by_text = mine.token_ids is None or theirs.token_ids is None
            first.append(mine)
            second.append(theirs)
            symbols = self._symbols(mine), self._symbols(theirs)
            self._num_symbols += sum(map(len, symbols))
            self._bets.add(number, *symbols)
        return self._bets.rejects

    def tests(self) -> list[AuditTest]:
        """Betting over the pairs as they came, and the discrepancy of all of them; none where all were empty."""
        if not self._num_symbols:
            return []
        mmd = mmd_test(
            [(self._rows(first), self._rows(second)) for first, second in self._strata.values()],
            seed=self._settings.seed,
            level=self._level,
        )
        shift = smallest_shift(self._bets.num_pairs, 1 - self._level, len(GAMBLERS), MIN_PAIRS)
        return [
            AuditTest(
                BETTING,
                "both sides sample alike (anytime-valid)",
                self._bets.wealth.p_value,
                {
                    "num_pairs": self._bets.num_pairs,
                    "log_wealth": self._bets.wealth.highest,
                    "rejected_after_pairs": self._bets.rejected_after,
                    "weights": self._bets.weights,
                    "compared": "characters" if self._by_text else "tokens",
                },
                smallest=f"a feature that is shifted by {shift:.2g} standard deviations of a pair's difference"
                if math.isfinite(shift)
                else "",
            ),
            AuditTest(
                DISCREPANCY,
                "both sides sample alike (MMD with a Hamming kernel, permutations within each prompt)",
                mmd.p_value,
                asdict(mmd),
                smallest=""
                if mmd.smallest_detectable is None
                else f"a squared discrepancy of {mmd.smallest_detectable:.2g}",
            ),
        ]

    def _symbols(self, answer: AuditAnswer) -> list[int]:
        if self._by_text or answer.token_ids is None:
            return [ord(character) for character in answer.text]
        return answer.token_ids

    def _rows(self, answers: list[AuditAnswer]) -> Integers:
        if self._by_text:
            length = self._settings.max_tokens * CHARACTERS_A_TOKEN
            return code_points([answer.text for answer in answers], length)
        return padded([answer.token_ids or [] for answer in answers], self._settings.max_tokens)

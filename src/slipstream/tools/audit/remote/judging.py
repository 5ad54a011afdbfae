"""From the replies of servers to the certificate."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.assets.workload.prompts import Prompt
from slipstream.profiling.provenance import provenance, without_folders
from slipstream.tools.audit.accounting import Knowledge, account
from slipstream.tools.audit.certificate import Certificate, file_hashes
from slipstream.tools.audit.claims import SmallestDeviations
from slipstream.tools.audit.decision import AuditDecision, Evidence, decide, level_of_tests
from slipstream.tools.audit.findings import AuditCheck, AuditTest
from slipstream.tools.audit.identity import AnswerComparison, compare
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.local import SAME, audit_data, lossy_settings
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest, TokenTop
from slipstream.tools.audit.reference import DISTRIBUTION, compare_with_reference, distribution_tests, judge
from slipstream.tools.audit.remote.margins import counted_margin, reported_gaps, reported_margin
from slipstream.tools.audit.remote.pairs import BETTING, DISCREPANCY, SampledPairs
from slipstream.tools.audit.remote.repeating import Repeats, log_prob_differences
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.replaying import Floats, Replayer
from slipstream.tools.audit.settings import AuditSettings
from slipstream.tools.audit.ties import Rounding, joined, more_than_repeats

LEAST_ROUNDING = 1e-3
"""Nats. Log-probabilities of two sides that differ by less are taken for differences of rounding."""
LARGEST_ROUNDING = 1.0
"""Nats. Two passes over one text that differ by more do not differ by rounding, not even in half precision."""
MAX_FAILED_SHARE = 0.02
"""Failed requests, and answers that cannot be scored, beyond this share leave too much unseen."""
LOG_PROBS = "log-probabilities"


@dataclass
class Collected:
    """All that was sent and what came."""

    settings: AuditSettings
    sides: Seq[ServerSide]
    prompts: Seq[Prompt]
    requests: Seq[AuditRequest]
    journal: AuditJournal
    repeats: Seq[Repeats]
    extras: Seq[AuditCheck]
    pairs: SampledPairs
    notes: Seq[str]
    why_incomplete: str
    interrupted: bool

    def replies(self, number: int) -> dict[int, AuditReply]:
        """Those of a side that did not fail."""
        found = self.journal.side(self.sides[number].name)
        return {request: reply for request, reply in found.items() if reply.error is None}


class Judge:
    """Judges the first side by the second, or by a reference."""

    def __init__(self, collected: Collected, replayer: Replayer | None, shares_noise: bool) -> None:
        """`shares_noise` says that the reference can replay sampled tokens."""
        self._collected = collected
        self._replayer = replayer
        self._shares_noise = shares_noise
        self._by_number = {request.number: request for request in collected.requests}
        self._mine = collected.replies(0)
        measured = joined([part for repeats in collected.repeats for part in repeats.noise])
        self._noise = measured[np.abs(measured) <= LARGEST_ROUNDING]
        self._doubts: list[str] = [collected.why_incomplete] if collected.why_incomplete else []
        if len(self._noise) < len(measured):
            self._doubts.append(
                f"log-probabilities of the same text differ by up to {float(np.abs(measured).max()):.2g} nats when a "
                f"server is asked twice, and more than {LARGEST_ROUNDING:g} is no rounding"
            )
        self._log_probs = AuditCheck(
            LOG_PROBS, "reported log-probabilities of the same tokens behind the same text"
        )

    def certificate(self) -> Certificate:
        """The decision and all that led to it."""
        collected, settings = self._collected, self._collected.settings
        if self._replayer is None:
            identity, rounding, gaps = self._against()
            tests = collected.pairs.tests()
        else:
            identity, rounding, gaps = self._by_reference(self._replayer)
            tests = self._distribution(self._replayer, rounding.tie_margin)
        level = level_of_tests(settings.alpha)
        ties = rounding.test(gaps, identity.num_ties, level)
        unknown = self._test_unknown(identity, rounding, level)
        tests = [*(test for test in (ties, unknown) if test is not None), *tests]
        known = Knowledge(None if self._replayer is None else self._replayer.end_tokens, self._count())
        checks = [
            identity.check,
            self._log_probs,
            *account(self._by_number, self._mine, known),
            *collected.extras,
        ]
        notes = [*self._doubt_failures(), *self._doubt_unscored()]
        smallest = SmallestDeviations(settings.confidence, settings.max_tokens)
        smallest.add_identity(identity, rounding)
        smallest.add_tests(tests)
        lossy = [text for side in collected.sides for text in side.info.lossy] + (
            lossy_settings(self._replayer.engine) if self._replayer is not None else []
        )
        evidence = Evidence(checks, tests, lossy, self._doubts, (SAME, DISTRIBUTION, BETTING, DISCREPANCY))
        decision, reasons = decide(evidence, settings.alpha)
        return Certificate(
            decision=decision,
            reasons=reasons,
            claim=smallest.claim(decision is AuditDecision.CERTIFIED, self._other()),
            audited=_described(collected.sides[0]),
            compared_with=self._described_other(),
            data=audit_data(settings, collected.prompts, collected.requests, self._mine),
            confidence=settings.confidence,
            checks=checks,
            tests=tests,
            ties=rounding.report(identity.num_ties, ties),
            smallest_deviations=smallest.as_json(),
            differences=[difference.as_json() for difference in identity.differences],
            notes=[*self._notes(), *notes],
            provenance=provenance(),
            complete=not collected.why_incomplete,
            interrupted=collected.interrupted,
        )

    # --- against another server ---------------------------------------------------------------------------------

    def _against(self) -> tuple[AnswerComparison, Rounding, list[Floats]]:
        """What both sides must answer alike, compared; what rounding there is; the distances of choices."""
        theirs = self._collected.replies(1)
        shared = not self._collected.pairs.is_enabled
        alike = {n: r for n, r in self._by_number.items() if shared or r.is_greedy}
        found = [
            log_prob_differences(mine, other)
            for number in alike
            if number in self._mine and number in theirs
            for mine, other in zip(self._mine[number].answers, theirs[number].answers, strict=False)
        ]
        rounding = self._rounding(joined(found))
        kinds = "every token" if shared else "every token at temperature 0"
        check = AuditCheck(SAME, f"{kinds} of the audited side against {self._other()}, under the same seed")

        def reported(
            request: AuditRequest, mine: AuditAnswer, other: AuditAnswer, place: int
        ) -> float | None:
            return reported_margin(request, mine, other, place, self._position(request, place))

        def margin(request: AuditRequest, mine: AuditAnswer, other: AuditAnswer, place: int) -> float | None:
            return counted_margin(request, reported(request, mine, other, place), rounding.tie_margin)

        def tells(request: AuditRequest, mine: AuditAnswer, other: AuditAnswer) -> bool:
            return reported(request, mine, other, 0) is not None

        identity = compare(alike, self._mine, theirs, margin, rounding.tie_margin, check, tells)
        gaps = [
            np.array(reported_gaps(answer))
            for number, request in alike.items()
            if request.is_greedy and number in theirs
            for answer in theirs[number].answers
        ]
        return identity, rounding, gaps

    def _position(self, request: AuditRequest, place: int) -> int | None:
        """The absolute position of a token, where both sides draw with Slipstream's noise."""
        length = self._mine[request.number].num_prompt_tokens
        ours = all(side.info.is_ours for side in self._collected.sides)
        return length + place if ours and length is not None else None

    # --- against a reference ------------------------------------------------------------------------------------

    def _by_reference(self, replayer: Replayer) -> tuple[AnswerComparison, Rounding, list[Floats]]:
        kinds = "every token" if self._shares_noise else "every token at temperature 0"
        check = AuditCheck(
            SAME, f"{kinds} of the audited side against the reference's own choice behind the same text"
        )
        replayed = [r for r in self._collected.requests if self._shares_noise or r.is_greedy]
        found = compare_with_reference(replayer, replayed, self._mine, check)
        rounding = self._rounding(joined(found.log_prob_differences))
        return judge(found.identity, rounding.tie_margin), rounding, found.gaps

    def _distribution(self, replayer: Replayer, rounding: float) -> list[AuditTest]:
        """A test of what is not replayed."""
        if self._shares_noise:
            return []
        sampled = [request for request in self._collected.requests if not request.is_greedy]
        confidence = self._collected.settings.confidence
        return distribution_tests(replayer, sampled, self._mine, confidence, rounding)

    # --- both ---------------------------------------------------------------------------------------------------

    def _rounding(self, differences: Floats) -> Rounding:
        """What rounding changes: measured by repeats of the same requests, and between the sides up to a least size."""
        given = self._collected.settings.tie_margin
        least = LEAST_ROUNDING if given is None else given
        small = differences[np.abs(differences) <= least]
        rounding = Rounding(joined([self._noise, small]), given)
        if len(differences):
            typical = float(np.median(np.abs(differences)))
            limit = max(least, 2 * float(np.abs(self._noise).max(initial=0.0)))
            self._log_probs.num_compared = len(differences)
            if typical > limit:
                self._log_probs.violate(
                    f"half of the log-probabilities differ by more than {typical:.2g} nats, where {limit:.2g} are "
                    "taken for rounding; if the two sides are meant to compute in different formats, give --tie-margin"
                )
        self._check_filled_in()
        if not self._log_probs.num_compared and not self._log_probs.num_violations:
            self._log_probs.skipped = "the servers do not report them"
        return rounding

    def _check_filled_in(self) -> None:
        """A violation where the audited side alone reports zeros in place of some log-probabilities."""
        theirs = {} if self._replayer is not None else self._collected.replies(1)
        mine, other = (
            [top for reply in side.values() for top in _tops(reply)] for side in (self._mine, theirs)
        )
        num = sum(top.is_filled_in for top in mine)
        if num and any(top.top for top in mine) and not any(top.is_filled_in for top in other):
            self._log_probs.violate(
                f"{num:,} of {len(mine):,} tokens are reported with the log-probability 0 and without alternatives: "
                "the server does not compute it there"
            )

    def _test_unknown(self, identity: AnswerComparison, rounding: Rounding, level: float) -> AuditTest | None:
        """Whether differences of unknown margin are more than rounding explains; None where that needs no test, or,
        with a doubt, where nothing tells.
        """
        if not identity.num_unknown or len(self._noise):
            # Against another side an answer has one first difference; a reference sees them all.
            most = identity.check.num_compared if self._replayer is None else identity.num_tokens
            return rounding.unknown_test(identity.num_tokens, identity.num_unknown, level, most)
        # No server reports log-probabilities, so only whole answers that were sent twice show how often rounding
        # shows.
        repeats = self._collected.repeats
        num_repeated = sum(each.num_answers for each in repeats)
        num_unlike = sum(each.num_different for each in repeats)
        test = more_than_repeats(identity.num_unknown, identity.check.num_compared, num_unlike, num_repeated)
        if num_unlike or test.p_value >= level:
            self._doubts.append(
                f"{identity.num_unknown} answers of {identity.check.num_compared} differ, and no log-probabilities "
                f"are reported, so nothing tells rounding from faults but {num_repeated} answers that were asked "
                f"twice, of which {num_unlike} differ"
            )
            return None
        return test

    def _doubt_failures(self) -> list[str]:
        """Notes of the requests that failed; too many leave doubt."""
        collected, notes = self._collected, list[str]()
        for side in collected.sides:
            errors = [
                reply.error for reply in collected.journal.side(side.name).values() if reply.error is not None
            ]
            if errors:
                url, num = side.address.url, len(collected.requests)
                text = f"{len(errors)} of {num} requests to {url} failed, the first: {errors[0]}"
                (self._doubts if len(errors) > MAX_FAILED_SHARE * num else notes).append(text)
        return notes

    def _doubt_unscored(self) -> list[str]:
        """A note of the answers without all token ids, which a reference cannot score; too many leave doubt."""
        answers = [answer for reply in self._mine.values() for answer in reply.answers]
        unscored = sum(answer.token_ids is None for answer in answers)
        if self._replayer is None or not unscored:
            return []
        text = f"{unscored} of {len(answers)} answers came without all token ids, and the reference scores no others"
        if unscored <= MAX_FAILED_SHARE * len(answers):
            return [text]
        self._doubts.append(text)
        return []

    def _count(self) -> Any:
        if self._replayer is None:
            return None
        tokenizer = self._replayer.engine.tokenizer
        return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _other(self) -> str:
        if self._replayer is not None:
            return "the reference"
        other = self._collected.sides[1]
        return "the same server without speculation" if other.is_undrafted else other.address.url

    def _described_other(self) -> dict[str, Any]:
        if self._replayer is None:
            return _described(self._collected.sides[1])
        engine = self._replayer.engine
        return {
            "kind": "reference",
            "model": without_folders(engine.config.model),
            "runs_as": engine.model.runs_as,
            "files_sha256": file_hashes(engine.config.model),
            "replays_noise": self._shares_noise,
        }

    def _notes(self) -> list[str]:
        notes = list(self._collected.notes)
        for side, repeats in zip(self._collected.sides, self._collected.repeats, strict=False):
            kept = {
                True: "keeps to a seed",
                False: "does not keep to a seed",
                None: "was not asked about seeds",
            }
            notes.append(f"{side.name} ({side.address.url}) {kept[side.info.keeps_seed]}")
            if repeats.num_different:
                notes.append(
                    f"{side.name} answers {repeats.num_different} of {repeats.num_answers} greedy requests otherwise "
                    "in a batch"
                )
        if self._collected.journal.num_resumed:
            notes.append(f"{self._collected.journal.num_resumed:,} replies are from an earlier run")
        return notes


def _tops(reply: AuditReply) -> list[TokenTop]:
    return [top for answer in reply.answers for top in answer.tops or ()]


def _described(side: ServerSide) -> dict[str, Any]:
    """A server for the certificate."""
    info = side.info
    return {
        "kind": "server",
        "url": side.address.url,
        "model": side.address.model,
        "owner": info.owner,
        "version": info.version,
        "extra_body": dict(side.extra),
        "speculation": info.settings,
        "returns_token_ids": info.returns_token_ids,
        "returns_logprobs": info.returns_logprobs,
        "returns_usage": info.returns_usage,
        "streams": info.streams,
        "keeps_seed": info.keeps_seed,
    }

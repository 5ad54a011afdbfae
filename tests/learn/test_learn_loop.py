"""A candidate's life: every state is reached by evidence alone, and whatever happens the base drafter is never lost."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import LearnError
from slipstream.learn.decisions.loop import (
    BASE,
    Act,
    Decision,
    LoopSettings,
    PairedBets,
    VersionLoop,
)

SPEEDS = {BASE: 0.45, "good": 0.6, "same": 0.45, "bad": 0.3, "broken": 0.2}


def serve(
    loop: VersionLoop, rng: random.Random, num: int, speeds: dict[str, float] = SPEEDS
) -> list[Decision]:
    """Requests whose hash is random, as they would be served; stops at the first decision."""
    for _ in range(num):
        version = loop.version_for(rng.random())
        decision = loop.served(version, min(max(rng.gauss(speeds[version], 0.12), 0.0), 1.0))
        if decision is not None:
            return [decision]
    return []


def on_trial(version: str, loop: VersionLoop | None = None) -> VersionLoop:
    loop = loop or VersionLoop()
    assert loop.offer(version, 1.3).act is Act.TRY
    return loop


def test_a_better_candidate_goes_over_a_share_to_everyone() -> None:
    loop, rng = VersionLoop(), random.Random(0)
    assert {loop.version_for(share / 100) for share in range(100)} == {BASE}, "there is no other one yet"
    assert loop.offer("good", 1.3, "faster") == Decision(Act.TRY, "good", "faster")
    shares = [loop.version_for(share / 100) for share in range(100)]
    assert shares.count("good") == 20
    [decision] = serve(loop, rng, 2000)
    assert (decision.act, decision.version) == (Act.PROMOTE, "good")
    assert (loop.serving, loop.previous, loop.candidate) == ("good", (BASE,), None)
    shares = [loop.version_for(share / 100) for share in range(100)]
    assert shares.count(BASE) == 50, "at first every second request is the base drafter's, to compare with"
    assert serve(loop, rng, 3000) == [], "what keeps its promise stays"
    shares = [loop.version_for(share / 100) for share in range(100)]
    assert shares.count(BASE) == 5, "later a share of them remains"


@pytest.mark.parametrize("version", ["bad", "broken"])
def test_a_worse_candidate_that_the_offline_evaluation_let_pass_never_reaches_everyone(version: str) -> None:
    for seed in range(50):
        loop, rng = on_trial(version), random.Random(seed)
        [decision] = serve(loop, rng, 20_000)
        assert decision.act is Act.REFUSE, seed
        assert loop.serving == BASE, seed


def test_a_promoted_version_that_breaks_is_rolled_back_within_200_requests() -> None:
    needed: list[int] = []
    for seed in range(40):
        loop, rng = VersionLoop(serving="good", previous=(BASE,), promise=1.3), random.Random(seed)
        assert serve(loop, rng, 500) == []
        for number in range(1, 201):
            if serve(loop, rng, 1, {**SPEEDS, "good": 0.2}):
                needed.append(number)
                break
        assert loop.serving == BASE, f"not noticed, seed {seed}"
    assert max(needed) <= 200


def test_a_change_of_topic_that_slows_all_alike_rolls_nothing_back() -> None:
    for seed in range(20):
        loop, rng = VersionLoop(serving="good", previous=(BASE,), promise=1.3), random.Random(seed)
        assert serve(loop, rng, 300) == []
        assert serve(loop, rng, 1500, {BASE: 0.2, "good": 0.27}) == [], seed


def test_frozen_means_that_nothing_changes_but_by_hand() -> None:
    loop, rng = VersionLoop(serving="good", previous=(BASE,)), random.Random(1)
    loop.frozen = True
    with pytest.raises(LearnError, match="frozen"):
        loop.offer("same", 1.0)
    assert serve(loop, rng, 1000, {**SPEEDS, "good": 0.0}) == []
    assert loop.roll_back() == BASE
    loop.promote("same")
    assert (loop.serving, loop.previous) == ("same", (BASE,))


def test_retired_versions_serve_nobody() -> None:
    loop = on_trial("bad", VersionLoop(serving="good", previous=(BASE, "same")))
    loop.retire({"good", "bad"})
    assert (loop.serving, loop.candidate, loop.previous) == ("same", None, (BASE,))


def test_bets_of_equal_groups_rarely_win() -> None:
    """Ville: at most one in twenty at 20, however often one looks."""
    wins = 0
    for seed in range(200):
        rng, bets = random.Random(seed), PairedBets(restarts=False)
        for _ in range(400):
            bets.add(rng.randrange(2), rng.random())
            if bets.evidence >= 20:
                wins += 1
                break
    assert wins <= 15


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"canary_share": 0.0}, "canary_share must be above 0"),
        ({"canary_share": 0.6}, "together"),
        ({"slack": -0.1}, "slack"),
        ({"max_canary_pairs": 0}, "max_canary_pairs"),
    ],
)
def test_settings_that_are_none(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(LearnError, match=message):
        LoopSettings(**wrong)  # type: ignore[arg-type]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "serve", "promote", "roll_back", "retire", "freeze"]),
        st.sampled_from(["a", "b", "c"]),
        st.floats(-1.0, 2.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_whatever_happens_in_whatever_order(events: list[tuple[str, str, float]]) -> None:
    """No event raises but an offer; who serves is somebody who was promoted; the base drafter is always at the
    bottom."""
    loop = VersionLoop(LoopSettings(max_canary_pairs=3))
    passed: set[str] = {BASE}
    for what, version, number in events:
        before, frozen = loop.serving, loop.frozen
        match what:
            case "offer":
                with contextlib.suppress(LearnError):
                    assert loop.offer(version, number).act is Act.TRY
                assert loop.serving == before
            case "serve":
                for name in (BASE, loop.serving, version):
                    decision = loop.served(name, number)
                    if decision is not None and decision.act is Act.PROMOTE:
                        passed.add(decision.version)
                    assert not (frozen and decision)
            case "promote":
                loop.promote(version, number)
                passed.add(version)
            case "roll_back":
                loop.roll_back()
            case "retire":
                loop.retire({version})
                assert version not in (loop.serving, loop.candidate, *loop.previous)
            case "freeze":
                loop.frozen = not loop.frozen
        assert loop.serving in passed
        assert loop.candidate != loop.serving
        assert 0 <= loop.control_share + loop.canary_share < 1
        named = {BASE, loop.serving, loop.candidate}
        assert {loop.version_for(share / 50) for share in range(50)} <= named

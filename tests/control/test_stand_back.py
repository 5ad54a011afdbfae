"""Where drafts measurably lose, nothing is drafted, whatever is estimated; and again when they measurably gain."""

from __future__ import annotations

import logging
import random

import pytest
from test_policy import FOREVER
from world import World, chain

from slipstream.control.realised import NUM_BACK_STEPS, NUM_OFF_STEPS, Pair, Realised
from slipstream.control.stand_back import RECENT_PAIRS, StandBack

SHARE = 0.005


def pair(gain: float, cost: float = 1.5) -> Pair:
    return Pair(gain * cost, 0.02 * cost, 0.02)


def losing(size: int, alpha: float, told: float, **changes: object) -> World:
    """Drafts are told to be accepted more often than they yield tokens."""
    drafters = [chain("a", {"t": alpha})]
    world = World(drafters, size=size, tasks=("t",), prompt=0, answer=FOREVER, probe_share=SHARE, **changes)  # type: ignore[arg-type]
    world.told_alpha = {"t": told}
    return world


def test_it_stands_back_from_drafts_that_lose_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    world = losing(8, 0.4, 0.8)
    with caplog.at_level(logging.INFO, logger="slipstream.control"):
        world.run(400)
        report = world.report()
        assert report.stands_back
        assert report.realised is not None
        assert report.realised.high < 1
        num_pairs = report.realised.num_pairs
        world.restart()
        world.run(1000)
        assert world.rate > 0.985 * world.off_rate()
        later = world.report()
        assert later.stands_back
        assert later.realised is not None
        assert later.realised.num_pairs > num_pairs  # it goes on to look
        assert later.probe_share < 1.2 * SHARE
        assert later.estimated_speedup == 1.0  # of what is done
        assert [record.message.split(":")[0] for record in caplog.records] == ["auto suspends drafts"]
        world.drafters[0].alpha["t"] = world.told_alpha["t"] = 0.85  # type: ignore[index]
        for _ in range(3000):
            world.step()
            if not world.report().stands_back:
                break
        assert [record.message.split(":")[0] for record in caplog.records][-1] == "auto resumes drafts"
        world.run(100)
        world.restart()
        world.run(200)
        assert world.rate > 0.95 * world.best_rate()
        assert len(caplog.records) == 2


def test_a_fixed_drafter_is_the_operators_choice() -> None:
    world = losing(8, 0.1, 0.8, adaptive=False).run(400)
    assert not world.report().stands_back
    assert world.choices[0].depth


def test_below_one_is_stood_back_from_and_above_one_ends_it() -> None:
    back = StandBack()
    changes = [back.learn(8, pair(gain), 1.5) for gain in (0.7, 0.72, 0.71)]
    assert changes == [False, False, True]
    assert back.is_active(8)
    assert back.is_active(9)
    assert not back.is_active(1)
    assert not back.is_active(64)
    assert back.lost(8) == pytest.approx(1.5 * (1 - 0.71), rel=0.01)
    changes = [back.learn(8, pair(gain), 1.5) for gain in (0.7, 1.3, 1.3)]
    assert changes == [False] * 3  # the interval still holds 1
    assert any(back.learn(8, pair(1.3), 1.5) for _ in range(RECENT_PAIRS))
    assert not back.is_active(8)
    assert back.gain(8) is None  # what it was has no say in what comes


def test_an_estimate_that_makes_up_for_the_error_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """Other traffic: 1.5 was promised where 0.75 came, so more than 2 is a promise again."""
    back = StandBack()
    for _ in range(3):
        back.learn(4, pair(0.75), 1.5)
    assert back.is_active(4)
    assert not back.trusts(4, 1.9)
    with caplog.at_level(logging.INFO, logger="slipstream.control"):
        assert back.trusts(4, 2.1)
    assert "auto resumes drafts: with about 4 requests drafts are estimated to make 2.10" in caplog.text
    assert not back.is_active(4)


@pytest.mark.parametrize(("true", "active"), [(0.9, (0.9, 1.0)), (1.1, (0.0, 0.0)), (1.0, (0.0, 1.0))])
def test_it_does_not_flap(true: float, active: tuple[float, float]) -> None:
    """500 noisy pairs, ten times: at most a few changes, even where drafts neither gain nor lose."""
    changes = num_active = 0
    for seed in range(10):
        source, back = random.Random(seed), StandBack()
        for _ in range(500):
            noisy = 1 + 0.15 * source.gauss(0, 1)
            changes += back.learn(4, pair(true * noisy, 1.5 * (1 + 0.15 * source.gauss(0, 1))), 1.2)
            num_active += back.is_active(4)
    assert changes <= 40
    assert active[0] <= num_active / 5000 <= active[1]


def test_a_probe_with_drafts_makes_pairs_of_the_same_kind() -> None:
    from test_realised import step

    realised = Realised()
    for _ in range(3):
        for _ in range(16):
            realised.learn(step(4, 0.02, 1, speculates=False), in_probe=False)
        assert realised.can_probe(4, with_drafts=True)
        assert not realised.can_probe(4)
        slow = step(4, 9.0, 1)
        pairs = [realised.learn(slow, in_probe=True, with_drafts=True)]
        for _ in range(NUM_BACK_STEPS - 1):
            pairs.append(realised.learn(step(4, 0.03, 3), in_probe=True, with_drafts=True))
        assert pairs[:-1] == [None] * (NUM_BACK_STEPS - 1)
        assert pairs[-1] is not None
    speedup = realised.speedup()
    assert speedup is not None
    assert speedup.ratio == pytest.approx(2.0)
    assert NUM_OFF_STEPS < NUM_BACK_STEPS

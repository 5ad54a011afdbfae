"""Accounts share places and steps evenly, in simulated steps; a paused sequence has no place."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.kv.segments import CHUNK, SegmentAccounting
from slipstream.sampling.params import SamplingParams
from slipstream.schedule import shares
from slipstream.schedule.scheduler import MAX_SCORED_ROWS, Scheduler
from slipstream.schedule.shares import even_shares

ids = itertools.count()
LONGEST = 1000


class World:
    """A scheduler whose steps compute nothing: each adds one token to every sequence that decodes."""

    def __init__(self, num_slots: int = 256 * CHUNK, places: int = 8, rows: int = 128) -> None:
        self.accounting = SegmentAccounting(num_slots, move=lambda source, destination, count: None)
        self.scheduler = Scheduler(
            self.accounting,
            max_num_seqs=places,
            max_num_batched_tokens=rows,
            num_tokens_limit=LONGEST,
            max_draft_tokens=0,
        )
        self.live: list[Sequence] = []
        self.num_steps = 0

    def ask(self, tenant: str, length: int = 5, max_tokens: int = 10**6, scored: bool = False) -> Sequence:
        """A request; without `max_tokens` it never ends."""
        number = next(ids)
        made = Sequence(
            id=number,
            request_id=str(number),
            index=0,
            token_ids=[number] * length,
            num_prompt_tokens=length,
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=1 if scored else None),
            seed=0,
            options=RequestOptions(tenant=tenant),
        )
        self.live.append(made)
        self.scheduler.add(made)
        return made

    def step(self) -> dict[int, int]:
        """One step; sequence id to its rows."""
        self.num_steps += 1
        plan = self.scheduler.plan()
        for item in plan.scheduled:
            sequence = item.sequence
            if item.decodes:
                sequence.token_ids.append(sequence.id)
            begin = sequence.num_computed
            self.accounting.commit(sequence.id, sequence.token_ids[begin : begin + item.num_rows])
            sequence.num_computed += item.num_rows
        for sequence in list(self.live):
            if sequence.num_output_tokens >= sequence.max_output_tokens:
                self.end(sequence)
        assert self.accounting.integrity() == []
        return {item.sequence.id: item.num_rows for item in plan.scheduled}

    def end(self, sequence: Sequence) -> None:
        sequence.finish_reason = FinishReason.LENGTH
        self.scheduler.remove(sequence)
        self.live.remove(sequence)

    def steps_until(self, sequence: Sequence, num_tokens: int, most: int) -> int:
        """Steps until it has so many output tokens; `most` of them at most."""
        start = self.num_steps
        while sequence.num_output_tokens < num_tokens:
            assert self.num_steps - start < most, f"no {num_tokens} tokens within {most} steps"
            self.step()
        return self.num_steps - start

    def running(self, account: str) -> list[Sequence]:
        return [one for one in self.scheduler.running if one.account == account]


@pytest.mark.parametrize("num_slots", [256 * CHUNK, 5 * CHUNK], ids=["places are short", "the cache is full"])
def test_two_tokens_do_not_wait_for_the_endless_streams_of_another_account(num_slots: int) -> None:
    world = World(num_slots)
    streams = [world.ask(f"a/{number}") for number in range(30)]
    for _ in range(20):
        world.step()
    assert world.steps_until(world.ask("b", max_tokens=2), 2, most=2) == 2
    lengths = [len(one.token_ids) for one in streams]
    world.step()
    world.step()
    assert sum(len(one.token_ids) for one in streams) > sum(lengths), "and the streams go on"
    assert streams[0].metrics.num_preemptions == 0, "the first one keeps its place"


def test_places_are_shared_by_account_and_the_newest_give_way() -> None:
    world = World(places=8)
    first = [world.ask("a") for _ in range(12)]
    world.step()
    for name in ("b", "c", "b/ann", "c/ann", "b", "c", "b"):
        world.ask(name)
    world.step()
    assert [len(world.running(name)) for name in "abc"] == [3, 3, 2]
    assert world.running("a") == first[:3]
    for sequence in list(world.live):
        if sequence.account != "a":
            world.end(sequence)
    world.step()
    assert world.running("a") == first[:8], "what others do not use is used, in the order of arrival"


def test_one_account_is_served_in_the_order_of_arrival_whatever_its_users() -> None:
    world = World(places=2)
    asked = [world.ask(f"a/{number % 3}", max_tokens=3 + number) for number in range(9)]
    begun: list[Sequence] = []
    while world.live:
        begun += [one for one in world.scheduler.running if one not in begun]
        world.step()
    assert begun == asked[: len(begun)]
    assert all(one.metrics.num_preemptions == 0 for one in asked)


def test_with_more_accounts_than_places_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "TURN_TOKENS", 16)
    world = World(places=2)
    streams = [world.ask(name) for name in "abcde"]
    for _ in range(5 * 16 * 2):
        world.step()
    made = [one.num_output_tokens for one in streams]
    assert min(made) >= 3 * 16
    assert max(made) - min(made) <= 2 * 16
    assert world.scheduler.num_preemptions <= sum(made) / 16, "each is paid by a turn"


def test_a_long_prompt_is_not_delayed_by_the_number_of_anothers_prompts() -> None:
    world = World(places=16, rows=256)
    many = [world.ask("a", length=900) for _ in range(15)]
    one = world.ask("b", length=500)
    rows = world.step()
    assert rows[one.id] == 128
    assert sum(rows[each.id] for each in many) == 128
    scored = World(places=16, rows=1024)
    for _ in range(15):
        scored.ask("a", length=900, scored=True)
    one = scored.ask("b", length=900, scored=True)
    assert scored.step()[one.id] == MAX_SCORED_ROWS // 2


@given(wanted=st.lists(st.integers(0, 300), max_size=12), total=st.integers(0, 1000))
def test_even_shares_leave_nothing_unused(wanted: list[int], total: int) -> None:
    shared = even_shares(wanted, total)
    assert sum(shared) == min(sum(wanted), total)
    assert all(share <= want for share, want in zip(shared, wanted, strict=True))
    if total >= len(wanted):
        unmet = [share for share, want in zip(shared, wanted, strict=True) if share < want]
        assert not unmet or min(unmet) >= max(shared) - 1, "who wants more has at least what any other has"


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_no_account_starves_and_no_step_is_smaller_for_it(seed: int) -> None:
    """Endless streams and short requests of several accounts; any of them makes tokens within a bounded time."""
    rng = random.Random(seed)
    places, accounts = rng.randint(1, 3), "abcd"[: rng.randint(2, 4)]
    ample = rng.random() < 0.5
    world = World(num_slots=(512 if ample else rng.randint(1, 3)) * CHUNK, places=places, rows=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "TURN_TOKENS", 8)
        # An account is ahead by what it is served in one go, at most a text of 24 tokens and a turn. Each other one
        # catches up, a row a step, and is ahead by as much in the end.
        most = 2 * (24 + 8) * (len(accounts) - 1)
        lacks = dict.fromkeys(accounts, 0)
        for _ in range(250):
            for account in accounts:
                if rng.random() < 0.15 and sum(one.account == account for one in world.live) < 10:
                    endless = rng.random() < 0.5
                    world.ask(account, rng.randint(1, 8), 10**6 if endless else rng.randint(1, 5))
            before = {one.id: len(one.token_ids) for one in world.live}
            asking = {one.account for one in world.live}
            rows = world.step()
            made = {one.account for one in world.scheduler.running if rows.get(one.id)}
            made |= {account for account in asking if all(one.account != account for one in world.live)}
            for account in accounts:
                lacks[account] = 0 if account in made or account not in asking else lacks[account] + 1
                assert lacks[account] <= most, f"{account} has no row for {most} steps"
            if ample:
                assert len(rows) == min(places, len(before)), "a place is free and somebody waits"
            for sequence in [one for one in world.live if len(one.token_ids) >= 24]:
                world.end(sequence)
        for sequence in list(world.live):
            world.end(sequence)
        assert world.accounting.num_held == 0


def test_a_paused_sequence_has_no_place_and_goes_on_where_it_was() -> None:
    world = World(places=2)
    first, second, third = (world.ask("a", length=40) for _ in range(3))
    for _ in range(3):
        world.step()
    world.scheduler.pause(first)
    assert world.scheduler.paused == [first]
    assert set(world.step()) == {second.id, third.id}
    assert world.accounting.num_retained, "what it has computed is kept"
    world.scheduler.resume(first)
    world.end(second)
    assert world.step()[first.id] == 1, "and is not computed again"
    assert first.metrics.num_cached_tokens == 0
    assert first.metrics.num_preemptions == 0


def test_paused_sequences_alone_are_no_work_and_can_be_removed() -> None:
    world = World()
    running, waiting = world.ask("a"), world.ask("b")
    world.scheduler.pause(waiting)
    world.step()
    world.scheduler.pause(running)
    world.scheduler.pause(running)
    assert not world.scheduler.has_work
    assert world.accounting.num_held == 0
    world.end(running)
    world.scheduler.resume(running)
    assert not world.scheduler.has_work, "an ended one does not come back"
    world.scheduler.resume(waiting)
    world.scheduler.resume(waiting)
    assert world.step() == {waiting.id: 5}
    world.end(waiting)
    assert not world.scheduler.has_work


def test_a_full_cache_takes_from_the_account_with_the_most_places() -> None:
    world = World(num_slots=5 * CHUNK)
    many = [world.ask("a") for _ in range(4)]
    world.step()
    one = world.ask("b")
    for _ in range(2 * CHUNK - 16):
        world.step()
    assert one.metrics.num_preemptions == 0
    assert one.num_output_tokens >= 2 * CHUNK - 17
    assert many[-1].metrics.num_preemptions >= 1
    assert many[0].metrics.num_preemptions == 0

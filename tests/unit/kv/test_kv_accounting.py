"""The accounting of the cache as a state machine: whatever happens, every entry stays where its owner finds it."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.kv.prefix import BLOCK
from slipstream.kv.segments import CHUNK, SegmentAccounting


class Cells:
    """Replaces the tensors: slot i holds whatever was written or moved there."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[object] = [None] * num_slots

    def move(self, source: int, destination: int, count: int) -> None:
        assert 0 <= source <= source + count <= len(self.slots)
        assert 0 <= destination <= destination + count <= len(self.slots)
        self.slots[destination : destination + count] = self.slots[source : source + count]


def entry(tenant: str, token_ids: list[int], position: int) -> object:
    """A key or value depends on all the tokens up to its position (and must not cross tenants)."""
    return (tenant, tuple(token_ids[: position + 1]))


class Driver:
    """Does to the accounting what the engine does, and checks every entry that is claimed to be valid."""

    def __init__(self, num_slots: int, prefix_caching: bool = True) -> None:
        self.cells = Cells(num_slots)
        self.accounting = SegmentAccounting(num_slots, self.cells.move, prefix_caching)
        self.texts: dict[int, tuple[str, list[int]]] = {}

    def open(self, owner: int, token_ids: list[int], tenant: str = "") -> int | None:
        cached = self.accounting.open(owner, token_ids, tenant)
        if cached is not None:
            assert cached < len(token_ids), "the last token must be computed"
            self.texts[owner] = (tenant, token_ids)
            self.check()
        return cached

    def compute(self, owner: int, num: int) -> bool:
        tenant, token_ids = self.texts[owner]
        done = self.accounting.num_valid(owner)
        num = min(num, len(token_ids) - done)
        if not self.accounting.reserve(owner, done + num):
            return False
        slots = self.accounting.slots(owner)
        for position in range(done, done + num):
            self.cells.slots[slots[position]] = entry(tenant, token_ids, position)
        self.accounting.commit(owner, token_ids[done : done + num])
        return True

    def close(self, owner: int) -> None:
        self.accounting.close(owner)
        del self.texts[owner]

    def check(self) -> None:
        assert self.accounting.integrity() == []
        for tenant, token_ids, slots in self.accounting.contents():
            for position, slot in enumerate(slots):
                assert self.cells.slots[slot] == entry(tenant, list(token_ids), position)
        for owner, (_, token_ids) in self.texts.items():
            computed = self.accounting.token_ids(owner)
            assert computed == token_ids[: len(computed)]
        kin: dict[int, tuple[object, ...]] = {}
        for owner in self.texts:
            shared = self.accounting.shared(owner)
            if shared is None:
                continue
            assert shared.length <= self.accounting.num_valid(owner)
            slots = self.accounting.slots(owner)[: shared.length]
            cells = tuple(self.cells.slots[slot] for slot in slots)
            longest = kin.get(shared.family, ())
            both = min(len(cells), len(longest))
            assert cells[:both] == longest[:both]
            kin[shared.family] = max(cells, longest, key=len)


class AccountingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(7 * CHUNK)
        self.random = random.Random(0)
        self.next_owner = 0
        self.prompts = [[self.random.randrange(3) for _ in range(260)] for _ in range(3)]

    @rule(
        prompt=st.integers(0, 2),
        length=st.integers(1, 200),
        tail=st.integers(0, 40),
        tenant=st.sampled_from(["", "a"]),
    )
    def open(self, prompt: int, length: int, tail: int, tenant: str) -> None:
        token_ids = self.prompts[prompt][:length] + [self.random.randrange(3) for _ in range(tail)]
        self.driver.open(self.next_owner, token_ids, tenant)
        self.next_owner += 1

    @precondition(lambda self: self.driver.texts)
    @rule(which=st.integers(0, 100), num=st.integers(1, 150))
    def compute(self, which: int, num: int) -> None:
        owners = sorted(self.driver.texts)
        self.driver.compute(owners[which % len(owners)], num)

    @precondition(lambda self: self.driver.texts)
    @rule(which=st.integers(0, 100), num=st.integers(1, 120))
    def append(self, which: int, num: int) -> None:
        owners = sorted(self.driver.texts)
        owner = owners[which % len(owners)]
        tenant, token_ids = self.driver.texts[owner]
        self.driver.texts[owner] = (tenant, token_ids + [self.random.randrange(3) for _ in range(num)])
        self.driver.compute(owner, num)

    @precondition(lambda self: self.driver.texts)
    @rule(which=st.integers(0, 100), back=st.integers(0, 40))
    def take_back(self, which: int, back: int) -> None:
        """The text's end reads otherwise than before."""
        owners = sorted(self.driver.texts)
        owner = owners[which % len(owners)]
        tenant, token_ids = self.driver.texts[owner]
        kept = max(self.driver.accounting.num_valid(owner) - back, 0)
        self.driver.accounting.truncate(owner, kept)
        self.driver.texts[owner] = (
            tenant,
            [*token_ids[:kept], *(self.random.randrange(3) for _ in range(back + 1))],
        )

    @precondition(lambda self: self.driver.texts)
    @rule(which=st.integers(0, 100))
    def close(self, which: int) -> None:
        owners = sorted(self.driver.texts)
        self.driver.close(owners[which % len(owners)])

    @invariant()
    def invariants_hold(self) -> None:
        self.driver.check()

    def teardown(self) -> None:
        for owner in list(self.driver.texts):
            self.driver.close(owner)
        assert self.driver.accounting.num_held == 0
        self.driver.accounting.clear()
        assert self.driver.accounting.num_retained == 0
        assert list(self.driver.accounting._index.entries()) == []


AccountingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAccounting = AccountingMachine.TestCase


def test_chat_turn_takes_over_the_whole_conversation() -> None:
    driver = Driver(8 * CHUNK)
    first = list(range(100))
    assert driver.open(0, first) == 0
    driver.compute(0, 100)
    start = driver.accounting.slots(0)[0]
    driver.close(0)
    assert driver.open(1, first + list(range(50))) == 100
    assert driver.accounting.slots(1)[0] == start, "nothing was copied"
    assert driver.accounting.num_retained == 0


def test_shared_system_prompt_is_copied_and_the_source_survives() -> None:
    driver = Driver(16 * CHUNK)
    system = list(range(64))
    driver.open(0, system + [7] * 100)
    driver.compute(0, 164)
    driver.close(0)
    assert driver.open(1, system + [8] * 50) == 64
    driver.compute(1, 114)
    assert driver.open(2, system + [7] * 100 + [1]) == 164, "the first conversation is still there"


def test_a_running_sequence_shares_what_it_has_computed() -> None:
    driver = Driver(16 * CHUNK)
    prompt = list(range(80))
    driver.open(0, prompt)
    assert driver.open(1, prompt) == 0, "nothing has been computed yet"
    driver.compute(0, 80)
    assert driver.open(2, prompt) == 79, "all but the last token"


def test_tenants_share_nothing() -> None:
    driver = Driver(16 * CHUNK)
    prompt = list(range(80))
    driver.open(0, prompt, "a")
    driver.compute(0, 80)
    driver.close(0)
    assert driver.open(1, prompt, "b") == 0
    assert driver.open(2, prompt, "a") == 79


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_reuse_is_token_by_token_beyond_a_block(length: int) -> None:
    driver = Driver(16 * CHUNK)
    driver.open(0, [1] * length)
    driver.compute(0, length)
    driver.close(0)
    expected = length if length >= BLOCK else 0
    assert driver.open(1, [1] * length + [2] * 20) == expected


def test_without_prefix_caching_nothing_is_retained() -> None:
    driver = Driver(8 * CHUNK, prefix_caching=False)
    driver.open(0, [1] * 100)
    driver.compute(0, 100)
    driver.close(0)
    assert driver.accounting.num_retained == 0
    assert driver.open(1, [1] * 100) == 0


def test_full_cache_refuses_without_harm_and_retained_entries_make_room() -> None:
    driver = Driver(4 * CHUNK)
    assert driver.open(0, [0] * (3 * CHUNK)) == 0
    driver.compute(0, 3 * CHUNK)
    assert driver.open(1, [1] * (2 * CHUNK)) is None
    driver.check()
    assert not driver.accounting.reserve(0, 5 * CHUNK)
    assert driver.accounting.reserve(0, 4 * CHUNK)
    driver.close(0)
    assert driver.open(2, [1] * (4 * CHUNK - 1)) == 0, "the retained segment gave way"


def test_fragmented_room_is_gathered() -> None:
    driver = Driver(6 * CHUNK)
    for owner in range(6):
        assert driver.open(owner, [owner] * (CHUNK - 1)) == 0
        driver.compute(owner, CHUNK - 1)
    for owner in (0, 2, 4):
        driver.accounting.close(owner, retain=False)
        del driver.texts[owner]
    assert driver.open(9, [9] * (3 * CHUNK - 1)) == 0, "three separate chunks became one"
    driver.check()


def test_what_a_step_in_flight_writes_moves_with_the_entries_before_it() -> None:
    driver = Driver(8 * CHUNK)
    for owner in range(2):
        assert driver.open(owner, [owner] * 9) == 0
        driver.compute(owner, 9)
    before = driver.accounting.slots(0)
    for position in range(9, CHUNK):
        driver.cells.slots[before[position]] = ("in flight", position)
    assert driver.accounting.reserve(0, 2 * CHUNK)
    after = driver.accounting.slots(0)
    assert after[0] != before[0], "the other sequence was in the way"
    driver.check()
    held = [driver.cells.slots[slot] for slot in after[9:CHUNK]]
    assert held == [("in flight", position) for position in range(9, CHUNK)]

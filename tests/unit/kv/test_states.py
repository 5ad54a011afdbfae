"""States of recurrent layers under random histories: every row sees the state that its own text gives.

The layer here is a hash: its state is a number, h' = (31 h + token + 1) mod 65521, exact in float32, so that one token
too few, too many or of another sequence shows in every later row. A window of the last tokens is kept beside it, as a
convolution's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kv.cache import KVCache
from slipstream.kv.checkpoints import StateAccounting
from slipstream.kv.pool import NO_ENTRIES, KVPool
from slipstream.kv.state import StatePool, StateRoom, StateShape
from slipstream.models.mixers.steps import states_behind
from slipstream.models.rows import RowGroup

MODULUS = 65521
TAPS = 3
SHAPES = [StateShape(((1,),), 1), StateShape(((TAPS - 1, 1),), 1)]
SPREAD = 1000
"""A row's output is the hash, and the window's sum in steps of this many beside it."""


def hashed(text: Sequence[int]) -> int:
    """The state behind a text."""
    state = 0
    for token in text:
        state = (31 * state + token + 1) % MODULUS
    return state


def window_sum(text: Sequence[int]) -> int:
    """What a convolution with the weights 1, 2, 3 makes of a text's last tokens."""
    last = [0] * TAPS + [token + 1 for token in text]
    return sum(weight * token for weight, token in zip((1, 2, 3), last[-TAPS:], strict=True))


class Hashes:
    """A cache of such a layer, which takes whole passes."""

    def __init__(
        self, num_slots: int = 512, num_owners: int = 6, num_copies: int = 4, logged: int = 2
    ) -> None:
        self.pool = KVPool([NO_ENTRIES], num_slots, torch.float32, torch.device("cpu"))
        self.pool.states = StatePool(SHAPES, StateRoom(num_owners, num_copies, logged), torch.device("cpu"))
        self.pool.fill(float("nan"))
        self.cache = KVCache(self.pool, prefix_caching=num_copies > 0)

    @property
    def accounting(self) -> StateAccounting:
        assert isinstance(self.cache.accounting, StateAccounting)
        return self.cache.accounting

    def forward(self, groups: Sequence[RowGroup], fail: bool = False) -> list[tuple[int, int]]:
        """The hash and the window of every row; a pass that fails does so between its two layers."""
        assert self.pool.states is not None
        states = self.pool.states.begin(groups)
        tokens = torch.tensor([[token + 1.0] for group in groups for token in group.token_ids])
        steps = states.inputs(0, tokens)

        def step(number: int, state: Tensor) -> Tensor:
            return (31 * state + steps[number]) % MODULUS

        outputs = torch.zeros(len(steps))
        for number, state in states_behind(states.walk, states.states(0)[0], step):
            outputs[number] = state
        if fail:
            raise MemoryError
        weight = torch.tensor([[1.0, 2.0, 3.0]])
        sums = states.convolve(states.states(1)[0], states.inputs(1, tokens), weight, None)
        states.finish()
        return list(
            zip(
                map(int, states.of_rows(outputs).tolist()),
                map(int, states.of_rows(sums)[:, 0].tolist()),
                strict=True,
            )
        )


@dataclass
class Running:
    """A sequence of a history."""

    tenant: str
    text: list[int]
    """The prompt and the answer so far."""


class History:
    """Does to a cache what an engine does, at random, and checks every row."""

    def __init__(self, seed: int, **sizes: int) -> None:
        self.random = random.Random(seed)
        self.layer = Hashes(**sizes)
        self.running: dict[int, Running] = {}
        self.ended: list[Running] = []
        self.next_owner = 0
        self.num_rows = self.num_reused = self.num_failed = 0

    def token(self) -> int:
        return self.random.randrange(4)

    def prompt(self) -> Running:
        """New, or behind a beginning of what another sequence had."""
        tenant = self.random.choice("ab")
        begun: list[int] = []
        if self.ended and self.random.random() < 0.8:
            other = self.random.choice(self.ended)
            tenant = other.tenant if self.random.random() < 0.8 else tenant
            begun = other.text[
                : self.random.choice([len(other.text), self.random.randrange(len(other.text) + 1)])
            ]
        return Running(tenant, [*begun, *(self.token() for _ in range(self.random.randrange(1, 40)))][:120])

    def open(self) -> None:
        sequence, owner = self.prompt(), self.next_owner
        self.next_owner += 1
        done = self.layer.accounting.open(owner, sequence.text, sequence.tenant)
        if done is not None:
            assert done < len(sequence.text)
            self.num_reused += done
            self.running[owner] = sequence

    def close(self, owner: int) -> None:
        self.ended.append(self.running.pop(owner))
        self.ended = self.ended[-12:]
        self.layer.accounting.close(owner, retain=self.random.random() < 0.9)

    def proposal(self) -> list[list[int]]:
        """Paths of a random tree from the top down, each node with its path; empty where nothing is drafted."""
        paths: list[list[int]] = []
        for node in range(self.random.randrange(8)):
            above = self.random.choice([[], *paths[-3:]])
            paths.append([*above, node])
        return paths

    def step(self) -> None:
        """One pass over some sequences, and its verdicts."""
        accounting = self.layer.accounting
        plans = []
        for owner in self.random.sample(
            sorted(self.running), self.random.randrange(1, len(self.running) + 1)
        ):
            text, past = self.running[owner].text, accounting.num_valid(owner)
            num = min(len(text) - past, self.random.choice([1, 2, 7, 50]))
            paths = self.proposal() if past + num == len(text) else []
            if not accounting.reserve(owner, past + num + len(paths)):
                self.close(owner)
                continue
            plans.append((owner, past, num, paths, [self.token() for _ in paths]))
        groups = [self.rows(*plan) for plan in plans if plan[0] in self.running]
        plans = [plan for plan in plans if plan[0] in self.running]
        if self.random.random() < 0.03 and groups:
            self.fail(groups)
            return
        rows = iter(self.layer.forward(groups) if groups else [])
        for owner, past, num, paths, drafted in plans:
            text = self.running[owner].text
            contexts = [text[: past + row + 1] for row in range(num)]
            contexts += [[*text[: past + num], *(drafted[node] for node in path)] for path in paths]
            for context in contexts:
                assert next(rows) == (hashed(context), window_sum(context)), (owner, context)
                self.num_rows += 1
            kept = self.random.choice([[], *paths]) if paths else []
            kept = kept[: self.random.randrange(len(kept) + 1)]
            token_ids = [*text[past : past + num], *(drafted[node] for node in kept)]
            self.layer.cache.commit(owner, token_ids, [*range(num), *(num + node for node in kept)])
            if past + num == len(text):
                text += [drafted[node] for node in kept] + [self.token()]

    def rows(self, owner: int, past: int, num: int, paths: list[list[int]], drafted: list[int]) -> RowGroup:
        text = self.running[owner].text
        is_chain = all(path == list(range(node + 1)) for node, path in enumerate(paths))
        return RowGroup(
            self.layer.accounting.slots(owner),
            past,
            [*text[past : past + num], *drafted],
            [],
            tail_seen=None if is_chain and self.random.random() < 0.5 else paths,
            num_chain=num,
            num_certain=past + num,
            owner=owner,
        )

    def fail(self, groups: list[RowGroup]) -> None:
        self.num_failed += 1
        with pytest.raises(MemoryError):
            self.layer.forward(groups, fail=True)
        for group in groups:
            assert group.owner is not None
            self.layer.accounting.truncate(group.owner, group.num_past)

    def go_back(self, owner: int) -> None:
        """As a drafter does whose text was changed."""
        length = self.random.randrange(self.layer.accounting.num_valid(owner) + 1)
        del self.running[owner].text[max(length, 1) :]
        self.running[owner].text.append(self.token())
        self.layer.accounting.truncate(owner, length)
        assert self.layer.accounting.num_valid(owner) <= length

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            chance = self.random.random()
            if not self.running or (chance < 0.2 and len(self.running) < 6):
                self.open()
            elif chance < 0.3:
                self.close(self.random.choice(sorted(self.running)))
            elif chance < 0.33:
                self.go_back(self.random.choice(sorted(self.running)))
            elif chance < 0.332:
                self.layer.accounting.clear()
            else:
                self.step()
            assert self.layer.accounting.integrity() == []


NUM_STEPS = int(os.environ.get("SLIPSTREAM_HISTORY_STEPS", "800"))


@pytest.mark.parametrize("seed", range(8))
def test_every_row_sees_the_state_of_its_own_text(seed: int) -> None:
    history = History(seed)
    history.run(NUM_STEPS)
    assert history.num_rows > 3000
    assert history.num_reused > 100
    assert history.num_failed > 5


@pytest.mark.parametrize("sizes", [{"num_copies": 0}, {"num_copies": 1}, {"num_slots": 96, "num_owners": 2}])
def test_with_little_room(sizes: dict[str, int]) -> None:
    history = History(11, **sizes)
    history.run(600)
    assert history.num_rows > 500
    assert (history.num_reused > 0) == (sizes.get("num_copies") != 0)


def decoded(layer: Hashes, owner: int, text: Sequence[int], cut: int) -> list[tuple[int, int]]:
    """Rows of a text in two passes."""
    rows = []
    for part in (text[:cut], text[cut:]):
        if part:
            past = layer.accounting.num_valid(owner)
            slots = layer.accounting.slots(owner)
            rows += layer.forward(
                [RowGroup(slots, past, part, [], num_certain=past + len(part), owner=owner)]
            )
            layer.cache.commit(owner, part, range(len(part)))
    return rows


def test_a_prompt_goes_on_behind_all_but_its_last_token() -> None:
    layer, text = Hashes(), [token % 4 for token in range(40)]
    assert layer.accounting.open(1, text) == 0
    decoded(layer, 1, text, 40)
    assert layer.accounting.open(2, text) == 39
    assert decoded(layer, 2, text[39:], 1) == [(hashed(text), window_sum(text))]
    assert layer.accounting.open(3, [*text[:39], 3, 3]) == 39
    assert layer.accounting.open(4, text, tenant="another") == 0


def test_others_that_depart_at_the_same_place_go_on_from_there() -> None:
    layer, shared = Hashes(num_owners=8), [1, 2, 3, 0] * 8
    texts = [[*shared, *[token] * 20] for token in range(4)]
    reused = []
    for owner, text in enumerate(texts):
        done = layer.accounting.open(owner, text)
        assert done is not None
        reused.append(done)
        decoded(layer, owner, text[done:], 5)
    # The second one shows where texts depart, from the third on they begin there; [0] goes on as `shared` does.
    assert reused == [0, 0, 32, 32]


def test_the_text_of_an_ended_sequence_is_gone_on_with() -> None:
    layer, text = Hashes(), [3, 1, 2] * 8
    layer.accounting.open(1, text)
    decoded(layer, 1, text, 24)
    for token in (1, 0, 2, 2, 1):
        decoded(layer, 1, [token], 1)
    layer.accounting.close(1)
    assert (
        layer.accounting.open(2, [*text, 1, 0, 2, 2, 1, 3, 3]) == 28
    )  # its last token's row may have been dropped
    assert layer.accounting.integrity() == []


def test_the_least_recently_used_copy_makes_room() -> None:
    layer = Hashes(num_copies=2)
    texts = [[token] * 30 for token in range(3)]
    for owner, text in enumerate(texts):
        layer.accounting.open(owner, text)
        decoded(layer, owner, text, 30)
        layer.accounting.close(owner)
    assert [each.token_ids[0] for each in layer.accounting.checkpoints] == [1, 2]
    assert layer.accounting.open(9, texts[0]) == 0


def test_a_long_prompt_has_copies_in_the_middle() -> None:
    layer = Hashes(num_slots=4096, num_copies=8)
    text = [token * 7 % 5 for token in range(2000)]
    layer.accounting.open(1, text)
    decoded(layer, 1, text, 700)
    assert sorted(len(each.token_ids) for each in layer.accounting.checkpoints) == [512, 1024, 1536, 1999]


def test_a_failed_pass_leaves_no_copy() -> None:
    layer, text = Hashes(), [1] * 30
    layer.accounting.open(1, text)
    with pytest.raises(MemoryError):
        layer.forward([RowGroup(layer.accounting.slots(1), 0, text, [], num_certain=30, owner=1)], fail=True)
    layer.accounting.truncate(1, 0)
    assert layer.accounting.checkpoints == []
    decoded(layer, 1, text, 30)
    assert len(layer.accounting.checkpoints) == 1
    assert layer.accounting.open(2, text) == 29
    assert decoded(layer, 2, text[29:], 1) == [(hashed(text), window_sum(text))]
    assert layer.accounting.integrity() == []


def test_another_tenants_copy_is_not_taken() -> None:
    layer, text = Hashes(num_copies=1), [1, 2] * 15
    for owner, tenant in enumerate("ba"):
        layer.accounting.open(owner, text, tenant)
        decoded(layer, owner, text, 30)
    assert [each.tenant for each in layer.accounting.checkpoints] == ["a"]
    assert layer.accounting.open(2, text, "b") == 0


def test_the_last_token_may_be_fed_again() -> None:
    layer, text = Hashes(), [3, 1, 2, 2]
    layer.accounting.open(1, text)
    decoded(layer, 1, text, 4)
    drafts = RowGroup(layer.accounting.slots(1), 4, [0, 1], [], num_certain=4, owner=1)
    assert layer.forward([drafts])[1][0] == hashed([*text, 0, 1])
    again = RowGroup(layer.accounting.slots(1), 3, [2], [], num_certain=4, owner=1)
    assert layer.forward([again]) == [(hashed(text), window_sum(text))]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (lambda slots: RowGroup(slots, 0, [1], []), "need an owner"),
        (lambda slots: RowGroup(slots, 5, [1], [], owner=7), "no state of sequence 7"),
        (lambda slots: RowGroup(slots, 5, [1], [], owner=1), "cannot go on behind 5 entries"),
    ],
)
def test_rows_without_a_state_are_refused(group: Callable[[Any], RowGroup], message: str) -> None:
    layer = Hashes()
    layer.accounting.open(1, [1] * 10)
    decoded(layer, 1, [1, 1], 1)
    with pytest.raises(ValueError, match=message):
        layer.forward([group(layer.accounting.slots(1))])


def test_more_owners_than_there_is_room_for_are_refused() -> None:
    layer = Hashes(num_owners=2)
    assert [layer.accounting.open(owner, [1, 2]) for owner in range(3)] == [0, 0, None]
    assert layer.accounting.integrity() == []

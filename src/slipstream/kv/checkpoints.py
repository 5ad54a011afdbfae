"""Prefix reuse where a model has recurrent layers: only where a copy of their state was kept. No tensors.

Keys and values of a text serve every text that begins with the same tokens, however far. A state serves only texts that
begin with *all* the tokens that it has seen. So copies are kept: of the state behind a prompt but for its last token,
which is always computed again; of the one that a sequence ends with; of some in the middle of long prompts; and where
a prompt departs from what the cache holds, because others may depart there too. A copy is found by comparing tokens,
and the least recently used one makes room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.kv.prefix import BLOCK
from slipstream.kv.slots import Held, SharedPrefix, SlotAccounting, SlotMap

if TYPE_CHECKING:
    from slipstream.kv.state import StatePool

SPACING = 512
"""Tokens between the copies in the middle of a prompt, or a multiple of so many: no prompt has more than four."""
_MOST_IN_PROMPT = 4


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of the states behind a text."""

    tenant: str
    token_ids: Sequence[int]
    """All the tokens that they have seen."""
    slot: int


@dataclass(slots=True)
class _Prompt:
    """What a sequence was opened with."""

    tenant: str
    token_ids: Sequence[int]
    wanted: set[int]
    """Lengths of the text at which a copy is wanted."""
    made: dict[int, int] = field(default_factory=dict)
    """Slots of copies of a pass that is not known to have come to its end, and the tokens that each has seen."""


class StateAccounting(SlotAccounting):
    """Another accounting, under which entries are valid only as far as the states of recurrent layers are known.

    `open` and `truncate` may leave fewer valid entries than that accounting would.
    """

    def __init__(self, slots: SlotAccounting, states: StatePool, prefix_caching: bool = True) -> None:
        super().__init__(slots.num_slots, slots._move, prefix_caching)
        self._slots, self._states = slots, states
        self._prompts: dict[int, _Prompt] = {}
        self._checkpoints: dict[int, StateCopy] = {}
        """By slot, the least recently used one first."""
        states.copies = self

    @property
    def num_owners(self) -> int:
        return self._slots.num_owners

    @property
    def num_held(self) -> int:
        return self._slots.num_held

    @property
    def num_retained(self) -> int:
        return self._slots.num_retained

    @property
    def checkpoints(self) -> Sequence[StateCopy]:
        """The copies that there are, the least recently used one first."""
        return list(self._checkpoints.values())

    def __contains__(self, owner: int) -> bool:
        return owner in self._slots

    def slots(self, owner: int) -> SlotMap:
        return self._slots.slots(owner)

    def token_ids(self, owner: int) -> Sequence[int]:
        return self._slots.token_ids(owner)

    def shared(self, owner: int) -> SharedPrefix | None:
        return self._slots.shared(owner)

    def open(self, owner: int, token_ids: Sequence[int], tenant: str = "", reuse: bool = True) -> int | None:
        common = self._slots.open(owner, token_ids, tenant, reuse)
        if common is None:
            return None
        if not self._states.open(owner):
            self._slots.close(owner)
            return None
        text = list(token_ids)
        self._prompts[owner] = _Prompt(tenant, text, set())
        self._prompts[owner].wanted = self._lengths_wanted(len(text), common)
        return self._go_back(owner, common)

    def _lengths_wanted(self, num_tokens: int, common: int) -> set[int]:
        if not (self._prefix_caching and self._states.num_copies):
            return set()
        spacing = -(-num_tokens // (_MOST_IN_PROMPT + 1) // SPACING) * SPACING or SPACING
        lengths = {num_tokens - 1, common, *range(spacing, num_tokens, spacing)}
        return {length for length in lengths if length >= BLOCK}

    def reserve(self, owner: int, num_tokens: int) -> bool:
        return self._slots.reserve(owner, num_tokens)

    def commit(self, owner: int, token_ids: Sequence[int]) -> None:
        self._slots.commit(owner, token_ids)
        prompt = self._prompts[owner]
        if prompt.made:
            text = self._slots.token_ids(owner)  # that of the prompt, unless it was changed since
            for slot, length in prompt.made.items():
                self._checkpoints[slot] = StateCopy(prompt.tenant, list(text[:length]), slot)
            prompt.made = {}

    def truncate(self, owner: int, num_tokens: int) -> None:
        self.begin(owner)
        num_tokens = min(num_tokens, self._slots.num_valid(owner))
        if not self._states.length(owner) <= num_tokens <= self._states.num_known(owner):
            self._go_back(owner, num_tokens)
        else:
            self._slots.truncate(owner, num_tokens)

    def _go_back(self, owner: int, num_tokens: int) -> int:
        """Begin `owner`'s states with the longest copy of its first `num_tokens` tokens, or anew; returns its length,
        which is that of the valid entries then."""
        prompt = self._prompts[owner]
        text = self._slots.token_ids(owner)[:num_tokens]
        found = self._longest(prompt.tenant, list(text))
        if found is None:
            self._states.reset(owner)
            length = 0
        else:
            self._states.restore(owner, found.slot, len(found.token_ids))
            self._checkpoints[found.slot] = self._checkpoints.pop(found.slot)  # used last
            length = len(found.token_ids)
        self._slots.truncate(owner, length)
        return length

    def _longest(self, tenant: str, token_ids: list[int]) -> StateCopy | None:
        """The copy that has seen most of the tokens, and no others."""
        best: StateCopy | None = None
        for each in self._checkpoints.values():
            length = len(each.token_ids)
            if length > len(token_ids) or each.tenant != tenant or (best and length <= len(best.token_ids)):
                continue
            if each.token_ids[-1] == token_ids[length - 1] and each.token_ids == token_ids[:length]:
                best = each
        return best

    def close(self, owner: int, retain: bool = True) -> None:
        self.begin(owner)
        token_ids = list(self._slots.token_ids(owner))
        prompt = self._prompts.pop(owner)
        slot, length = self._states.close(owner)
        self._slots.close(owner, retain)
        self._states.free_slots.append(slot)
        if retain and self._prefix_caching and BLOCK <= length <= len(token_ids):
            self._keep(prompt.tenant, token_ids[:length], slot)

    def _keep(self, tenant: str, token_ids: list[int], slot: int) -> None:
        """Keep the states in a free slot, if there may be a copy more and none has seen the same tokens."""
        same = self._longest(tenant, token_ids)
        if same is not None and len(same.token_ids) == len(token_ids):
            self._checkpoints[same.slot] = self._checkpoints.pop(same.slot)
        elif self._make_room():
            self._states.free_slots.remove(slot)
            self._checkpoints[slot] = StateCopy(tenant, token_ids, slot)

    def _make_room(self) -> bool:
        """Drop the least recently used copy where there are as many as there may be; False where there may be none."""
        unproven = sum(len(prompt.made) for prompt in self._prompts.values())
        if len(self._checkpoints) + unproven >= self._states.num_copies:
            if not self._checkpoints:
                return False
            self._states.free_slots.append(self._checkpoints.pop(next(iter(self._checkpoints))).slot)
        return True

    def slot_for(self, owner: int, length: int) -> int | None:
        prompt = self._prompts.get(owner)
        if prompt is None or length not in prompt.wanted:
            return None
        text = prompt.token_ids[:length]
        same = self._longest(prompt.tenant, list(text))
        if (same is not None and len(same.token_ids) == length) or self._is_made(prompt.tenant, text):
            return None
        if not self._make_room():
            return None
        slot = self._states.free_slots.pop()
        prompt.made[slot] = length
        return slot

    def _is_made(self, tenant: str, text: Sequence[int]) -> bool:
        """Whether a pass at hand makes a copy behind this text."""
        return any(
            prompt.tenant == tenant and length == len(text) and prompt.token_ids[:length] == text
            for prompt in self._prompts.values()
            for length in prompt.made.values()
        )

    def begin(self, owner: int) -> None:
        prompt = self._prompts.get(owner)
        if prompt is not None and prompt.made:
            self._states.free_slots += prompt.made
            prompt.made = {}

    def clear(self) -> None:
        self._slots.clear()
        self._states.free_slots += self._checkpoints
        self._checkpoints.clear()

    def contents(self) -> Iterable[Held]:
        return self._slots.contents()

    def integrity(self) -> list[str]:
        faults = [*self._slots.integrity(), *self._states.integrity()]
        unproven = [slot for prompt in self._prompts.values() for slot in prompt.made]
        slots = [*self._states.free_slots, *self._checkpoints, *unproven]
        if len(set(slots)) != len(slots):
            faults.append("a copy of states lies in a slot that another has, or that is free")
        if len(slots) + self._states.num_held != self._states.num_owners + self._states.num_copies:
            faults.append("slots of states are lost")
        if self._states.num_held != self.num_owners:
            faults.append(
                f"{self._states.num_held} sequences have states, and {self.num_owners} have entries"
            )
        return faults

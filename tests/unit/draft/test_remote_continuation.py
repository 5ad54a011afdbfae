"""A continuation is used for the text that it was drafted for and for no other, whatever is late, lost, doubled or
damaged."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.draft.remote.continuation import MAX_OLD_PREFIXES, Continuation
from slipstream.draft.remote.protocol import PrefixHash

VOCAB = 3
"""So few tokens that a shifted tail often looks right."""


def drafted(text: list[int]) -> int:
    """The worker's token after this very text; another text of the same length has another one."""
    return hashlib.sha256(bytes(text)).digest()[0] % VOCAB


def continuation(text: list[int], number: int) -> list[int]:
    """What the worker drafts after it."""
    found: list[int] = []
    for _ in range(number):
        found.append(drafted([*text, *found]))
    return found


def digest(text: list[int]) -> bytes:
    known = PrefixHash()
    known.extend(text)
    return known.digest()


class Scene:
    """An engine's text, a worker that drafts ahead of what it was told, and a net that does as it likes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.continuation = Continuation()
        self.text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        self.continuation.follow(self.text)
        self.worker = list(self.text)
        self.net: list[tuple[int, bytes, list[int]]] = []
        self.num_used = 0

    def draft(self) -> None:
        """The worker goes on with what it believes, its own tokens included."""
        new = continuation(self.worker, self.rng.randint(1, 3))
        self.net.append((len(self.worker), digest(self.worker), new))
        self.worker += new

    def tell(self) -> None:
        """The worker learns the text, and keeps what agrees with it."""
        if self.worker[: len(self.text)] != self.text:
            self.worker = list(self.text)

    def deliver(self) -> None:
        """Some tail arrives: not the first one, perhaps twice, perhaps with another length or other tokens."""
        if not self.net:
            return
        place = self.rng.randrange(len(self.net))
        length, hash_, tokens = self.net[place] if self.rng.random() < 0.3 else self.net.pop(place)
        if self.rng.random() < 0.15:
            length += self.rng.choice((-2, -1, 1, 2))  # its hash is another prefix's then
        self.continuation.take(max(length, 0), hash_, tokens)

    def commit(self) -> None:
        """A step: some of the draft is accepted, and a token of the target follows."""
        proposal = self.continuation.drafted[: self.rng.randint(0, 4)]
        accepted = proposal[: self.rng.randint(0, len(proposal))]
        self.num_used += len(accepted)
        bonus = drafted([*self.text, *accepted]) if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
        self.text += [*accepted, bonus]
        assert self.continuation.follow(self.text) == len(accepted) + 1

    def check(self) -> None:
        assert self.continuation.token_ids == self.text
        assert self.continuation.drafted == continuation(self.text, len(self.continuation.drafted))


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("ddtaaac"), min_size=1, max_size=80))
def test_only_tokens_that_were_drafted_for_the_text_are_kept(seed: int, actions: list[str]) -> None:
    scene = Scene(random.Random(seed))
    for action in actions:
        {"d": scene.draft, "t": scene.tell, "a": scene.deliver, "c": scene.commit}[action]()
        scene.check()
    assert scene.continuation.drafted == continuation(scene.text, len(scene.continuation.drafted))


def test_the_property_is_not_empty() -> None:
    rng = random.Random(1)
    scene = Scene(rng)
    for _ in range(3000):
        rng.choice((scene.draft, scene.tell, scene.deliver, scene.deliver, scene.commit))()
        scene.net = scene.net[-6:]
        scene.check()
    assert scene.num_used > 100
    assert scene.continuation.num_stale > 100


def test_a_draft_is_kept_as_long_as_the_text_agrees_with_it() -> None:
    continuation = Continuation()
    continuation.follow([1, 2, 3])
    assert continuation.take(3, digest([1, 2, 3]), [4, 5])
    assert continuation.take(
        5, digest([1, 2, 3, 4, 5]), [6, 7]
    )  # ahead of the text: what was drafted is its prefix
    assert continuation.drafted == [4, 5, 6, 7]
    continuation.follow([1, 2, 3, 4, 5])
    assert continuation.drafted == [6, 7]
    continuation.follow([1, 2, 3, 4, 5, 9])
    assert continuation.drafted == []


@pytest.mark.parametrize("known", [[1, 2], [1, 2, 9], [3, 2, 1]])
def test_a_tail_for_another_prefix_is_dropped_and_never_shifted(known: list[int]) -> None:
    continuation = Continuation()
    continuation.follow([1, 2, 3])
    assert not continuation.take(3, digest(known), [4, 5])
    assert not continuation.take(4, digest([1, 2, 3, 4]), [5])  # a token between the text and it is missing
    assert (continuation.drafted, continuation.num_stale) == ([], 2)


def test_a_tail_that_the_text_has_overtaken_gives_what_is_left_of_it() -> None:
    continuation = Continuation()
    continuation.follow([1])
    continuation.follow([1, 2, 3])
    assert continuation.take(1, digest([1]), [2, 3, 4])
    assert continuation.drafted == [4]
    assert not continuation.take(1, digest([1]), [2, 3])  # nothing is left
    assert not continuation.take(1, digest([1]), [2, 9, 4])  # the target said otherwise
    for token in range(MAX_OLD_PREFIXES + 1):
        continuation.follow([*continuation.token_ids, token % 2])
    assert not continuation.take(1, digest([1]), [*continuation.token_ids[1:], 7])  # too old to be recognised

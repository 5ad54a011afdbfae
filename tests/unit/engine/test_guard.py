"""What a guard lets an untrusted drafter get hold of, and how it treats one that is late."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream.core.proposal import Proposal, ProposalKind
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.guarded.guard import FIRST_PAUSE_S, MAX_TIMEOUTS, Guard
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import OracleOptions, draft_context

VOCAB = 50


class Plugin(Drafter):
    """Keeps all that it is given, and says what it is told to."""

    Options = OracleOptions

    def __init__(self) -> None:
        super().__init__(OracleOptions(), draft_context(VOCAB))
        self.answer: Any = Proposal()
        self.shown: list[Sequence] = []
        self.budgets: list[Seq[int]] = []
        self.seen: list[Observation] = []
        self.calls: list[str] = []
        self.cache: KVCache | None = None

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.calls.append("propose")
        self.shown, self.budgets = list(sequences), [*self.budgets, budgets]
        return [self.answer] * len(sequences)

    def observe(self, observations: Seq[Observation]) -> None:
        self.calls.append("observe")
        self.seen = list(observations)

    def rewind(self, sequence: Sequence) -> None:
        self.calls.append("rewind")
        self.shown = [sequence]

    def release(self, sequence: Sequence) -> None:
        self.calls.append("release")
        self.shown = [sequence]

    def attach(self, cache: KVCache) -> None:
        self.cache = cache


def sequence(number: int = 1, length: int = 10) -> Sequence:
    params = SamplingParams(logit_bias={3: 1.0}, max_tokens=20)
    return Sequence(number, str(number), 0, list(range(length)), 5, params, seed=0)


def guarded(drafter: Drafter, **options: Any) -> Guard:
    return Guard(drafter, VOCAB, frozenset(ProposalKind), **options)


def tokens_of(value: Sequence) -> dict[str, Any]:
    return {
        name: list(held) if isinstance(held, list) else held
        for name, held in vars(value).items()
        if name not in ("params", "metrics")
    }


def test_a_plugin_cannot_change_a_sequence() -> None:
    plugin, seq = Plugin(), sequence()
    guard = guarded(plugin)
    before = tokens_of(seq)
    guard.propose([seq], [4])
    guard.observe([Observation(seq, Proposal(), 0, torch.zeros(1, VOCAB))])
    for shown in (*plugin.shown, plugin.seen[0].sequence):
        assert shown.params.logit_bias is not None
        shown.params.logit_bias.clear()  # type: ignore[attr-defined]
        shown.token_ids[:] = [0] * 99
        shown.from_draft += [True]
        shown.metrics.record_step(1, 1, 1, 1)
        shown.id, shown.num_computed, shown.seed, shown.nonce = 7, 99, 99, 99
    assert tokens_of(seq) == before
    assert seq.params.logit_bias == {3: 1.0}
    assert seq.metrics.num_steps == 0


def test_a_plugin_is_not_asked_to_draft_behind_what_is_not_known() -> None:
    class Ahead(Plugin):
        def runs_ahead(self, sequence: Sequence) -> bool:
            raise AssertionError("asked in the engine's thread, for a sequence of the engine's")

    assert not guarded(Ahead()).runs_ahead(sequence())


def test_a_plugin_knows_the_requests_options() -> None:
    """Its memory must not mix tenants."""
    plugin, seq = Plugin(), sequence()
    seq.options = RequestOptions(tenant="a", task="chat", max_draft_tokens=3, draft_method="mine")
    guarded(plugin).propose([seq], [4])
    assert [shown.options for shown in plugin.shown] == [seq.options]


def test_a_plugin_follows_the_text_in_its_copy() -> None:
    plugin, seq = Plugin(), sequence()
    guard = guarded(plugin)
    guard.propose([seq], [4])
    [first] = plugin.shown
    assert (first.token_ids, first.id, first.num_prompt_tokens) == (seq.token_ids, 1, 5)
    seq.token_ids += [4, 5]
    seq.from_draft += [True, False]
    seq.num_computed = 11
    guard.observe([Observation(seq, Proposal.chain([4]), 1, torch.zeros(2, VOCAB))])
    [seen] = plugin.seen
    assert seen.sequence is first
    assert (first.token_ids, first.from_draft, first.num_computed) == (seq.token_ids, seq.from_draft, 11)
    del seq.token_ids[8:]
    guard.rewind(seq)
    assert plugin.calls[-1] == "rewind"
    assert plugin.shown == [first]
    assert first.token_ids == seq.token_ids
    seq.token_ids += [9]
    guard.propose([seq], [4])
    assert plugin.shown[0].token_ids == seq.token_ids
    guard.release(seq)
    guard.propose([seq], [4])
    assert plugin.shown[0] is not first, "nothing is kept of a sequence that was released"


def test_a_proposal_stays_as_it_was_checked() -> None:
    plugin, seq = Plugin(), sequence()
    token_ids, parents = [5, 6], [-1, 0]
    probs = torch.full((2, VOCAB), 1 / VOCAB)
    plugin.answer = Proposal(token_ids, parents, ProposalKind.SAMPLED_IID, probs)  # type: ignore[arg-type]
    guard = guarded(plugin)
    [proposal] = guard.propose([seq], [4])
    token_ids[:], parents[:] = [10**6] * 9, [7] * 9
    probs.fill_(float("nan"))
    plugin.budgets[0][0] = 99  # type: ignore[index]
    assert (proposal.token_ids, proposal.parents) == ((5, 6), (-1, 0))
    assert proposal.draft_probs is not None
    assert bool((proposal.draft_probs == 1 / VOCAB).all())
    logits = torch.zeros(3, VOCAB)
    guard.observe([Observation(seq, proposal, 0, logits)])
    plugin.seen[0].logits.fill_(9)
    object.__setattr__(plugin.seen[0].proposal, "token_ids", (1, 1))
    assert not logits.any()
    assert proposal.token_ids == (5, 6)


def test_a_plugin_cannot_raise_its_own_budget() -> None:
    class Greedy(Plugin):
        def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
            budgets[0] = 4  # type: ignore[index]
            return [Proposal.chain([1, 2, 3, 4])]

    guard = guarded(Greedy())
    assert len(guard.propose([sequence()], [2])[0]) == 0
    assert guard.num_failures == 1


def test_what_a_plugin_answers_is_read_in_its_own_thread() -> None:
    threads: set[str] = set()

    class Answers(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().__getitem__(place)

        def __iter__(self) -> Any:
            threads.add(threading.current_thread().name)
            return super().__iter__()

    class Lazy(Plugin):
        def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Any:
            return Answers([Proposal.chain([1])])

    assert guarded(Lazy()).propose([sequence()], [2])[0].token_ids == (1,)
    assert threads == {"slipstream-drafter"}


def test_a_plugin_reads_copies_of_the_cache() -> None:
    cache = KVCache(KVPool([LayerShape(1, 2, 2)], 64, torch.float32, torch.device("cpu"), feature_width=4))
    assert cache.accounting.open(1, list(range(10))) == 0
    cache.pool.features.fill_(3)
    cache.commit(1, list(range(10)), range(10))
    plugin = Plugin()
    guarded(plugin).attach(cache)
    given = plugin.cache
    assert given is not None
    features = given.features(1, 2, 5)
    assert (features.shape, given.feature_width, given.view([1]).feature_width) == ((3, 4), 4, 1)
    assert given.view([1, 2]).features(1, 2, 5).shape == (3, 2)
    for copied in (features, given.view([0]).features(1, 0, 9)):
        copied.fill_(9)
    assert bool((cache.pool.features == 3).all())
    for name in ("pool", "accounting"):
        with pytest.raises(AttributeError, match=f"may read features .* but not its {name}"):
            getattr(given, name)
    with pytest.raises(AttributeError):
        given.commit(1, [1], [0])


def test_our_own_drafters_get_the_things_themselves() -> None:
    class Ours(Plugin):
        pass

    Ours.__module__ = "slipstream.draft.ours"
    cache = KVCache(KVPool([LayerShape(1, 2, 2)], 8, torch.float32, torch.device("cpu")))
    ours, seq = Ours(), sequence()
    guard = guarded(ours)
    guard.attach(cache)
    [proposal] = guard.propose([seq], [4])
    assert ours.cache is cache
    assert ours.shown[0] is seq
    assert proposal is ours.answer


# --- late answers ---------------------------------------------------------------------------------------------


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LateDrafter(Plugin):
    """One of ours, which takes `takes_s` for a call."""

    __module__ = "slipstream.draft.late"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.takes_s = 0.0
        self.held: dict[int, int] = {}
        self.answer = Proposal.chain([1])

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.clock.now += self.takes_s
        self.held |= {seq.id: len(seq.token_ids) for seq in sequences}
        return super().propose(sequences, budgets)

    def release(self, sequence: Sequence) -> None:
        self.held.pop(sequence.id, None)

    def num_held(self) -> int:
        return len(self.held)


def late() -> tuple[LateDrafter, Guard, Clock]:
    clock = Clock()
    drafter = LateDrafter(clock)
    return drafter, guarded(drafter, timeout_s=1.0, clock=clock), clock


def test_a_drafter_that_was_late_is_asked_again_and_has_forgotten_every_sequence() -> None:
    drafter, guard, clock = late()
    asked, other, finished = sequence(1), sequence(2), sequence(3)
    assert [len(p) for p in guard.propose([asked, other, finished], [4] * 3)] == [1, 1, 1]
    drafter.takes_s = 5.0
    assert [len(p) for p in guard.propose([asked], [4])] == [0]
    assert (guard.num_failures, guard.num_held()) == (1, 0)
    assert guard.retired == "a call ended with an answer after 5.0 s, later than 1 s"
    drafter.takes_s = 0.0
    finished.finish_reason = FinishReason.STOP
    guard.release(finished)
    clock.now += FIRST_PAUSE_S - 1
    assert not guard.serves(asked)
    assert drafter.calls.count("propose") == 2
    clock.now += 1
    assert guard.serves(asked)
    assert guard.retired == ""
    other.token_ids += [4, 5]
    assert [len(p) for p in guard.propose([other], [4])] == [1]
    assert drafter.held == {2: 12}, "what it knew of all others is gone"
    assert guard.num_held() == 1


def test_pauses_double_and_end_for_good() -> None:
    drafter, guard, clock = late()
    drafter.takes_s = 2.0
    seq = sequence()
    for number in range(MAX_TIMEOUTS):
        assert guard.serves(seq)
        guard.propose([seq], [4])
        assert guard.retired
        clock.now += FIRST_PAUSE_S * 2**number - 0.5
        assert not guard.serves(seq)
        clock.now += 1.0
    assert guard.num_failures == MAX_TIMEOUTS
    clock.now += 1e9
    assert not guard.serves(seq)
    assert f"and {MAX_TIMEOUTS - 1} did before" in guard.retired


def test_a_sequence_that_was_failed_is_served_again_after_a_pause() -> None:
    drafter, guard, clock = late()
    drafter.answer = None
    guard.propose([sequence(1)], [4])
    assert (guard.num_retired, guard.serves(sequence(1))) == (1, False)
    drafter.takes_s = 5.0
    guard.propose([sequence(2)], [4])
    clock.now += FIRST_PAUSE_S
    assert guard.serves(sequence(1))


def test_late_in_observe_and_release() -> None:
    for call in ("observe", "release"):
        drafter, guard, clock = late()
        seq = sequence()
        guard.propose([seq], [4])

        def slowly(*_: Any, clock: Clock = clock) -> None:
            clock.now += 5

        setattr(drafter, call, slowly)
        if call == "observe":
            guard.observe([Observation(seq, Proposal(), 0, torch.zeros(1, VOCAB))])
        else:
            guard.release(seq)
        assert guard.retired
        assert guard.num_failures == 1


def test_a_plugin_that_still_hangs_is_not_asked_again_and_one_that_has_answered_is() -> None:
    go_on = threading.Event()
    clock = Clock()

    class Hanging(Plugin):
        def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
            super().propose(sequences, budgets)
            if self.calls.count("propose") == 2:
                go_on.wait(120)
            return [Proposal.chain([self.calls.count("propose")])] * len(sequences)

    plugin, seq = Hanging(), sequence()
    guard = guarded(plugin, timeout_s=120.0, clock=clock)
    assert guard.propose([seq], [4])[0].token_ids == (1,)
    [before] = plugin.shown
    guard.timeout_s = 0.2  # for the call that does not come back
    assert guard.propose([seq], [4])[0].token_ids == ()
    clock.now += FIRST_PAUSE_S
    assert guard.retired
    assert not guard.serves(seq), "it still hangs"
    go_on.set()
    until_s = time.monotonic() + 280
    while guard.retired and time.monotonic() < until_s:
        time.sleep(0.01)
    assert guard.serves(seq)
    guard.timeout_s = 120.0
    assert guard.propose([seq], [4])[0].token_ids == (3,), "what it said too late is thrown away"
    assert plugin.calls == ["propose", "propose", "release", "propose"]
    assert plugin.shown[0] is not before
    assert plugin.shown[0].token_ids == seq.token_ids

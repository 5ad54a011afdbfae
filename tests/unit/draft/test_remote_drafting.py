"""Both sides of a remote drafter without sockets: the worker that drafts ahead, the drafter, and their faults."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.combine.group import DrafterGroup
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.remote.ahead import AheadDrafting
from slipstream.draft.remote.drafter import RemoteDrafter
from slipstream.draft.remote.link import Link
from slipstream.draft.remote.options import RemoteOptions, ServedOptions
from slipstream.draft.remote.protocol import PrefixHash
from slipstream.draft.remote.sampling import sampling_message
from slipstream.draft.remote.serving import ANY_VERIFIER, serve_drafter, served
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError, ProtocolError
from slipstream.models import load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import draft_context
from tests.kit.loopback import FaultyLink, LoopbackDrafter, LoopbackOptions

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB = 4
CONTEXT = draft_context(VOCAB)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9)


def after(text: Seq[int]) -> int:
    """The one token that is drafted after a text."""
    return hashlib.sha256(bytes(text)).digest()[0] % VOCAB


def continuation(text: Seq[int], number: int) -> tuple[int, ...]:
    found: list[int] = []
    for _ in range(number):
        found.append(after([*text, *found]))
    return tuple(found)


@dataclass(frozen=True)
class HashOptions:
    num_speculative_tokens: int = 4


class HashDrafter(Drafter):
    """Drafts what `after` says, and checks that it is told of a text as an engine would tell it."""

    Options = HashOptions
    traits = DrafterTraits(reads_text_only=True)

    def __init__(self, options: Any = HashOptions(), context: DraftContext = CONTEXT) -> None:
        super().__init__(options, context)
        self.known: dict[int, list[int]] = self.by_sequence()
        self.num_rewound = 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        for sequence in sequences:
            known = self.known.get(sequence.id, [])
            assert sequence.token_ids[: len(known)] == known, "a text was changed without a rewind"
            self.known[sequence.id] = list(sequence.token_ids)
        return [
            Proposal.chain(continuation(sequence.token_ids, budget))
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]

    def rewind(self, sequence: Sequence) -> None:
        self.num_rewound += 1
        del self.known[sequence.id][len(sequence.token_ids) :]


def drafting(drafter: Drafter | None = None, **options: Any) -> AheadDrafting:
    made = drafter or HashDrafter()
    guard = Guard(made, VOCAB, made.traits.kinds)
    return AheadDrafting(guard, vocab_size=VOCAB, **{"max_len": 500, "max_requests": 50} | options)


class FaultyDrafter(RemoteDrafter):
    """With two workers that are slow and mortal."""

    def __init__(self, seed: int) -> None:
        self.faulty = [
            FaultyLink(drafting(), ProposalKind.ONE_HOT, 4, owner, random.Random(seed + owner))
            for owner in (1, 2)
        ]
        super().__init__(RemoteOptions(num_speculative_tokens=4), CONTEXT)

    def _make_links(self) -> list[Link]:
        return list(self.faulty)


def sequence(number: int, text: Seq[int], params: SamplingParams = SAMPLED) -> Sequence:
    options = RequestOptions(tenant="a")
    return Sequence(number, str(number), 0, list(text), len(text), params, 99 + number, options)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_proposed_was_drafted_for_the_text_whatever_the_workers_do(seed: int) -> None:
    rng = random.Random(seed)
    drafter = FaultyDrafter(seed)
    running: dict[int, Sequence] = {}
    num_used = num_empty = 0
    for step in range(400):
        if len(running) < 4 and rng.random() < 0.3:
            running[step] = sequence(step, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))])
        asked = [each for each in running.values() if rng.random() < 0.8]
        budgets = [rng.randint(0, 4) for _ in asked]
        proposals = drafter.propose(asked, budgets)
        by_id = {each.id: proposal for each, proposal in zip(asked, proposals, strict=True)}
        seen: list[Observation] = []
        for each, proposal, budget in zip(asked, proposals, budgets, strict=True):
            assert len(proposal) <= budget
            assert proposal.token_ids == continuation(each.token_ids, len(proposal))
            num_used, num_empty = num_used + len(proposal), num_empty + (not len(proposal))
        for each in running.values():
            proposal = by_id.get(each.id, EMPTY_PROPOSAL)
            accepted = proposal.token_ids[: rng.choice((0, 1, len(proposal), len(proposal)))]
            each.token_ids += accepted
            each.token_ids.append(after(each.token_ids) if rng.random() < 0.6 else rng.randrange(VOCAB))
            seen.append(Observation(each, proposal, len(accepted), torch.zeros(1, VOCAB)))
        drafter.observe(seen)
        assert drafter.integrity() == []
        for each in list(running.values()):
            if len(each.token_ids) > 120 or rng.random() < 0.01:
                each.finish_reason = rng.choice((FinishReason.LENGTH, None))  # None: preempted, or begun anew
                drafter.release(running.pop(each.id))
    for each in running.values():
        drafter.release(each)
    assert drafter.num_held() == 0
    for link in drafter.faulty:
        while not link.connected:
            link.take()
        assert link.num_deaths > 0
        link.drafting.drop(1), link.drafting.drop(2)
        assert link.drafting.guard.drafter.num_held() == len(link.drafting) == 0
        assert link.drafting.guard.num_failures == 0
    assert num_used > 300
    assert num_empty > 100
    assert sum(worker.num_late_continuations for worker in drafter.worker_stats()) > 50


class RecordingLink(Link):
    """Keeps what is sent and answers nothing."""

    name = "recording"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        """What it answers at the next look."""
        self.num_looks = 0
        """How often somebody waited for an answer."""
        self.generation = 1

    @property
    def connected(self) -> bool:
        return True

    @property
    def pending(self) -> bool:
        self.num_looks += 1
        return False

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def take(self) -> list[dict[str, Any]]:
        said, self.said = self.said, []
        return said


class RecordedDrafter(RemoteDrafter):
    """Over a link that keeps what is sent."""

    def __init__(self, context: DraftContext = CONTEXT, **options: Any) -> None:
        self.link = RecordingLink()
        super().__init__(RemoteOptions(**options), context)

    def _make_links(self) -> list[Link]:
        return [self.link]


@pytest.mark.parametrize("is_priced", [False, True])
def test_a_worker_that_says_nothing_of_use_is_waited_for_a_few_times(is_priced: bool) -> None:
    """Where no policy prices the wait, as `auto` does: there a worker that cost nothing would be kept."""
    drafter = RecordedDrafter(replace(CONTEXT, is_priced=is_priced), max_wait_ms=1, num_speculative_tokens=2)
    text = sequence(1, [1, 2, 3])
    looks = []

    def ask() -> None:
        before = drafter.link.num_looks
        assert not len(drafter.propose([text], [2])[0])
        looks.append(drafter.link.num_looks > before)
        text.token_ids.append(after(text.token_ids))

    for _ in range(10):
        ask()
    assert looks == ([True] * 10 if is_priced else [True] * 4 + [False] * 6)
    opened = drafter.link.sent[0]
    stale = {"type": "tail", "request": opened["request"], "length": 3, "hash": b"12345678", "tokens": [1]}
    drafter.link.said = [{**stale, "number": 1, "arrived_s": 0.0}]
    ask()
    assert looks[-1] == is_priced, "what is of no use does not count"
    known = PrefixHash()
    known.extend(text.token_ids)
    useful = {"length": known.length, "hash": known.digest(), "tokens": [after(text.token_ids)], "number": 1}
    drafter.link.said = [{**stale, **useful, "arrived_s": 0.0}]
    assert len(drafter.propose([text], [1])[0]) == 1
    text.token_ids += [3, 1]
    ask()
    assert looks[-1], "it is waited for again"


def test_auto_says_to_its_drafters_that_their_calls_are_priced() -> None:
    members = {"method": "auto", "drafters": [{"method": "ngram"}, {"method": "suffix"}]}
    auto = create_drafter(SpeculativeConfig.from_mapping(members), CONTEXT)
    assert isinstance(auto, DrafterGroup)
    assert all(member.drafter.context.is_priced for member in auto.members)


def test_a_wait_is_shorter_than_a_call_may_take() -> None:
    with pytest.raises(
        ConfigError, match=r"^remote max_wait_ms \(500\) must be below draft_timeout_s \(0.5 s\)[^\n]*$"
    ):
        RecordedDrafter(replace(CONTEXT, draft_timeout_s=0.5), max_wait_ms=500)


@pytest.mark.parametrize(("kind", "told"), [(ProposalKind.ONE_HOT, "0"), (ProposalKind.COUPLED, "100")])
def test_a_seed_goes_only_to_a_worker_that_draws_with_it(kind: ProposalKind, told: str) -> None:
    drafter = RecordedDrafter()
    drafter.link.kind = kind
    drafter.propose([sequence(1, [1, 2, 3])], [2])
    assert drafter.link.sent[0]["seed"] == told


def test_a_worker_is_told_the_whole_text_once_and_again_only_where_it_is_another_one() -> None:
    drafter, text = RecordedDrafter(), sequence(1, [1, 2, 3])
    drafter.propose([text], [0])
    assert [(each["type"], each["tokens"]) for each in drafter.link.sent] == [("open", [1, 2, 3])]
    for token in (0, 1):
        text.token_ids.append(token)
        drafter.observe([Observation(text, EMPTY_PROPOSAL, 0, torch.zeros(1, VOCAB))])
        drafter.propose([text], [4])
    told = [(each["type"], each["length"], each["tokens"]) for each in drafter.link.sent[1:]]
    assert told == [("commit", 4, [0]), ("commit", 5, [1])]
    drafter.link.generation += 1  # connected anew between two looks
    drafter.propose([text], [4])
    assert (drafter.link.sent[-1]["type"], drafter.link.sent[-1]["tokens"]) == ("open", text.token_ids)
    number = len(drafter.link.sent)
    for _ in range(40):  # nobody asks: it grows quiet
        text.token_ids.append(0)
        drafter.observe([Observation(text, EMPTY_PROPOSAL, 0, torch.zeros(1, VOCAB))])
    assert len(drafter.link.sent) - number < 20
    drafter.propose([text], [4])
    assert drafter.link.sent[-1]["length"] == len(text.token_ids)
    assert not any("stop" in each or "text" in each for each in drafter.link.sent)


@pytest.mark.parametrize("draft", [{"method": "ngram"}, {"method": "ngram", "prompt_lookup_min": 1}])
def test_a_drafter_in_a_worker_keeps_the_contract(draft: dict[str, Any]) -> None:
    options = LoopbackOptions(draft=draft, num_speculative_tokens=3, tokens_per_round=2)
    context = draft_context(12)
    check_drafter(lambda: LoopbackDrafter(options, context), 12)


def test_a_draft_model_in_a_worker_keeps_the_contract_and_drafts_as_it_does_here() -> None:
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    model = {"method": "draft_model", "model": EMBEDDED_DRAFT}
    context = draft_context(4096, tokenizer=tokenizer)
    params = [SamplingParams(temperature=0), SAMPLED]
    check_drafter(
        lambda: LoopbackDrafter(LoopbackOptions(draft=model, num_speculative_tokens=3), context),
        4096,
        params=params,
        num_sequences=3,
        max_len=32,
    )
    here = create_drafter(SpeculativeConfig.from_mapping(model), context)
    there = LoopbackDrafter(LoopbackOptions(draft=model), context)
    for drafter in (here, there):
        drafter.allocate(2048)
    rng = random.Random(5)
    texts = [
        sequence(number, [rng.randrange(6, 4096) for _ in range(20)], params[number]) for number in (0, 1)
    ]
    for _ in range(8):
        ours, theirs = here.propose(texts, [4, 4]), there.propose(texts, [4, 4])
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        assert {each.kind for each in theirs} == {ProposalKind.COUPLED}
        seen = []
        for each, proposal in zip(texts, ours, strict=True):
            accepted = proposal.token_ids[: rng.randint(0, 4)]
            each.token_ids += [*accepted, rng.randrange(6, 4096)]
            seen.append(Observation(each, proposal, len(accepted), torch.zeros(1, 1)))
        here.observe(seen)
        there.observe(seen)


# --- the worker's side ------------------------------------------------------------------------------------------


def opening(text: Seq[int], number: int = 1, **change: Any) -> dict[str, Any]:
    known = PrefixHash()
    known.extend(text)
    return {
        "type": "open",
        "request": number,
        "tokens": list(text),
        "hash": known.digest(),
        "num_prompt_tokens": len(text),
        "seed": "7",
        "tenant": b"",
        "sampling": sampling_message(SAMPLED),
        "number": 1,
    } | change


def commit(before: Seq[int], new: Seq[int], number: int = 2, **change: Any) -> dict[str, Any]:
    known = PrefixHash()
    known.extend([*before, *new])
    return {
        "type": "commit",
        "request": 1,
        "length": len(before) + len(new),
        "tokens": list(new),
        "hash": known.digest(),
        "number": number,
    } | change


def run_dry(ahead: AheadDrafting) -> list[dict[str, Any]]:
    tails: list[dict[str, Any]] = []
    while ahead.wants:
        tails += [message for _, message in ahead.draft()]
    return tails


def test_a_worker_drafts_ahead_as_far_as_can_be_used_and_keeps_what_was_accepted() -> None:
    ahead, text = drafting(), [1, 2, 3]
    ahead.receive(1, opening(text), depth=3)
    tails = run_dry(ahead)
    assert [tail["length"] for tail in tails] == list(range(3, 10)), (
        "three being verified, the target's own, three"
    )
    assert [token for tail in tails for token in tail["tokens"]] == list(continuation(text, 7))
    new = continuation(text, 4)
    ahead.receive(1, commit(text, new), depth=3)
    tails = run_dry(ahead)
    assert [(tail["length"], tail["number"]) for tail in tails] == [(length, 2) for length in range(10, 14)]
    drafter = ahead.guard.drafter
    assert isinstance(drafter, HashDrafter)
    assert drafter.num_rewound == 0
    text += new
    wrong = [(after(text) + 1) % VOCAB]
    ahead.receive(1, commit(text, wrong, 3), depth=3)
    assert (run_dry(ahead)[0]["length"], drafter.num_rewound) == (len(text) + 1, 1)
    ahead.receive(1, {"type": "release", "request": 1, "finished": True}, depth=3)
    assert len(ahead) == drafter.num_held() == 0


@pytest.mark.parametrize(
    "message",
    [
        commit([1, 2, 9], [1]),  # of another text
        commit([1, 2, 3, 1], [1]),  # a commit is missing
        commit([1, 2, 3], [1], hash=b"12345678"),
        commit([1, 2, 3], [1], request=2),  # never opened
    ],
)
def test_a_worker_that_cannot_follow_says_so_and_drafts_for_no_other_text(message: dict[str, Any]) -> None:
    ahead = drafting()
    ahead.receive(1, opening([1, 2, 3]), depth=3)
    replies = ahead.receive(1, message, depth=3)
    assert [reply["type"] for _, reply in replies] == ["unknown"]
    assert len(ahead) == (message["request"] == 2)


@pytest.mark.parametrize(
    "message",
    [
        opening([VOCAB]),
        opening([1], seed="-1"),
        opening([1], sampling={"temperature": "hot"}),
        {"type": "tail", "request": 1},
    ],
)
def test_nonsense_from_an_engine_is_an_error_of_its_connection(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        drafting().receive(1, message, depth=3)


def test_a_worker_takes_no_more_than_it_has_room_for_and_keeps_engines_apart() -> None:
    ahead = drafting(max_requests=2)
    for owner in (1, 2, 3):
        replies = ahead.receive(owner, opening([1, 2]), depth=2)
        assert bool(replies) == (owner == 3)
    assert ahead.receive(1, opening([1] * 501), depth=2), "longer than a text may be"
    ahead.receive(2, commit([1, 2], [(after([1, 2]) + 1) % VOCAB]), depth=2)
    by_owner: dict[Any, int] = {}
    while ahead.wants:
        for owner, tail in ahead.draft():
            by_owner.setdefault(owner, tail["length"])
    assert by_owner == {2: 3}
    ahead.drop(2)
    assert len(ahead) == 0


def test_one_engine_does_not_keep_the_places_from_others() -> None:
    ahead = drafting(max_requests=6)

    def told_of(owner: int, number: int, party: str | None = None, **change: Any) -> list[tuple[Any, int]]:
        """To whom it is said that a request has no place."""
        message = opening([1, 2], request=number, **change)
        return [(to, reply["request"]) for to, reply in ahead.receive(owner, message, 2, party)]

    assert [told_of(1, number) for number in range(7)] == [[]] * 6 + [[(1, 6)]], "alone it has all places"
    assert told_of(2, 0, hash=b"12345678") == [(2, 0)], "what cannot be followed takes no place"
    assert [told_of(2, number) for number in range(4)] == [[(1, 5)], [(1, 4)], [(1, 3)], [(2, 3)]]
    assert told_of(3, 0, "10.0.0.7") == [(1, 2)]
    assert told_of(3, 1, "10.0.0.7") == [(2, 2)]
    assert told_of(4, 0, "10.0.0.7") == [(4, 0)], "another connection of that address has no share of its own"
    assert len(ahead) == 6


class Stubborn(HashDrafter):
    """Raises for every text with a 3 at its end."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        if any(sequence.token_ids[-1] == 3 for sequence in sequences):
            raise RuntimeError("no")
        return super().propose(sequences, budgets)


def test_a_drafter_that_raises_in_the_worker_is_left_out_for_that_request_alone() -> None:
    ahead = drafting(Stubborn())
    ahead.receive(1, opening([1, 3], number=1), depth=2)
    ahead.receive(1, opening([3, 2, 1], number=2), depth=2)
    assert {tail["request"] for tail in run_dry(ahead)} == {2}


def test_what_needs_more_than_the_text_or_sends_probabilities_is_refused_by_name() -> None:
    for method in ("suffix", "token_recycling", "lookahead", "layer_skip", "auto", "remote"):
        with pytest.raises(ConfigError, match=f"drafter '{method}' needs more of its target"):
            serve_drafter(EngineConfig(EMBEDDED_TARGET), SpeculativeConfig(method), ServedOptions())
    probabilistic = {"method": "draft_model", "model": EMBEDDED_DRAFT, "draft_sample_method": "probabilistic"}
    with pytest.raises(ConfigError, match="cannot judge probabilistic drafts"):
        serve_drafter(
            EngineConfig(EMBEDDED_TARGET), SpeculativeConfig.from_mapping(probabilistic), ServedOptions()
        )

    class Both(HashDrafter):
        traits = DrafterTraits(kinds=frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED}))

    with pytest.raises(ConfigError, match="sends token ids alone"):
        served("both", Both(), CONTEXT, ServedOptions(), None)
    assert ANY_VERIFIER.kinds == {ProposalKind.ONE_HOT, ProposalKind.COUPLED}


# --- another device of the machine ------------------------------------------------------------------------------


def test_draft_device() -> None:
    model = {"method": "draft_model", "model": EMBEDDED_DRAFT}
    context = draft_context(4096, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    drafter = create_drafter(SpeculativeConfig.from_mapping({**model, "draft_device": "cpu"}), context)
    [drafting_model] = drafter.drafting_models()
    assert drafting_model.device == torch.device("cpu")
    for bad, said in (
        ({**model, "draft_device": "tpu7"}, "unknown device 'tpu7'"),
        ({**model, "draft_device": "cpu", "device": "cuda"}, "disagree; give one"),
        ({"method": "ngram", "draft_device": "cpu"}, "'ngram' cannot have a draft_device"),
        ({"method": "suffix", "draft_device": "cpu"}, "'suffix' cannot have a draft_device"),
        ({"method": "layer_skip", "draft_device": "cpu"}, "'layer_skip' cannot have a draft_device"),
        ({"method": "remote", "draft_device": "cpu"}, "'remote' cannot have a draft_device"),
    ):
        with pytest.raises(ConfigError, match=said):
            create_drafter(SpeculativeConfig.from_mapping(bad), context)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="PyTorch sees no GPU"):
            create_drafter(SpeculativeConfig.from_mapping({**model, "draft_device": "cuda:1"}), context)
    for other in ({"method": "self"}, {"method": "slem", "model": EMBEDDED_DRAFT}):
        validate(SpeculativeConfig.from_mapping({**other, "draft_device": "cuda:0"}))

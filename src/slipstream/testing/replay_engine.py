"""An engine without a model, for the drafter conformance kit: it simulates a random scene, records it and repeats it.

Sequences arrive with short and long prompts, and are drafted for in changing batches and orders with budgets from 0 up.
Speculation is turned off for a while; sequences are preempted and continued, finish in the middle of an accepted block,
reach the length limit or are aborted. The simulated target repeats itself often, and agrees with the draft never,
sometimes or always. Every result of the drafter is checked at once.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind, Verdict, VerifierTraits
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.kv.cache import KVCache
from slipstream.kv.segments import CHUNK
from slipstream.models.rows import RowGroup
from slipstream.sampling.params import SamplingParams
from slipstream.text.expected import ExpectedText

MAX_LIVE = 4
"""The most sequences running at one time."""
TENANTS = ("", "red", "blue")


def require(condition: bool, sentence: str) -> None:
    """Raise AssertionError unless `condition`; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(sentence)


@dataclass(frozen=True)
class Scene:
    """The constants of one check."""

    vocab_size: int
    max_len: int
    """The most tokens of prompt and answer together."""
    num_sequences: int
    verifier: VerifierTraits
    params: tuple[SamplingParams, ...]
    """Assigned to the sequences in turn."""
    tasks: tuple[str, ...] = ("",)
    """Assigned to the sequences in turn."""
    predictions: tuple[tuple[int, ...], ...] = ()
    """What the sequences expect as their answers, assigned in turn; () expects nothing."""


@dataclass(frozen=True)
class Arrival:
    """A request, with what a drafter can see of it."""

    prompt: tuple[int, ...]
    tenant: str
    seed: int


@dataclass
class SceneStep:
    """A recorded step of the engine, by sequence id, which can be repeated."""

    arrivals: dict[int, Arrival] = field(default_factory=dict)
    preempted: dict[int, None] = field(default_factory=dict)
    budgets: dict[int, int] = field(default_factory=dict)
    proposals: dict[int, Proposal] = field(default_factory=dict)
    commits: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """New tokens, and how many of them were draft tokens."""
    finished: dict[int, FinishReason] = field(default_factory=dict)

    def only(self, ids: set[int]) -> SceneStep:
        """The part of this step that concerns the sequences `ids`."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return SceneStep(
            **{name: {i: x for i, x in part.items() if i in ids} for name, part in parts.items()}
        )


class Stage:
    """One drafter and the engine's side of the contract."""

    def __init__(self, drafter: Drafter, scene: Scene) -> None:
        self.drafter = drafter
        self.scene = scene
        self.live: dict[int, Sequence] = {}
        self.max_nodes = drafter.traits.max_nodes
        is_count = isinstance(self.max_nodes, int) and self.max_nodes >= 0
        require(is_count, f"traits.max_nodes is {self.max_nodes!r}")
        # More than needed: segments are rounded up, and a draft's own tokens may outnumber the target's. With too
        # little memory a drafter may skip a sequence, which would look like a dependence on the batch.
        num_slots = MAX_LIVE * (2 * (scene.max_len + self.max_nodes + 1) + CHUNK)
        self.call("allocate", num_slots)
        self._proposals: dict[int, Proposal] = {}
        self._target = self._make_target(num_slots)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the drafter; it must neither raise nor change its arguments."""
        before = _copy(arguments)
        try:
            result = getattr(self.drafter, name)(*arguments)
        except Exception as error:
            raise AssertionError(f"{name} raised {error!r}") from error
        require(_copy(arguments) == before, f"{name} changed the sequences or lists that it was given")
        return result

    def arrive(self, arrivals: dict[int, Arrival]) -> None:
        """Admit requests; the drafter first sees them in `propose`."""
        for i, arrival in arrivals.items():
            params = self.scene.params[i % len(self.scene.params)]
            prompt = list(arrival.prompt)
            task = self.scene.tasks[i % len(self.scene.tasks)]
            options = RequestOptions(tenant=arrival.tenant, task=task)
            self.live[i] = Sequence(i, str(i), 0, prompt, len(prompt), params, arrival.seed, options)
            if self.scene.predictions:
                expected = self.scene.predictions[i % len(self.scene.predictions)]
                self.live[i].expected = ExpectedText(expected) if expected else None

    def take_over(self, sequences: dict[int, Sequence]) -> None:
        """Go on with sequences of another engine, in the place of all others."""
        self.live = sequences
        if self._target is not None:
            self._compute([i for i, sequence in sequences.items() if sequence.num_computed])

    def preempt(self, ids: dict[int, None]) -> None:
        """Preempt sequences; they may return under the same id."""
        for i in ids:
            self.live[i].num_computed = 0
            self._forget(i)
            self.call("release", self.live[i])

    def propose(self, budgets: dict[int, int]) -> dict[int, Proposal]:
        """Call `propose` and check each proposal; not called with speculation off."""
        if not budgets:
            return {}
        sequences = [self.live[i] for i in budgets]
        if self._target is not None:
            for i, budget in budgets.items():
                self._reserve(i, budget)
        proposals = self.call("propose", sequences, list(budgets.values()))
        one_each = isinstance(proposals, list) and len(proposals) == len(sequences)
        require(one_each, f"propose returned {proposals!r} for {len(sequences)} sequences")
        for proposal, budget in zip(proposals, budgets.values(), strict=True):
            self._check(proposal, budget)
        self._proposals.update(zip(budgets, proposals, strict=True))
        return dict(zip(budgets, proposals, strict=True))

    def ask_again(self, i: int, step: SceneStep) -> None:
        """Call `propose` for one sequence alone, as an engine does to find the one that made a batch fail."""
        again = self.propose({i: step.budgets[i]})[i]
        require(
            same_proposal(again, step.proposals[i]), "called again in the same step, it proposes otherwise"
        )

    def commit(self, commits: dict[int, tuple[list[int], int]], finished: dict[int, FinishReason]) -> None:
        """Append the committed tokens, call `observe`, and release finished sequences."""
        for i, (token_ids, _) in commits.items():
            self.live[i].token_ids.extend(token_ids)
            self.live[i].num_computed = len(self.live[i].token_ids) - 1
        for i, reason in finished.items():
            self.live[i].finish_reason = reason
        if self._target is not None:
            self._compute(list(commits))
        if commits:
            seen = [self._observation(i, token_ids, num) for i, (token_ids, num) in commits.items()]
            self.call("observe", seen)
        self._proposals.clear()
        for i in finished:
            self._forget(i)
            self.call("release", self.live.pop(i))
        problems = self.call("integrity")
        require(not problems, f"integrity() reports: {problems}")

    def _observation(self, i: int, token_ids: list[int], num_accepted: int) -> Observation:
        """The drafter's observation of a step. The logits are a function of the last tokens before each row."""
        sequence = self.live[i]
        proposal = self._proposals.get(i, EMPTY_PROPOSAL)
        text = sequence.token_ids[: len(sequence.token_ids) - len(token_ids)]
        rows = []
        for node in range(ROOT, len(proposal)):
            path = [proposal.token_ids[ancestor] for ancestor in proposal.path(node)]
            seed = hash(tuple([*text, *path][-3:])) % 2**63
            rows.append(torch.randn(self.scene.vocab_size, generator=torch.Generator().manual_seed(seed)))
        return Observation(sequence, proposal, num_accepted, torch.stack(rows))

    # A drafter with a target model finds the target's entries in its cache, as in an engine.

    def _make_target(self, num_slots: int) -> KVCache | None:
        model = self.drafter.context.target
        if model is None:
            return None
        width = len(self.drafter.traits.feature_layers) * model.hidden_size
        cache = model.new_cache(num_slots, prefix_caching=False, feature_width=width)
        self.call("attach", cache)
        return cache

    def _reserve(self, i: int, num_more: int) -> None:
        assert self._target is not None
        accounting, sequence = self._target.accounting, self.live[i]
        if i not in accounting:
            accounting.open(i, sequence.token_ids, sequence.tenant)
        accounting.reserve(i, len(sequence.token_ids) + num_more)

    def _compute(self, ids: list[int]) -> None:
        """Compute all committed tokens but the last with the target, as an engine has after a step."""
        model, cache = self.drafter.context.target, self._target
        assert model is not None
        assert cache is not None
        for i in ids:  # reserve for all first: reserving for one may move another
            self._reserve(i, 0)
        groups: dict[int, RowGroup] = {}
        for i in ids:
            past = cache.accounting.num_valid(i)
            token_ids = self.live[i].token_ids[past:-1]
            if token_ids:
                groups[i] = RowGroup(cache.accounting.slots(i), past, token_ids, [])
                groups[i].owner, groups[i].num_certain = i, past + len(token_ids)
        if not groups:
            return
        layers = self.drafter.traits.feature_layers
        output = model.forward(list(groups.values()), cache.pool, layers)
        end = 0
        for i, group in groups.items():
            begin, end = end, end + len(group.token_ids)
            if layers:
                features = [output.hidden[layer][begin:end] for layer in layers]
                slots = group.slots[group.num_before : group.num_entries]
                cache.keep_features(slots, torch.cat(features, dim=-1))
            cache.accounting.commit(i, list(group.token_ids))

    def _forget(self, i: int) -> None:
        if self._target is not None and i in self._target.accounting:
            self._target.accounting.close(i)

    def belongings(self) -> list[Any]:
        """Objects that the drafter was given and that are not its own."""
        return [] if self._target is None else [self._target]

    def memory_bytes(self) -> int:
        """The drafter's `memory_bytes()`, checked."""
        memory_bytes = self.call("memory_bytes")
        is_count = isinstance(memory_bytes, int) and memory_bytes >= 0
        require(is_count, f"memory_bytes() returned {memory_bytes!r}")
        return int(memory_bytes)

    def _check(self, proposal: Proposal, budget: int) -> None:
        require(isinstance(proposal, Proposal), f"propose returned a {type(proposal).__name__}")
        if not len(proposal):
            return
        require(len(proposal) <= budget, f"{len(proposal)} draft tokens exceed the budget of {budget}")
        for token in proposal.token_ids:
            require(
                isinstance(token, int) and 0 <= token < self.scene.vocab_size,
                f"draft token {token!r} is not an id below {self.scene.vocab_size}",
            )
        kind = proposal.kind
        declared = sorted(self.drafter.traits.kinds)
        require(kind in declared, f"a {kind} proposal, but its traits declare {declared}")
        require(
            kind in self.scene.verifier.kinds,
            f"a {kind} proposal, which the {self.scene.verifier.name} verifier does not accept",
        )
        if kind != ProposalKind.SAMPLED_IID:
            for siblings in proposal.children.values():
                tokens = [proposal.token_ids[node] for node in siblings]
                require(len(set(tokens)) == len(tokens), f"{kind} siblings repeat a token: {tokens}")
        if proposal.draft_probs is not None:
            self._check_draft_probs(proposal)

    def _check_draft_probs(self, proposal: Proposal) -> None:
        probs: Any = proposal.draft_probs
        shape = (len(proposal), self.scene.vocab_size)
        require(tuple(probs.shape) == shape, f"draft_probs has shape {tuple(probs.shape)}, not {shape}")
        rows = probs.double().tolist()
        for row, token in zip(rows, proposal.token_ids, strict=True):
            require(min(row) >= 0 and abs(sum(row) - 1) < 1e-3, "a row of draft_probs is not a distribution")
            require(row[token] > 0, f"draft token {token} has draft probability 0")
        if proposal.kind == ProposalKind.SAMPLED_WITHOUT_REPLACEMENT:
            for siblings in proposal.children.values():
                same = all(rows[node] == rows[siblings[0]] for node in siblings)
                require(same, "siblings drawn without replacement have different rows of draft_probs")


def same_proposal(a: Proposal, b: Proposal) -> bool:
    """True for equal trees of equal kind; probabilities may differ in their last bits."""
    if (a.token_ids, a.parents) != (b.token_ids, b.parents):
        return False
    if not len(a):  # the kind of an empty proposal does not matter
        return True
    if a.draft_probs is None or b.draft_probs is None:
        return a.kind == b.kind and a.draft_probs is b.draft_probs
    return a.kind == b.kind and bool((a.draft_probs - b.draft_probs).abs().max() < 1e-4)


def improvise(stage: Stage, rng: random.Random, first_id: int) -> list[SceneStep]:
    """Simulate until all sequences have finished; returns the recorded steps."""
    steps: list[SceneStep] = []
    waiting = list(range(first_id, first_id + stage.scene.num_sequences))
    paused: set[int] = set()
    while waiting or stage.live:
        step = SceneStep()
        steps.append(step)
        if waiting and len(stage.live) < MAX_LIVE and (not stage.live or rng.random() < 0.6):
            step.arrivals[waiting.pop(0)] = _arrival(rng, stage.scene)
        stage.arrive(step.arrivals)
        step.preempted = {i: None for i in stage.live if i not in paused and rng.random() < 0.06}
        stage.preempt(step.preempted)
        paused = {i for i in paused if rng.random() < 0.7} | set(step.preempted)

        decoding = [i for i in stage.live if i not in paused]
        rng.shuffle(decoding)
        if len(steps) % 12 < 9:  # speculation is off for three steps in twelve
            for i in decoding:
                room = stage.scene.max_len - len(stage.live[i].token_ids) - 1
                step.budgets[i] = min(rng.randint(0, stage.max_nodes), room)
        step.proposals = stage.propose(step.budgets)
        if step.budgets and rng.random() < 0.2:
            stage.ask_again(rng.choice(list(step.budgets)), step)
        for i in decoding:
            _decide(rng, stage, step, i)
        for i in stage.live:
            if i not in step.finished and rng.random() < 0.01:
                step.finished[i] = FinishReason.ABORT
        stage.commit(step.commits, step.finished)
        paused -= step.finished.keys()
    return steps


def repeat(stage: Stage, steps: list[SceneStep], cold: Stage | None = None) -> list[dict[int, Proposal]]:
    """Repeat `steps`; returns the proposals of `stage`, or those of `cold`, for which each text is new."""
    proposals = []
    for step in steps:
        stage.arrive(step.arrivals)
        stage.preempt(step.preempted)
        proposals.append(stage.propose(step.budgets))
        if cold is not None:
            cold.take_over({i: copy.deepcopy(stage.live[i]) for i in step.budgets})
            proposals[-1] = cold.propose(step.budgets)
            cold.preempt(dict.fromkeys(step.budgets))
        stage.commit(step.commits, step.finished)
    return proposals


def _arrival(rng: random.Random, scene: Scene) -> Arrival:
    length = rng.choice((1, 2, rng.randint(3, scene.max_len // 2), scene.max_len * 2 // 3))
    prompt: list[int] = []
    for _ in range(length):
        prompt.append(_target_token(rng, prompt, scene.vocab_size))
    return Arrival(tuple(prompt), rng.choice(TENANTS), rng.getrandbits(32))


def _decide(rng: random.Random, stage: Stage, step: SceneStep, i: int) -> None:
    """Record the tokens that sequence `i` gains in this step, and whether it finishes."""
    proposal = step.proposals.get(i, EMPTY_PROPOSAL)
    text = stage.live[i].token_ids
    verdict = _verdict(rng, proposal, text, stage.scene.vocab_size)
    token_ids = verdict.token_ids(proposal)
    if rng.random() < 0.04:  # a stop token, anywhere in the accepted block
        token_ids = token_ids[: rng.randint(1, len(token_ids))]
        step.finished[i] = FinishReason.STOP
    elif len(text) + len(token_ids) >= stage.scene.max_len:
        step.finished[i] = FinishReason.LENGTH
    step.commits[i] = (token_ids, min(len(verdict.accepted), len(token_ids)))


def _verdict(rng: random.Random, proposal: Proposal, text: list[int], vocab_size: int) -> Verdict:
    """Walk the tree as a verifier does, with a target that agrees with the draft never, sometimes or always."""
    agreement = rng.choice((0.0, 0.6, 1.0))
    accepted: list[int] = []
    while True:
        below = proposal.children.get(accepted[-1] if accepted else ROOT, [])
        children = {proposal.token_ids[node]: node for node in below}
        if children and rng.random() < agreement:
            token = rng.choice(list(children))
        else:
            path = [proposal.token_ids[node] for node in accepted]
            token = _target_token(rng, text + path, vocab_size)
        if token not in children:
            return Verdict(tuple(accepted), token)
        accepted.append(children[token])


def _target_token(rng: random.Random, text: list[int], vocab_size: int) -> int:
    """The next token: often the one five positions before, so that drafters can predict it."""
    return text[-5] if len(text) >= 5 and rng.random() < 0.7 else rng.randrange(vocab_size)


def _copy(arguments: tuple[Any, ...]) -> list[Any]:
    """A value that can be compared with a later copy; a Sequence itself compares by identity."""
    parts: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Sequence):
            state = {name: _state(value) for name, value in vars(argument).items() if name != "params"}
            parts.append(state)
        elif isinstance(argument, Observation):
            parts.append([*_copy((argument.sequence,)), argument.proposal, argument.num_accepted])
        elif isinstance(argument, list):
            parts.append(_copy(tuple(argument)))
        else:
            parts.append(argument)
    return parts


def _state(value: Any) -> Any:
    """A part of a Sequence for comparison: what a deep copy holds, in a fraction of its time."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list):
        return value[:] if all(type(one) is int for one in value) else [_state(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _state(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return copy.deepcopy(value)

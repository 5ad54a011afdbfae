"""The counters against an independent log of every proposal and of what was emitted after it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import DraftContext
from slipstream.engine.outputs import CompletionOutput, RequestOutput
from slipstream.testing.stub_drafters import OracleDrafter, OracleOptions
from tests.kit.engines import ORACLE, MakeLLM


@dataclass(frozen=True)
class MixedTreeOptions(OracleOptions):
    """Size of the trees."""

    num_draft_nodes: int = 10


class MixedTreeDrafter(OracleDrafter):
    """Random trees of any size and shape, through which the truth runs some way."""

    Options = MixedTreeOptions

    def __init__(self, options: MixedTreeOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.traits = replace(self.traits, max_nodes=options.num_draft_nodes)

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        start = len(sequence.token_ids)
        rng = random.Random(f"{self.options.seed}/{sequence.id}/{start}")
        future = next((t for t in self.options.texts if list(t[:start]) == sequence.token_ids), ())[start:]
        token_ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(rng.randint(0, min(budget, self.options.num_draft_nodes))):
            parent = len(token_ids) - 1 if rng.random() < 0.7 else rng.randint(ROOT, len(token_ids) - 1)
            depth = 1 + (depths[parent] if parent != ROOT else 0)
            known = depth <= len(future) and rng.random() < self.options.accuracy
            token = future[depth - 1] if known else rng.randrange(self.context.vocab_size)
            if (token, parent) not in zip(token_ids, parents, strict=True):
                token_ids.append(token)
                parents.append(parent)
                depths.append(depth)
        return Proposal(tuple(token_ids), tuple(parents))


Log = dict[tuple[str, int], list[tuple[int, Proposal]]]
"""(request, answer) to (length of the text, what was proposed to follow it), a step each."""


def logged(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Log:
    """From now on, everything that is proposed."""
    log: Log = defaultdict(list)
    propose = llm.engine.drafting.propose

    def spy(scheduled: Seq[StepItem], *given: Any) -> Any:
        record = propose(scheduled, *given)
        for item in scheduled:
            sequence = item.sequence
            log[sequence.request_id, sequence.index].append((sequence.num_output_tokens, item.proposal))
        return record

    monkeypatch.setattr(llm.engine.drafting, "propose", spy)
    return log


@dataclass
class Expected:
    """The definitions, applied to the log as they are worded."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.proposed_at: dict[int, int] = defaultdict(int)
        self.reached_at: dict[int, int] = defaultdict(int)
        self.accepted_at: dict[int, int] = defaultdict(int)
        self.histogram: dict[int, int] = defaultdict(int)

    def add(self, proposal: Proposal, emitted: Seq[int], from_draft: Seq[bool]) -> None:
        assert len(emitted) >= 1
        num_accepted = sum(from_draft)
        assert list(from_draft) == [True] * num_accepted + [False] * (len(emitted) - num_accepted)
        assert len(emitted) - num_accepted <= 1
        self.steps += 1
        self.drafted += len(proposal.token_ids)
        self.accepted += num_accepted
        self.histogram[num_accepted] += 1
        levels: list[set[int]] = [{ROOT}]
        while levels[-1]:
            levels.append({n for n, parent in enumerate(proposal.parents) if parent in levels[-1]})
        for depth in range(1, len(levels) - 1):
            self.proposed_at[depth] += 1
        node = ROOT
        for depth, token in enumerate(emitted, start=1):
            below = [n for n, parent in enumerate(proposal.parents) if parent == node]
            self.reached_at[depth] += bool(below)
            match = [n for n in below if proposal.token_ids[n] == token]
            assert bool(match) == from_draft[depth - 1], "a draft token that is right is accepted"
            if match:
                self.accepted_at[depth] += 1
                node = match[0]

    def compare(self, answer: CompletionOutput) -> None:
        metrics = answer.metrics
        assert metrics.num_output_tokens == len(answer.token_ids)
        assert metrics.num_steps == self.steps
        assert metrics.num_draft_tokens == self.drafted
        assert metrics.num_accepted_tokens == self.accepted
        for ours, theirs in (
            (metrics.proposed_per_position, self.proposed_at),
            (metrics.reached_per_position, self.reached_at),
            (metrics.accepted_per_position, self.accepted_at),
        ):
            assert dict(enumerate(ours, start=1)) == {at: n for at, n in theirs.items() if n}
        assert {k: n for k, n in enumerate(metrics.acceptance_histogram) if n} == self.histogram
        assert metrics.acceptance_rate == pytest.approx(self.accepted / max(1, self.drafted))
        assert metrics.acceptance_length == pytest.approx(len(answer.token_ids) / self.steps)
        for at, rate in enumerate(metrics.conditional_acceptance, start=1):
            assert rate == pytest.approx(self.accepted_at[at] / self.reached_at[at])
        accepted_anywhere = sum(1 for n in self.accepted_at.values() if n)
        assert len(metrics.conditional_acceptance) >= accepted_anywhere


def compare_with_log(output: RequestOutput, log: Log) -> None:
    for answer in output.outputs:
        entries = log[output.request_id, answer.index]
        ends = [start for start, _ in entries[1:]] + [len(answer.token_ids)]
        expected = Expected()
        for (start, proposal), end in zip(entries, ends, strict=True):
            expected.add(proposal, answer.token_ids[start:end], answer.from_draft[start:end])
        expected.compare(answer)


SPECS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "ngram": {"method": "ngram"},
    "suffix-tree": {"method": "suffix", "tree": True, "suffix_decoding_max_spec_factor": 2.0},
    "oracle": {"method": ORACLE, "accuracy": 0.9, "num_speculative_tokens": 6},
    "random-tree": {"method": "slipstream.testing.stub_drafters:RandomTreeDrafter"},
    "mixed-tree": {"method": f"{__name__}:MixedTreeDrafter", "accuracy": 0.9},
    "draft-tree": {
        "method": "draft_model",
        "model": EMBEDDED_DRAFT,
        "tree_top_k": 3,
        "num_draft_nodes": 7,
    },
}


@pytest.mark.parametrize(
    ("name", "scarce"), [*((name, False) for name in SPECS), ("mixed-tree", True), ("draft-tree", True)]
)
def test_counters_are_what_the_log_says(
    make_llm: MakeLLM,
    plain: LLM,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    scarce: bool,
) -> None:
    rng = random.Random(1)
    chosen = sorted(prompts, key=len)[:10]
    free = SamplingParams(temperature=0, max_tokens=110 if scarce else 45, ignore_eos=True)
    futures = [output.outputs[0].token_ids for output in plain.generate(chosen, free)]
    params: list[SamplingParams] = []
    for number, future in enumerate(futures):
        words = plain.engine.tokenizer.decode(future[14:18], skip_special_tokens=True)
        stops: list[dict[str, Any]] = [
            {"stop_token_ids": [future[rng.randint(5, 25)]]},
            {"stop": [words]},
            {},
        ]
        more = {"n": 1 + number % 2} if scarce else stops[number % 3]
        max_tokens = rng.randint(60, 110) if scarce else rng.randint(7, 45)
        params.append(SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more))
    spec = dict(SPECS[name])
    if "accuracy" in spec:
        spec["texts"] = [prompt + future for prompt, future in zip(chosen, futures, strict=True)]
    slots = 400 * plain.engine.model.kv_bytes_per_token
    llm = make_llm(spec, kv_cache_bytes=slots, max_model_len=270) if scarce else make_llm(spec)
    if name == "suffix-tree":
        llm.generate(chosen[:5], free)
    log = logged(llm, monkeypatch)
    outputs = llm.generate(chosen, params)
    for output, future in zip(outputs, futures, strict=True):
        for answer in output.outputs:
            assert answer.token_ids == future[: len(answer.token_ids)]
        compare_with_log(output, log)
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == scarce
    answers = [answer for output in outputs for answer in output.outputs]
    drafted = sum(answer.metrics.num_draft_tokens for answer in answers)
    assert (drafted > 0) == (name != "off")
    if name in ("oracle", "mixed-tree") and not scarce:
        cut = sum(bool(answer.from_draft[-1]) for answer in answers)
        assert cut >= 2, "some answers end inside an accepted block"

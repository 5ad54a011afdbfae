"""A drafter that is not Slipstream's own and goes on after its time, writing over whatever it was given."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.metrics.step import StepReport
from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.traits import DrafterTraits
from slipstream.kv.cache import KVCache
from slipstream.testing.stub_drafters import OracleOptions
from tests.kit.engines import MakeLLM

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
AT_CALL = 6
wake, scribbled = threading.Event(), threading.Event()
faults: list[str] = []


class ScribblingDrafter(Drafter):
    """Hangs in its sixth call; when it wakes it writes over all that it ever got hold of."""

    Options = OracleOptions
    traits = DrafterTraits(max_nodes=2, feature_layers=(1,))

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.cache: KVCache | None = None
        self.sequences: list[Sequence] = []
        self.observations: list[Observation] = []
        self.proposals: list[tuple[list[int], list[int]]] = []

    def attach(self, cache: KVCache) -> None:
        self.cache = cache

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.sequences += sequences
        if len(self.proposals) == AT_CALL:
            wake.wait(120)
            self._scribble()
            scribbled.set()
        self.proposals.append(([7, 8], [-1, 0]))
        token_ids, parents = self.proposals[-1]
        return [Proposal(token_ids, parents) if budget > 1 else Proposal() for budget in budgets]  # type: ignore[arg-type]

    def observe(self, observations: Seq[Observation]) -> None:
        self.observations += observations

    def _scribble(self) -> None:
        for what, scribble in {
            "cache": self._scribble_over_the_cache,
            "features": self._scribble_over_features,
            "sequences": self._scribble_over_sequences,
            "observations": self._scribble_over_observations,
        }.items():
            try:
                scribble()
            except Exception as error:
                faults.append(f"{what}: {error}")

    def _scribble_over_the_cache(self) -> None:
        assert self.cache is not None
        self.cache.pool.fill(1.5)

    def _scribble_over_features(self) -> None:
        assert self.cache is not None
        self.cache.features(self.sequences[-1].id, 0, 4).fill_(1.5)

    def _scribble_over_sequences(self) -> None:
        for sequence in [*self.sequences, *(seen.sequence for seen in self.observations)]:
            sequence.token_ids[:] = [11] * len(sequence.token_ids)
            sequence.from_draft.clear()
            sequence.num_computed, sequence.seed, sequence.num_prompt_tokens = 3, 1, 0
            sequence.text = "scribbled"

    def _scribble_over_observations(self) -> None:
        for seen in self.observations:
            seen.logits.fill_(0)
            object.__setattr__(seen.proposal, "token_ids", (1,) * len(seen.proposal))
        for token_ids, parents in self.proposals:
            token_ids[:], parents[:] = [10**6] * 5, [3] * 5


@pytest.fixture(autouse=True)
def asleep() -> Any:
    wake.clear()
    scribbled.clear()
    faults.clear()
    yield
    wake.set()


@pytest.mark.parametrize("place", ["alone", "ensemble"])
def test_a_drafter_that_scribbles_after_its_time_changes_no_answer(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], place: str
) -> None:
    spec: dict[str, Any] = {"method": f"{__name__}:ScribblingDrafter"}
    if place == "ensemble":
        spec = {"method": "ensemble", "members": [spec, {"method": "ngram"}]}
    llm = make_llm({**spec, "draft_timeout_s": 3.0})
    steps = 0

    def on_step(_: StepReport) -> None:
        nonlocal steps
        steps += 1
        if steps == AT_CALL + 6:  # requests are under way
            assert not scribbled.is_set()
            wake.set()
            assert scribbled.wait(120)

    llm.engine.on_step = on_step
    outputs = llm.generate(prompts[:6], PARAMS)
    expected = plain.generate(prompts[:6], PARAMS)
    assert scribbled.is_set()
    assert [fault.split(":")[0] for fault in faults] == ["cache"], "all else could be written"
    assert [(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs] == [
        (o.outputs[0].token_ids, o.outputs[0].text) for o in expected
    ]
    assert llm.engine.integrity() == []
    later = llm.generate(prompts[6:9], PARAMS)
    assert [o.outputs[0].token_ids for o in later] == [
        o.outputs[0].token_ids for o in plain.generate(prompts[6:9], PARAMS)
    ]


def test_a_deleted_engine_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    config = {"method": f"{__name__}:ScribblingDrafter"}
    llm = LLM(speculative_config=config, kv_cache_bytes=2**24, max_model_len=512)
    llm.generate("Once", SamplingParams(max_tokens=3))
    [thread] = [one for one in set(threading.enumerate()) - before if one.name == "slipstream-drafter"]
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()

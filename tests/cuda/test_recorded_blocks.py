"""Block drafts that are recorded: what is drawn behind each path of tokens, and one wait a step of an engine."""

from __future__ import annotations

import random
from functools import cache, lru_cache
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.heads.recorded_blocks import RecordedBlocks
from slipstream.draft.proposers.block import entry_shapes
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import Chains, Draw
from slipstream.models.executor.recorded_drafts import FirstStates
from tests.kit.block_heads import LAYOUTS, block_head, random_block_head
from tests.kit.kept_trees import KeptTree, grow_by_paths
from tests.kit.recorded_engines import RECORDED, answers, check_waits, expected

LENGTHS = (9, 5, 12)
LEVELS = 3


@cache
def target() -> CausalLM:
    return load_model(
        EMBEDDED_TARGET,
        dtype="float32",
        cpu_kernels="torch",
        attention_backend="slipstream.testing.recorded_graph:TritonOnCpu",
        executor="slipstream.testing.recorded_graph:RecordedExecutor",
        canary=False,
    )


class Scene:
    """A head, and texts whose tokens but the last two have entries."""

    def __init__(self, layout: str, seed: int) -> None:
        self.rng, lm = random.Random(seed), target()
        self.head = RecordedBlocks(random_block_head(**LAYOUTS[layout]), lm, lm.head_format(None))
        config, generator = self.head.config, torch.Generator().manual_seed(seed)
        width = len(config.feature_layers) * config.target_hidden_size
        self.features = torch.randn(96, width, generator=generator)
        device = torch.device("cpu")
        self.pool = KVPool(entry_shapes(config), 96, torch.float32, device, num_scratch=8)
        self.pool.fill(float("nan"))
        self.anew()

    def anew(self) -> None:
        """Other texts in the same cache."""
        self.texts = [[self.rng.randrange(5, 4000) for _ in range(length)] for length in LENGTHS]
        self.stored: list[RowGroup] = []
        self.places: list[int] = []
        config = self.head.config
        masks = [config.mask_token_id] * (config.block_size - 1)
        wanted = range(config.first_slot, config.first_slot + LEVELS)
        self.blocks = []
        for number, text in enumerate(self.texts):
            slots, past = range(32 * number, 32 * number + 32), len(text) - 2
            before = ForwardBatch([RowGroup(slots, 0, text[:past], [])])
            self.head.store(before, self.pool, self.features[32 * number : 32 * number + past])
            self.stored.append(RowGroup(slots, past, text[past:-1], []))
            self.places.append(32 * number + past)
            self.blocks.append(RowGroup(slots, len(text) - 1, [text[-1], *masks], wanted))

    def draft(self, drafts: Any) -> torch.Tensor:
        ends = [text[-1] for text in self.texts], [text[-2] for text in self.texts]
        features = FirstStates(lambda at: self.features[at], self.places)
        drawn = self.head.draft(self.stored, features, self.blocks, ends, self.pool, drafts)
        assert drawn is not None
        return drawn

    def compute(self) -> None:
        """The same pass, not recorded."""
        head, ids = self.head, torch.tensor(self.texts_ends)
        head.store(ForwardBatch(self.stored), self.pool, self.features[self.places])
        states, self.logits = head.forward(self.blocks, self.pool)
        self.read, self.begun = head.begin(states, ids[:, 1], ids[:, 0])

    @property
    def texts_ends(self) -> list[list[int]]:
        return [text[-2:] for text in self.texts]

    def logits_after(self, number: int, path: list[int]) -> torch.Tensor:
        above, previous = self.begun[number][None], self.texts[number][-1]
        found = self.logits[number, :1]
        for level, following in enumerate([*path, -1]):
            slot = self.head.config.first_slot + level
            found, above = self.head.step(
                slot,
                self.read[number, slot][None],
                self.logits[number, level][None],
                torch.tensor([previous]),
                above,
            )
            previous = following
        return self.head.spread(found)[0]


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_chains_of_a_block_are_those_of_its_paths(layout: str) -> None:
    scene, vocab_size = Scene(layout, 1), target().vocab_size
    for temperature in (0.0, 0.9):
        draws = [
            Draw(temperature, [scene.rng.getrandbits(64) for _ in range(length)]) for length in (LEVELS, 2, 1)
        ]
        chains = Chains(draws, vocab_size, may_pend=True)
        found = [list(chain) for chain in chains.pending(scene.draft(chains))]
        scene.compute()
        for number, (draw, drawn) in enumerate(zip(draws, found, strict=True)):
            host = Chains([draw], vocab_size)
            while len(host.drawn[0]) < len(draw.keys):
                host.take(scene.logits_after(number, host.drawn[0])[None], [0])
            assert drawn == host.drawn[0]
        scene.anew()
    assert scene.head.drafts.num_replayed == 2
    assert not scene.head.drafts.refused


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_trees_of_a_block_are_those_of_its_paths(layout: str) -> None:
    scene, vocab_size = Scene(layout, 2), target().vocab_size
    for kind in ("greedy", "coupled"):
        trees: list[Any] = [KeptTree(scene.rng, text, (8, LEVELS, 3), kind) for text in scene.texts]
        grower = DeviceTrees(trees, vocab_size)
        grower.finish(scene.draft(grower))
        found = [tree.grown for tree in trees]
        scene.compute()
        grow_by_paths(trees, vocab_size, scene.logits_after)
        assert found == [tree.grown for tree in trees]
        scene.anew()


SPECS: dict[str, Any] = {
    "dflash": {"method": "dflash", "model": "mask"},
    "dspark": {"method": "dflash", "model": "rnn"},
    "dflash-tree": {"method": "dflash", "model": "mixed", "tree_top_k": 3},
    "selector-tree": {"method": "dflash", "model": "dflash2", "tree_top_k": 2},
}


@lru_cache(maxsize=1)
def recorded(name: str) -> LLM:
    spec = SPECS[name] | {"model": block_head(SPECS[name]["model"]), "num_speculative_tokens": 3}
    return LLM(speculative_config=spec, **RECORDED)


@pytest.mark.parametrize("name", SPECS)
def test_a_step_with_a_block_head_waits_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = recorded(name)
    assert check_waits(llm, "seeded", 2, monkeypatch, 2) == expected("seeded")[:2]
    monkeypatch.undo()
    if name == "dspark":
        check_waits(llm, "greedy", 1, monkeypatch, 2)
    elif name == "selector-tree":
        assert answers(llm, "mixed") == expected("mixed")
    drafter: Any = llm.engine.drafter
    assert drafter.executor.drafts.num_replayed
    assert not drafter.executor.drafts.refused

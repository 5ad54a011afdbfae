"""Heads and draft chains in the CPU kernels: PyTorch's numbers, a row's own bits in any batch, the same tokens."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.draft.heads.eagle_files import load_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.heads.head_executor import eagle_executor, heads_executor, pack_head
from slipstream.draft.heads.heads_native import NativeEagle, NativeHeads
from slipstream.draft.heads.hydra import HydraConfig, HydraHeads
from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.attention.base import Variant
from slipstream.models.attention.packed import PackedAttention
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import ENDED, Chains, Draw
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from tests.kit.small_llama import sizes

VOCAB, HIDDEN, LAYERS = 1003, 72, 3
SLOTS = 64
HEADS: dict[str, dict[str, Any]] = {
    "eagle-1": {"version": 1, "fc_bias": True, "attention_bias": True},
    "eagle-3": {"version": 3},
    "pruned": {"version": 3, "draft_vocab_size": 205, "norm_before_residual": True},
    "own table": {"version": 3, "own_table": True, "fc_bias": True},
    "deep": {"version": 3, "num_layers": 3, "draft_vocab_size": 205},
    "deep, normed queries": {"version": 3, "num_layers": 2, "norm_queries": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of awkward shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes(HIDDEN, LAYERS, 6, 2, vocab=VOCAB, inner=101, head_dim=24, spread=0.2, tied=True)
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> CausalLM:
    return load_model(str(folder), cpu_kernels="native")


def saved_head(folder: Path, version: int, own_table: bool = False, **options: Any) -> str:
    torch.manual_seed(1)
    config = EagleConfig(
        version=version,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=options.pop("draft_vocab_size", VOCAB),
        intermediate_size=53,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        feature_layers=(LAYERS,) if version == 1 else (0, 1, 2),
        **options,
    )
    head = EagleHead(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if config.draft_vocab_size < VOCAB:
        head.draft_token_ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    if own_table:
        head.embedding = torch.randn(VOCAB, HIDDEN)
    layout = "speculators" if config.norm_queries else "eagle" if version == 1 else "eagle3"
    save_eagle(head, folder, target="odd", layout=layout)
    return str(folder)


class Reference:
    """The head as a PyTorch module."""

    def __init__(self, head: EagleHead, lm: CausalLM) -> None:
        self.head, self.lm = head, lm
        self.num_layers = head.config.num_layers

    def forward(self, rows: ForwardBatch, pool: KVPool, given: Tensor, level: int) -> tuple[Tensor, Tensor]:
        attention, on = PackedAttention(rows, pool), rows.on(torch.device("cpu"))
        table = self.head.embedding
        embeds = self.lm.embed(on.token_ids) if table is None else table[on.token_ids]
        states = given if level else self.head.encode(given)
        states = self.head(
            embeds[None],
            states[None],
            on.positions[None],
            lambda layer, query, key, value: attention.attend(layer, query, key, value, Variant(24**-0.5)),
        )[0]
        wanted = states[on.logit_rows]
        if self.head.config.version == 1:
            return states, self.lm.project(wanted)
        logits = torch.full((len(wanted), VOCAB), float("-inf"))
        logits[:, self.head.draft_token_ids] = self.head.logits(wanted)
        return states, logits


def new_pool(num_layers: int) -> KVPool:
    """Entries that were not written are NaN, so that reading one shows."""
    pool = KVPool([LayerShape(3, 24, 24)] * num_layers, SLOTS, torch.float32, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    return pool


TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(20)]
TREE = RowGroup(
    range(SLOTS), 20, [5, 900, 7], range(3), [20, 20, 20], (), [[0], [1], [2]]
)  # a first level of three siblings
BELOW = RowGroup(range(SLOTS), 20, [8, 9], range(2), [21, 21], [20, 20, 20], [[0, 3], [2, 4]])


def passes(computes: Any, features: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A text in two chunks, then two levels of a tree: states and logits of each pass."""
    pool, done = new_pool(computes.num_layers), []
    for begin, end in ((0, 13), (13, 20)):
        group = RowGroup(range(SLOTS), begin, TEXT[begin:end], range(end - begin))
        done.append(computes.forward(ForwardBatch([group]), pool, features[begin:end], 0))
    last = done[-1][0][-1:]
    done.append(computes.forward(ForwardBatch([TREE]), pool, last.expand(3, -1), 1))
    above = done[-1][0]
    done.append(computes.forward(ForwardBatch([BELOW]), pool, above[[0, 2]], 2))
    return done


def some_features(head: EagleHead) -> Tensor:
    width = len(head.config.feature_layers) * HIDDEN
    return torch.randn(len(TEXT), width, generator=torch.Generator().manual_seed(2))


@functools.cache
def fused(path: str, lm: CausalLM, quantization: str | None = None) -> NativeEagle:
    native = eagle_executor(load_eagle(path, lm), lm, quantization)
    assert isinstance(native, NativeEagle)
    return native


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_level_is_the_modules(kind: str, quantization: str | None, lm: CausalLM, tmp_path: Path) -> None:
    path = saved_head(tmp_path, **HEADS[kind])
    head = load_eagle(path, lm)
    features = some_features(head)
    if quantization is not None:
        pack_head(head, lm, lm.head_format(quantization))
    expected = passes(Reference(head, lm), features)
    for made, wanted in zip(passes(fused(path, lm, quantization), features), expected, strict=True):
        for ours, theirs in zip(made, wanted, strict=True):
            finite = theirs > float("-inf")
            assert torch.equal(ours > float("-inf"), finite)
            spread = float(theirs[finite].std())
            error = float((ours[finite] - theirs[finite]).abs().max())
            # int8 rows are rounded: a difference in the last place can move a number by one step of 1/127.
            assert error < (1e-4 if quantization is None else 0.1) * spread


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", HEADS)
def test_neighbours_do_not_change_a_row(
    kind: str, quantization: str | None, lm: CausalLM, tmp_path: Path
) -> None:
    native = fused(saved_head(tmp_path, **HEADS[kind]), lm, quantization)
    features = some_features(load_eagle(str(tmp_path), lm))
    together = passes(native, features)
    pool, alone = new_pool(native.num_layers), []
    for i in range(len(TEXT)):
        group = RowGroup(range(SLOTS), i, TEXT[i : i + 1], [0])
        alone.append(native.forward(ForwardBatch([group]), pool, features[i : i + 1], 0))
    for i in range(2):  # states, logits
        assert torch.equal(
            torch.cat([part[i] for part in alone]), torch.cat([part[i] for part in together[:2]])
        )
    # The last path of the tree, as a chain.
    state = alone[-1][0]
    for position, token, number, row in ((20, 7, 2, 2), (21, 9, 3, 1)):
        group = RowGroup(range(SLOTS), position, [token], [0])
        state, logits = native.forward(ForwardBatch([group]), pool, state, number - 1)
        assert torch.equal(state[0], together[number][0][row])
        assert torch.equal(logits[0], together[number][1][row])


def chosen(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """What `DraftTree` chooses from one row of logits."""
    if temperature == 0:
        return int(logits.argmax())
    return int(Noise(seed, position).choose((logits / temperature).log_softmax(-1)[None], [position]))


CHAINS = [(5, 0.0), (1, 0.8), (4, 1.3), (3, 0.0), (6, 0.3)]
"""Length and temperature of the chain of each sequence, which has the seed of its number."""


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.001},
    {"top_k": VOCAB + 5, "top_p": 0.01},
]


def draws() -> list[Draw]:
    return [
        Draw(temperature, [Noise(seed, 0).key(12 + level) for level in range(length)])
        for seed, (length, temperature) in enumerate(CHAINS)
    ]


def sequence_rows(begin: int, end: int, number: int, token_ids: list[int]) -> RowGroup:
    """Rows of one of the sequences; of the first pass only the last one's logits are wanted."""
    slots = range(20 * number, 20 * number + 20)
    return RowGroup(slots, begin, token_ids, [end - begin - 1])


def test_a_draft_models_chains_are_those_of_its_levels(lm: CausalLM) -> None:
    assert isinstance(lm.executor, CpuKernels)
    texts = [[(number * 101 + 7 * i * i) % VOCAB for i in range(12)] for number in range(len(CHAINS))]
    first = [sequence_rows(0, 12, number, text) for number, text in enumerate(texts)]
    cache = KVPool(lm.shapes, 20 * len(CHAINS), lm.dtype, lm.device)
    chains = lm.executor.draft_chain(ForwardBatch(first), cache, Chains(draws(), VOCAB))
    for number, (length, temperature) in enumerate(CHAINS):
        pool, text, begin = KVPool(lm.shapes, 20 * len(CHAINS), lm.dtype, lm.device), list(texts[number]), 0
        for _ in range(length):
            rows = sequence_rows(begin, len(text), number, text[begin:])
            logits = lm.forward([rows], pool).logits[0]
            begin = len(text)
            text.append(chosen(logits, temperature, number, begin))
        assert chains[number] == text[12:]
        # All but the last token have entries, which the next step may keep.
        stored = range(20 * number, 20 * number + 12 + length - 1)
        for ours, theirs in zip(cache.tensors, pool.tensors, strict=True):
            assert torch.equal(ours[stored], theirs[stored])


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_chains_are_those_of_its_levels(kind: str, lm: CausalLM, tmp_path: Path) -> None:
    native = fused(saved_head(tmp_path, **HEADS[kind]), lm)
    width = some_features(load_eagle(str(tmp_path), lm)).shape[1]
    shape = [LayerShape(3, 24, 24)] * native.num_layers
    features = torch.randn(len(CHAINS), 12, width, generator=torch.Generator().manual_seed(3))
    texts = [[(number * 101 + 7 * i * i) % VOCAB for i in range(12)] for number in range(len(CHAINS))]
    first = [sequence_rows(0, 12, number, text) for number, text in enumerate(texts)]
    pool = KVPool(shape, 20 * len(CHAINS), torch.float32, torch.device("cpu"))
    chains = native.draft_chain(ForwardBatch(first), pool, features.flatten(0, 1), Chains(draws(), VOCAB))
    for number, (length, temperature) in enumerate(CHAINS):
        text, begin, given = list(texts[number]), 0, features[number]
        for level in range(length):
            rows = sequence_rows(begin, len(text), number, text[begin:])
            states, logits = native.forward(ForwardBatch([rows]), pool, given, level)
            begin, given = len(text), states[-1:]
            text.append(chosen(logits[0], temperature, number, begin))
        assert chains[number] == text[12:]


@pytest.mark.parametrize("kind", ["draft model", "head"])
@pytest.mark.parametrize(
    ("group", "lengths", "message"),
    [
        (RowGroup(range(5), 0, [1, 2, 3], [2]), [4], "a chain of 4 tokens needs 6 slots, and there are 5"),
        (RowGroup(range(5), 0, [1, 2, 3], [2]), [3, 3], "2 chains for 1 rows"),
        (RowGroup(range(5), 0, [1, 2, 3], [1, 2]), [1], "1 chains for 2 rows"),
        (RowGroup(range(9), 0, [1, 2], [1], [0, 0], (), [[0], [1]]), [2], "not behind a tree's"),
    ],
    ids=["too few slots", "a chain too many", "a chain too few", "a tree"],
)
def test_chains_that_have_no_room_are_refused(
    group: RowGroup, lengths: list[int], message: str, kind: str, lm: CausalLM, tmp_path: Path
) -> None:
    chains = Chains([Draw(0.0, [0] * length) for length in lengths], VOCAB)
    assert isinstance(lm.executor, CpuKernels)
    draft: Any = partial(
        lm.executor.draft_chain, ForwardBatch([group]), KVPool(lm.shapes, SLOTS, lm.dtype, lm.device)
    )
    if kind == "head":
        native = fused(saved_head(tmp_path, **HEADS["eagle-3"]), lm)
        features = torch.zeros(len(group.token_ids), LAYERS * HIDDEN)
        draft = partial(native.draft_chain, ForwardBatch([group]), new_pool(1), features)
    with pytest.raises(ValueError, match=message):
        draft(chains)


def test_a_chain_may_fill_its_slots(lm: CausalLM) -> None:
    assert isinstance(lm.executor, CpuKernels)
    pool = KVPool(lm.shapes, 5, lm.dtype, lm.device)
    rows = ForwardBatch([RowGroup(range(5), 0, [1, 2, 3], [2])])
    assert [
        len(chain) for chain in lm.executor.draft_chain(rows, pool, Chains([Draw(0.0, [0] * 3)], VOCAB))
    ] == [3]


def rows_of_a_text() -> ForwardBatch:
    text = [(31 * i * i + 11) % VOCAB for i in range(200)]
    return ForwardBatch([RowGroup(range(200), 0, text, range(200))])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_the_kernels_filter_as_the_target_does(
    temperature: float, filters: dict[str, Any], lm: CausalLM
) -> None:
    """Also the confidence: that of the most probable token among those that pass."""
    assert isinstance(lm.executor, CpuKernels)
    pool, rows = KVPool(lm.shapes, 200, lm.dtype, lm.device), rows_of_a_text()
    logits = lm.executor.forward(rows, pool).logits
    params = SamplingParams(temperature=temperature, **filters)
    log_probs = LogitsProcessor(params, (), (), (), VOCAB).log_probs(logits, (), [()] * 200)
    expected = [int(Noise(i, 0).choose(row[None], [i])) for i, row in enumerate(log_probs)]
    keys = [Noise(i, 0).key(i) for i in range(200)]
    draws = [Draw(temperature, [key], **filters) for key in keys]
    assert lm.executor.draft_chain(rows, pool, Chains(draws, VOCAB)) == [[token] for token in expected]
    confidences = log_probs.amax(-1).double().exp()
    least = float(confidences.median())
    draws = [Draw(temperature, [0], **filters, least_confidence=least, greedy=True) for _ in keys]
    likely = lm.executor.draft_chain(rows, pool, Chains(draws, VOCAB))
    best = logits.argmax(-1).tolist()
    sure = (confidences > least * (1 + 1e-5)).tolist()
    unsure = (confidences < least * (1 - 1e-5)).tolist()
    assert sum(sure) > 20 or least > 0.999, "else every row has its one token"
    for chain, token, above, below in zip(likely, best, sure, unsure, strict=True):
        assert chain in ([token], [ENDED])
        assert not (above and chain == [ENDED])
        assert not (below and chain == [token])


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, 4.0])
def test_the_kernels_choose_what_the_noise_chooses(temperature: float, lm: CausalLM) -> None:
    """One token each of many positions and seeds, among them some that only much noise can make win."""
    assert isinstance(lm.executor, CpuKernels)
    pool, rows = KVPool(lm.shapes, 200, lm.dtype, lm.device), rows_of_a_text()
    keys = [Noise(i, 0).key(i) for i in range(200)]
    drawn = lm.executor.draft_chain(rows, pool, Chains([Draw(temperature, [key]) for key in keys], VOCAB))
    logits = lm.executor.forward(rows, pool).logits
    assert drawn == [[chosen(row, temperature, i, i)] for i, row in enumerate(logits)]
    ranks = [int((row > row[token]).sum()) for row, (token,) in zip(logits, drawn, strict=True)]
    assert max(ranks) > 100 if temperature == 4 else temperature or max(ranks) == 0


def test_a_chain_ends_where_logits_are_not_finite(lm: CausalLM, tmp_path: Path) -> None:
    native = fused(saved_head(tmp_path, **HEADS["eagle-3"]), lm)
    features = torch.zeros(2, LAYERS * HIDDEN)
    features[1] = float("nan")
    pool = KVPool([LayerShape(3, 24, 24)], SLOTS, torch.float32, torch.device("cpu"))
    rows = ForwardBatch([RowGroup(range(30), 0, [1], [0]), RowGroup(range(30, 60), 0, [1], [0])])
    healthy, damaged = native.draft_chain(rows, pool, features, Chains([Draw(0.0, [0] * 3)] * 2, VOCAB))
    assert min(healthy) >= 0
    assert damaged == [-1, -1, -1]


def random_heads(method: str, lm: CausalLM, num_layers: int, shares: bool) -> MedusaHeads | HydraHeads:
    torch.manual_seed(4)
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 4, "num_layers": num_layers}
    heads: MedusaHeads | HydraHeads
    if method == "medusa":
        heads = MedusaHeads(MedusaConfig(**shape, shares_lm_head=shares), lm.project)
    else:
        heads = HydraHeads(HydraConfig(**shape, shares_lm_head=shares), lm.project)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads.eval().requires_grad_(False)


def head_rows(method: str, number: int) -> Tensor:
    """[5, width]: what head `number` reads."""
    width = HIDDEN * (number + 2 if method == "hydra" else 1)
    return torch.randn(5, width, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("num_layers", "shares"), [(1, True), (2, False)])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_heads_compute_what_the_modules_do(
    method: str, num_layers: int, shares: bool, quantization: str | None, lm: CausalLM
) -> None:
    heads = random_heads(method, lm, num_layers, shares)
    native = heads_executor(random_heads(method, lm, num_layers, shares), lm, quantization)
    assert isinstance(native, NativeHeads)
    if quantization is not None:
        pack_head(heads, lm, lm.head_format(quantization))
    for number in range(4):
        rows = head_rows(method, number)
        if isinstance(heads, HydraHeads):
            ours, theirs = native.forward(rows, number, 1), heads.step(number, rows)[None]
        else:
            ours, theirs = native.forward(rows, 0, number + 1), heads(rows, number + 1)
        error = float((ours - theirs).abs().max())
        assert error < (1e-4 if quantization is None else 0.1) * float(theirs.std())
        first = 0 if method == "medusa" else number
        alone = torch.cat([native.forward(row[None], first, len(ours)) for row in rows], dim=1)
        assert torch.equal(alone, ours)


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_chains_of_heads_are_those_of_their_levels(method: str, lm: CausalLM) -> None:
    native = heads_executor(random_heads(method, lm, 2, shares=False), lm, None)
    assert isinstance(native, NativeHeads)
    chains = [(min(length, 4), temperature) for length, temperature in CHAINS]
    states = torch.randn(len(chains), HIDDEN, generator=torch.Generator().manual_seed(5))
    last = [3 + 7 * number for number in range(len(chains))]
    draws = Chains(
        [
            Draw(temperature, [Noise(seed, 0).key(12 + level) for level in range(length)])
            for seed, (length, temperature) in enumerate(chains)
        ],
        VOCAB,
    )
    drawn = native.draft_chain(states, last, draws)
    for number, (length, temperature) in enumerate(chains):
        rows, token_ids = states[number : number + 1], [last[number]]
        for level in range(length):
            if method == "hydra":
                rows = torch.cat([rows, lm.embed(torch.tensor(token_ids[-1:]))], dim=-1)
            logits = native.forward(rows, level, 1)[0, 0]
            token_ids.append(chosen(logits, temperature, number, 12 + level))
        assert drawn[number] == token_ids[1:]

"""Families against Transformers' own model: prompts, chunks, packed sequences, draft trees, greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LIKE_OTHERS, NOT_FUSED, RECURRENT, SPARSE, VOCAB, WINDOW, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kv.cache import KVCache
from slipstream.kv.state import StateRoom
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.attention.own_forward import FORWARDS
from slipstream.models.executor.cpu_kernels import CpuKernels

TOLERANCE = 1e-4
"""Forty times that for recurrent layers: Transformers computes them in chunks, which rounds otherwise."""
TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(26)]
"""Longer than several sliding windows."""

NODES = [9, 40, 41, 77, 12, 64, 90]
PARENTS = [-1, -1, 0, 0, 1, 3, 5]
"""Siblings on two levels, branches of unequal depth; the deepest, node 6, has the root out of its window."""


@dataclass
class Pair:
    """Our model and Transformers' own, with the same weights."""

    ours: CausalLM
    theirs: Any
    tolerance: float = TOLERANCE
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """What Transformers' model has said so far: the same for all pairs of one family."""

    @torch.inference_mode()
    def expected(self, token_ids: Sequence[int]) -> Tensor:
        """[tokens, vocab]"""
        key = tuple(token_ids)
        if key not in self.known:
            self.known[key] = self.theirs(input_ids=torch.tensor([key]), use_cache=False).logits[0]
        return self.known[key]

    @cached_property
    def text_logits(self) -> Tensor:
        return self.expected(TEXT)


IN_THE_KERNELS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"]
IN_THE_KERNELS += ["phi3-longrope", "granite", "olmo2", "smollm3", "starcoder2", "gpt-neox"]
IN_THE_KERNELS += ["mixtral", "mixtral-odd", "qwen3-moe", "qwen3-moe-odd", "gpt-oss", "gpt-oss-odd"]
IN_THE_KERNELS += [family for family in FAMILIES if family.startswith("gemma4")]
IN_THE_KERNELS += [
    f"{family}-odd"
    for family in ("llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "gpt-neox")
]
RECORDED = "slipstream.testing.recorded_graph:TritonOnCpu"
PAGED = ["llama-gqa", "mistral", "gemma2", "gpt-oss"]
"""Families whose entries also lie in shuffled pages: without a window, with one, with capped logits, with sinks."""
LAYERS = [*PAGED, "llama3-odd", "gemma4", "gemma4-shared"]
"""Families of the fused decoder whose layers also attend by themselves in the kernels, with odd widths, with layers of
different widths, with shared entries."""


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES,
        *RECURRENT,
        *SPARSE,
        *(f"{family}-torch" for family in (*FAMILIES, *RECURRENT, *SPARSE)),
        *(f"{family}-paged" for family in PAGED),
        *(f"{family}-layers" for family in LAYERS),
        *(f"{family}-recorded" for family in FAMILIES if not family.startswith("falcon")),  # see refusals
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Each family in our own kernels, as whole passes or as linear layers only, and in PyTorch's operators."""
    family = request.param.removesuffix("-torch").removesuffix("-paged")
    if request.param.endswith("-paged"):
        return make_pair(family, tmp_path_factory, attention="slipstream.testing.paged:PagedBackend")
    if family.endswith("-layers"):
        return make_pair(family.removesuffix("-layers"), tmp_path_factory, attention="native_layers")
    if family.endswith("-recorded"):
        family = family.removesuffix("-recorded")
        return make_pair(family, tmp_path_factory, kernels="torch", attention=RECORDED)
    kernels = "native" if family == request.param else "torch"
    return make_pair(family, tmp_path_factory, kernels=kernels)


STOCK: dict[tuple[str, str], tuple[Path, Any, dict[tuple[int, ...], Tensor]]] = {}
"""Family and dtype to the folder, Transformers' model of it, and what that has said."""


def make_pair(
    family: str,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str = "float32",
    kernels: str = "auto",
    attention: str = "auto",
) -> Pair:
    if (family, dtype) not in STOCK:
        folder = tmp_path_factory.mktemp("models") / family
        save_tiny((FAMILIES | LIKE_OTHERS | RECURRENT | SPARSE)[family](), folder)
        stock = "sdpa" if family.startswith("falcon") else "eager"
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=stock, dtype=getattr(torch, dtype)
        )
        STOCK[family, dtype] = folder, theirs.eval(), {}
    folder, theirs, known = STOCK[family, dtype]
    ours = load_model(str(folder), dtype=dtype, cpu_kernels=kernels, attention_backend=attention)
    return Pair(ours, theirs, 40 * TOLERANCE if family in RECURRENT else TOLERANCE, known)


class Decoder:
    """One sequence in a cache whose every unwritten or forgotten entry is NaN, so that reading one shows."""

    def __init__(self, lm: CausalLM, cache: KVCache | None = None, owner: int = 0) -> None:
        self.lm = lm
        self.cache = cache or make_cache(lm)
        self.owner = owner
        assert self.cache.accounting.open(owner, [0] * 47) == 0

    @property
    def num_past(self) -> int:
        return self.cache.accounting.num_valid(self.owner)

    def group(self, token_ids: Sequence[int], **options: Any) -> RowGroup:
        options.setdefault("logit_rows", range(len(token_ids)))
        slots = self.cache.accounting.slots(self.owner)
        return RowGroup(slots, self.num_past, token_ids, owner=self.owner, **options)

    def forward(self, token_ids: Sequence[int], **options: Any) -> Tensor:
        return self.lm.forward([self.group(token_ids, **options)], self.cache.pool).logits

    def commit(self, token_ids: Sequence[int], kept: Sequence[int] | None = None) -> None:
        self.cache.commit(self.owner, token_ids, range(len(token_ids)) if kept is None else kept)
        left = list(self.cache.accounting.slots(self.owner)[self.num_past :])
        for tensor in self.cache.pool.tensors:
            tensor[left] = float("nan") if tensor.is_floating_point() else 1

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Compute and commit; logits of every row."""
        logits = self.forward(token_ids)
        self.commit(token_ids)
        return logits


def make_cache(lm: CausalLM) -> KVCache:
    cache = lm.new_cache(256, states=StateRoom(num_owners=4, num_copies=0, num_logged=2))
    cache.pool.fill(float("nan"))
    return cache


def error(ours: Tensor, expected: Tensor) -> float:
    """Largest difference; NaN counts as infinite."""
    assert ours.shape == expected.shape
    return float((ours - expected).abs().nan_to_num(float("inf")).max())


def test_weights_are_random_enough(pair: Pair) -> None:
    assert float(pair.text_logits.std()) > 0.3
    reordered = [TEXT[1], TEXT[0], *TEXT[2:4]]
    assert (
        error(pair.expected(reordered)[-1], pair.text_logits[3]) > 0.01
    )  # early tokens and their order count


def test_whole_prompt_in_one_chunk(pair: Pair) -> None:
    assert error(Decoder(pair.ours).forward(TEXT), pair.text_logits) < pair.tolerance


def test_chunked_prefill(pair: Pair) -> None:
    decoder = Decoder(pair.ours)
    chunks = [TEXT[:1], TEXT[1:6], TEXT[6:7], TEXT[7:20], TEXT[20:]]
    logits = torch.cat([decoder.feed(chunk) for chunk in chunks])
    assert error(logits, pair.text_logits) < pair.tolerance


def test_sequences_of_different_lengths_in_one_pass(pair: Pair) -> None:
    cache = make_cache(pair.ours)
    texts = [TEXT, TEXT[5:8], TEXT[3:14], TEXT[::-1]]
    decoders = [Decoder(pair.ours, cache, owner) for owner in range(4)]
    decoders[3].feed(texts[3][:-1])  # one sequence decodes a single token while the others begin
    rows = [*texts[:3], texts[3][-1:]]
    groups = [decoder.group(ids) for decoder, ids in zip(decoders, rows, strict=True)]
    logits = pair.ours.forward(groups, cache.pool).logits.split([len(ids) for ids in rows])
    for text, ids, ours in zip(texts, rows, logits, strict=True):
        assert error(ours, pair.expected(text)[-len(ids) :]) < pair.tolerance


def path(node: int) -> list[int]:
    return [*path(PARENTS[node]), node] if node >= 0 else []


def tree_row(pair: Pair, node: int) -> Tensor:
    """Transformers' logits of a node, from the text of a leaf's path, which has those of the nodes above it too."""
    leaf = next(leaf for leaf in (2, 4, 6) if node == -1 or node in path(leaf))
    text = [*TEXT[:12], *(NODES[step] for step in path(leaf))]
    return pair.expected(text)[11 + len(path(node))]


def tree_rows(nodes: Sequence[int], stored: Sequence[int], num_past: int) -> dict[str, Any]:
    """Options of a group whose rows are `nodes` (-1 is the last committed token) behind the `stored` ones."""
    tail = [*stored, *nodes]
    positions = {node: num_past + len(path(node)) for node in tail}
    seen = [
        [entry for entry, other in enumerate(tail) if other == -1 or other in path(node)] for node in nodes
    ]
    return {
        "positions": [positions[node] for node in nodes],
        "stored_positions": [positions[node] for node in stored],
        "tail_seen": seen,
    }


def tree_logits(decoder: Decoder, passes: Sequence[Sequence[int]], root: int) -> dict[int, Tensor]:
    """Node (-1 for the last committed token) to its logits, computed in several passes over the same tree."""
    logits: dict[int, Tensor] = {}
    stored: list[int] = []
    for nodes in passes:
        ids = [root if node == -1 else NODES[node] for node in nodes]
        output = decoder.forward(ids, **tree_rows(nodes, stored, decoder.num_past))
        logits.update(zip(nodes, output, strict=True))
        stored.extend(nodes)
    return logits


@pytest.mark.parametrize(
    "passes", [[range(-1, 7)], [[-1, 0, 1], [2, 3], [4, 5, 6]]], ids=["one-pass", "three"]
)
def test_draft_tree_and_commit(pair: Pair, passes: Sequence[Sequence[int]]) -> None:
    prompt, root = TEXT[:11], TEXT[11]
    decoder = Decoder(pair.ours)
    decoder.feed(prompt)
    logits = tree_logits(decoder, passes, root)
    for node, ours in logits.items():
        assert error(ours, tree_row(pair, node)) < pair.tolerance, f"node {node}"
    accepted = path(5)  # nodes 0, 3 and 5, which do not lie side by side
    tokens = [root, *(NODES[node] for node in accepted)]
    decoder.commit(tokens, [0, *(node + 1 for node in accepted)])
    rest = TEXT[12:20]
    logits_after = torch.cat([decoder.feed([token]) for token in rest])
    assert error(logits_after, pair.expected([*prompt, *tokens, *rest])[-len(rest) :]) < pair.tolerance


def test_a_tree_beside_a_prompt_and_a_single_token(pair: Pair) -> None:
    cache = make_cache(pair.ours)
    tree, prompt, single = (Decoder(pair.ours, cache, owner) for owner in range(3))
    tree.feed(TEXT[:11])
    single.feed(TEXT[5:20])
    nodes = range(-1, 7)
    groups = [
        prompt.group(TEXT[2:9]),
        tree.group([TEXT[11], *NODES], **tree_rows(nodes, [], 11)),
        single.group(TEXT[20:21]),
    ]
    ours = pair.ours.forward(groups, cache.pool).logits
    expected = [
        pair.expected(TEXT[2:9]),
        *(tree_row(pair, node)[None] for node in nodes),
        pair.expected(TEXT[5:21])[-1:],
    ]
    assert error(ours, torch.cat(expected)) < pair.tolerance


def test_hidden_states(pair: Pair) -> None:
    layers = [0, 2, 3]
    decoder = Decoder(pair.ours)
    output = pair.ours.forward([decoder.group(TEXT)], decoder.cache.pool, layers)
    with torch.inference_mode():
        expected = pair.theirs(
            input_ids=torch.tensor([TEXT]), use_cache=False, output_hidden_states=True
        ).hidden_states
    assert sorted(output.hidden) == layers
    for layer in layers:
        # Zamba's states are thousands; those of the others some tens at most.
        allowed = pair.tolerance * max(1.0, float(expected[layer][0].abs().max()) / 100)
        assert error(output.hidden[layer], expected[layer][0]) < allowed, f"layer {layer}"


def test_only_the_wanted_logit_rows(pair: Pair) -> None:
    cache = make_cache(pair.ours)
    first, second = Decoder(pair.ours, cache, 0), Decoder(pair.ours, cache, 1)
    groups = [first.group(TEXT, logit_rows=[3, 25]), second.group(TEXT[:5], logit_rows=[4])]
    logits = pair.ours.forward(groups, cache.pool).logits
    assert error(logits, pair.text_logits[[3, 25, 4]]) < pair.tolerance
    none = Decoder(pair.ours).forward(TEXT, logit_rows=[])
    assert none.shape == (0, VOCAB)


@cache
def generated(theirs: Any) -> list[int]:
    """Transformers' own greedy text behind the first tokens of `TEXT`."""
    text: list[int] = theirs.generate(torch.tensor([TEXT[:9]]), do_sample=False, max_new_tokens=14)[
        0
    ].tolist()
    return text


def test_greedy_text(pair: Pair) -> None:
    expected = generated(pair.theirs)
    decoder = Decoder(pair.ours)
    text = TEXT[:9]
    while len(text) < len(expected):
        chosen = int(decoder.feed(text[decoder.num_past :])[-1].argmax())
        if chosen != expected[len(text)]:  # rounding may decide between two tokens that score the same
            logits = pair.expected(text)[-1]
            margin = float((logits[chosen] - logits[expected[len(text)]]).abs())
            assert margin < pair.tolerance, f"token {len(text)}"
            break
        text.append(chosen)


@pytest.mark.parametrize("length", range(WINDOW - 1, WINDOW + 3))
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt-oss"])
def test_around_the_edge_of_the_window(
    family: str, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = make_pair(family, tmp_path_factory)
    decoder = Decoder(pair.ours)
    decoder.feed(TEXT[: length - 1])
    assert (
        error(decoder.feed(TEXT[length - 1 : length]), pair.text_logits[length - 1 : length]) < pair.tolerance
    )


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "qwen3-moe", "gpt-oss", "falcon-new"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(family: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = make_pair(family, tmp_path_factory, dtype, kernels="torch")
    decoder = Decoder(pair.ours)
    ours = torch.cat([decoder.feed(TEXT[:10]), decoder.feed(TEXT[10:])])
    expected = pair.text_logits
    assert ours.dtype == expected.dtype == getattr(torch, dtype)
    # A quarter of the rows: near-ties of a router may send a row to another expert, which those behind it attend to.
    difference = (ours - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert float(difference.quantile(0.25)) < (0.1 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_window_that_is_off_by_one_shows(
    tmp_path_factory: pytest.TempPathFactory, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("mistral", tmp_path_factory, kernels=kernels)
    pair.known = {}
    monkeypatch.setattr(pair.theirs.config, "sliding_window", pair.theirs.config.sliding_window + 1)
    assert error(Decoder(pair.ours).forward(TEXT), pair.text_logits) > 100 * pair.tolerance


@pytest.mark.parametrize("family", IN_THE_KERNELS)
def test_the_families_that_the_kernels_know_run_in_them(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert isinstance(make_pair(family, tmp_path_factory, kernels="native").ours.executor, CpuKernels)
    assert not isinstance(make_pair(family, tmp_path_factory, kernels="torch").ours.executor, CpuKernels)


@pytest.mark.parametrize("family", LIKE_OTHERS)
def test_families_like_others(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = make_pair(family, tmp_path_factory)
    assert isinstance(pair.ours.executor, CpuKernels) == (family not in NOT_FUSED)
    test_weights_are_random_enough(pair)
    test_chunked_prefill(pair)
    test_draft_tree_and_commit(pair, [range(-1, 7)])


@pytest.mark.parametrize("family", sorted(FORWARDS))
def test_families_whose_layers_get_a_forward_of_ours(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.STOCK", {})  # a file that was compared before is not compared again
    pair = make_pair(family.replace("_", "-"), tmp_path_factory)
    assert pair.ours.was_compared
    test_whole_prompt_in_one_chunk(pair)
    test_sequences_of_different_lengths_in_one_pass(pair)
    test_draft_tree_and_commit(pair, [[-1, 0, 1], [2, 3], [4, 5, 6]])
    test_a_tree_beside_a_prompt_and_a_single_token(pair)
    test_hidden_states(pair)
    test_greedy_text(pair)


def test_a_sibling_in_view_shows(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = make_pair("llama", tmp_path_factory)
    decoder = Decoder(pair.ours)
    decoder.feed(TEXT[:11])
    rows = tree_rows(range(-1, 7), [], 11)
    assert rows["tail_seen"][2] == [0, 2]
    rows["tail_seen"][2] = [0, 1, 2]  # node 1 sees node 0, its sibling
    ours = decoder.forward([TEXT[11], *NODES], **rows)[2]
    assert error(ours, pair.expected([*TEXT[:12], NODES[1]])[-1]) > 100 * pair.tolerance

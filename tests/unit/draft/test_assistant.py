"""Gemma 4's assistant: Transformers' logits for chains and trees, exact texts and distributions, and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.heads.assistant import AssistantDrafter
from slipstream.draft.heads.description import HeadOnDisk, method_of
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.registry import create_drafter
from slipstream.errors import ConfigError, ModelError
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.outline import outline_model
from slipstream.testing.conformance import check_drafter
from slipstream.testing.enumeration import Distribution, total_variation
from slipstream.testing.stub_drafters import draft_context
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from tests.kit.assistants import CAP, HIDDEN, KINDS, READ, VOCAB, WINDOW, Reference, assistant, gemma4
from tests.kit.engine_enumeration import engine_distribution

TEXT = [(37 * place + 11) % VOCAB for place in range(14)]
TEXTS = [TEXT[:2], TEXT[: WINDOW + 2], TEXT, [*TEXT[:9], 7, 3]]
"""Shorter than the window, at its end, and longer."""
CLOSE = 1e-4
TREE: dict[str, Any] = {"tree_top_k": 2, "num_draft_nodes": 6}
FIXED: dict[str, Any] = {"tree_choices": [[0], [1], [0, 0]]}


@functools.cache
def target(shared: int = 2) -> CausalLM:
    return load_model(gemma4(shared).folder)


def context(lm: CausalLM, verifier: str = "coupled") -> DraftContext:
    return dataclasses.replace(draft_context(lm.vocab_size, 256, verifier), target=lm)


def make(kind: str, shared: int = 2, verifier: str = "coupled", **options: Any) -> AssistantDrafter:
    config = SpeculativeConfig("mtp", verifier, {"model": assistant(kind).folder, **options})
    drafter = create_drafter(config, context(target(shared), verifier))
    assert isinstance(drafter, AssistantDrafter)
    return drafter


def computed(drafter: AssistantDrafter, texts: Seq[list[int]]) -> list[Sequence]:
    """Sequences of which the target has computed all but the last token; what was not written is NaN."""
    lm = drafter.target
    drafter.allocate(256)
    cache = lm.new_cache(256, prefix_caching=False, feature_width=lm.hidden_size)
    cache.pool.fill(float("nan"))
    drafter.attach(cache)
    sequences = []
    for number, text in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=64)
        sequences.append(Sequence(number, str(number), 0, list(text), len(text), params, 0))
        sequences[-1].num_computed = len(text) - 1
        cache.accounting.open(number, text, "")
        cache.accounting.reserve(number, len(text) + 8)
        slots = cache.accounting.slots(number)
        rows = RowGroup(slots, 0, text[:-1], [])
        states = lm.forward([rows], cache.pool, [lm.num_layers]).hidden[lm.num_layers]
        cache.keep_features(slots[: len(states)], states)
        cache.accounting.commit(number, text[:-1])
    return sequences


def proposed(
    drafter: AssistantDrafter, depth: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[tuple[int, ...], Tensor]]:
    """For each of `TEXTS`, the logits behind each path of draft tokens that a proposal of some nodes computes."""
    sequences = computed(drafter, TEXTS)
    found: list[dict[tuple[int, ...], Tensor]] = [{} for _ in TEXTS]
    grow = DraftTree.grow

    def recorded(tree: DraftTree, logits: Tensor, *others: Any) -> Any:
        for node, row in zip(tree.frontier, logits, strict=True):
            found[tree.sequence.id][tuple(node.token_ids() if node else ())] = row.clone()
        return grow(tree, logits, *others)

    monkeypatch.setattr(DraftTree, "grow", recorded)
    proposals = drafter.propose(sequences, [depth] * len(sequences))
    assert [len(each) for each in proposals] == [depth] * len(sequences)
    return found


def differ(kind: str, row: Tensor, expected: Tensor) -> float:
    if kind == "capped":
        expected = CAP * torch.tanh(expected / CAP)
    if kind == "ordered":
        scored = row > float("-inf")
        assert int(scored.sum()) == 3 * VOCAB // 16
        assert bool((expected[~scored] == expected.min()).all())
        row, expected = row[scored], expected[scored]
    return float((row - expected).abs().max())


@pytest.mark.parametrize("shared", [2, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_have_the_logits_of_transformers(
    kind: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the text and each draft token, for texts of several lengths at once."""
    drafter = make(kind, shared, num_speculative_tokens=4)
    assert drafter.layers == READ[shared]
    for text, rows in zip(TEXTS, proposed(drafter, 4, monkeypatch), strict=True):
        path = max(rows, key=len)
        expected = Reference(kind, text, shared).logits(list(path))
        assert len(path) == 3
        assert [len(each) for each in rows] == [0, 1, 2, 3]
        for row, wanted in zip(rows.values(), expected, strict=True):
            assert differ(kind, row, wanted) < CLOSE
        assert float((expected[1:] - expected[:-1]).abs().max()) > 0.05


@pytest.mark.parametrize("kind", ["tied", "ordered"])
def test_nodes_of_a_tree_have_the_logits_of_their_paths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(kind, **TREE, num_speculative_tokens=3)
    for text, rows in zip(TEXTS, proposed(drafter, 6, monkeypatch), strict=True):
        assert len(rows) == 5
        for path, row in rows.items():
            assert differ(kind, row, Reference(kind, text).logits(list(path))[-1]) < CLOSE


def test_greedy_chains_are_those_of_transformers() -> None:
    drafter = make("tied", num_speculative_tokens=4)
    proposals = drafter.propose(computed(drafter, TEXTS), [4] * len(TEXTS))
    for text, proposal in zip(TEXTS, proposals, strict=True):
        assert list(proposal.token_ids) == Reference("tied", text).chain(4)


def texts(llm: LLM) -> list[list[int]]:
    prompts = [TEXT, TEXT[:5], [*TEXT[:9], 7, 3], TEXT]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=18, ignore_eos=True)
        for number, temperature in enumerate((0.0, 0.0, 0.8, 0.8))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@functools.cache
def texts_without(**options: Any) -> list[list[int]]:
    return texts(LLM(gemma4().folder, **options))


@pytest.mark.parametrize(
    ("kind", "options", "engine"),
    [
        ("tied", {}, {}),
        ("tied", TREE, {}),
        ("ordered", FIXED, {}),
        ("ordered", {"num_speculative_tokens": 1}, {}),
        ("ordered", TREE, {"kv_cache_dtype": "int8"}),
        ("tied", {}, {"quantization": "int8"}),
        ("ordered", {}, {"quantization": "int8"}),
    ],
    ids=str,
)
def test_texts_are_those_without_it(kind: str, options: dict[str, Any], engine: dict[str, Any]) -> None:
    """In a batch, in chunks, and with prefixes of earlier requests."""
    spec = {"method": "mtp", "model": assistant(kind).folder, **options}
    llm = LLM(gemma4().folder, speculative_config=spec, max_num_batched_tokens=9, **engine)
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    for _ in range(2):
        assert texts(llm) == texts_without(**engine)
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(num_drafted) > 100


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["tied", "ordered"])
def test_greedy_texts_with_the_other_verifiers(kind: str, verifier: str) -> None:
    spec = {"method": "mtp", "model": assistant(kind).folder, "verifier": verifier}
    assert texts(LLM(gemma4().folder, speculative_config=spec))[:2] == texts_without()[:2]


def test_it_drafts_beside_a_lookup() -> None:
    spec = {"method": "mtp", "model": assistant().folder}
    members = {"method": "ensemble", "mode": "first", "members": [{"method": "ngram"}, spec]}
    llm = LLM(gemma4().folder, speculative_config=members)
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    assert texts(llm) == texts_without()
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(num_drafted) > 50


def test_texts_after_preemption() -> None:
    """The cache has no room for four requests at their ends."""
    folder, spec = gemma4().folder, {"method": "mtp", "model": assistant().folder}
    usual = LLM(folder, speculative_config=spec)
    room = 120 * usual.engine.memory_plan.kv_bytes_per_token
    tight = LLM(folder, speculative_config=spec, kv_cache_bytes=room, max_model_len=40)
    assert texts(tight) == texts_without()
    assert tight.engine.stats().num_preemptions > 0


def test_proposals_after_preemption_are_of_the_slots_that_a_text_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = gemma4().folder
    spec = {"method": "mtp", "model": assistant().folder, "draft_sample_method": "greedy"}
    room = 120 * LLM(folder, speculative_config=spec).engine.memory_plan.kv_bytes_per_token
    tight = LLM(folder, speculative_config=spec, kv_cache_bytes=room, max_model_len=40)
    drafter, first_slots = tight.engine.drafter, dict[str, set[int]]()
    propose = drafter.propose

    def compared(sequences: Seq[Sequence], budgets: Seq[int]) -> Any:
        made = propose(sequences, budgets)
        for sequence, proposal in zip(sequences, made, strict=True):
            if proposal.token_ids:
                slots = drafter.target_cache.accounting.slots(sequence.id)
                first_slots.setdefault(sequence.id, set()).add(int(slots[0]))
                expected = Reference("tied", sequence.token_ids).chain(len(proposal.token_ids))
                assert list(proposal.token_ids) == expected
        return made

    monkeypatch.setattr(drafter, "propose", compared)
    assert texts(tight) == texts_without()
    assert any(len(slots) > 1 for slots in first_slots.values())


def test_a_proposal_depends_on_the_text_alone() -> None:
    """After any verdict it is the one that is made of Transformers' code for the text as it is."""
    spec = {"method": "mtp", "model": assistant().folder, "draft_sample_method": "greedy"}
    llm = LLM(gemma4().folder, speculative_config=spec)
    engine, checked = llm.engine, 0
    engine.add_request("a", TEXT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.scheduler.running:
            (found,) = engine.drafter.propose([sequence], [3])
            assert list(found.token_ids) == Reference("tied", sequence.token_ids).chain(3)
            checked += 1
    assert checked > 4


ANSWERS = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)


@functools.cache
def allowed() -> tuple[SamplingParams, Distribution]:
    """A few tokens, of which an ordered assistant scores some; and the distribution of answers of these."""
    tokens = [token for token in range(VOCAB) if token % 40 == 3]
    params = dataclasses.replace(ANSWERS, allowed_token_ids=tokens[:4], top_k=3)
    return params, engine_distribution(LLM(gemma4().folder), TEXT, params)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize(
    "options", [{"num_speculative_tokens": 2}, FIXED, {**TREE, "num_draft_nodes": 4}], ids=str
)
@pytest.mark.parametrize("kind", ["tied", "ordered"])
def test_the_distribution_stays(kind: str, options: dict[str, Any], verifier: str) -> None:
    params, truth = allowed()
    spec = {"method": "mtp", "model": assistant(kind).folder, "verifier": verifier, **options}
    llm = LLM(gemma4().folder, speculative_config=spec)
    drafted: list[int] = []
    llm.engine.on_observe = lambda seen: drafted.extend(one.num_accepted for one in seen)
    assert len(truth) == 3**3
    assert total_variation(engine_distribution(llm, TEXT, params), truth) < 1e-5
    assert llm.engine.stats().num_draft_failures == 0
    assert any(drafted), "nothing was accepted, so little was shown"


@pytest.mark.parametrize(
    ("kind", "options", "verifier"),
    [
        *(("tied", *shape) for shape in (({}, "coupled"), (TREE, "coupled"), ({}, "rejection"))),
        *(("ordered", *shape) for shape in ((TREE, "coupled"), ({}, "rejection"), (FIXED, "block"))),
    ],
)
def test_it_conforms(kind: str, options: dict[str, Any], verifier: str) -> None:
    scene = [SamplingParams(temperature=temperature, seed=3) for temperature in (0.0, 0.9)]
    check_drafter(
        lambda: make(kind, verifier=verifier, **options),
        VOCAB,
        verifier=verifier,
        params=scene,
        max_len=24,
        num_sequences=3,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_what_it_holds(kind: str) -> None:
    drafter = make(kind)
    outlined = dataclasses.replace(
        drafter.context, target=None, target_outline=outline_model(gemma4().folder)
    )
    planned = MtpDrafter.footprint(drafter.options, outlined)
    assert planned.traits == drafter.traits
    assert planned.traits.kv_bytes_per_token == 0
    number = sum(weight.numel() for weight in assistant(kind).model.parameters())
    order = 8 * VOCAB if "ordered" in kind else 0  # a buffer, which is not counted as held
    # Held panels are as wide as 64 outputs.
    assert number * 4 + order <= planned.head_bytes <= drafter.memory_bytes() + order


def test_a_plan_counts_the_output_layer_that_is_not_packed() -> None:
    drafter = make("ordered", quantization="int8")
    outlined = dataclasses.replace(
        drafter.context, target=None, target_outline=outline_model(gemma4().folder)
    )
    planned = MtpDrafter.footprint(drafter.options, outlined).head_bytes
    table = drafter.head.ordered.weight.nbytes
    assert table + 8 * VOCAB < planned <= drafter.memory_bytes() + 8 * VOCAB


def changed(tmp_path: Path, change: Any, kind: str = "tied") -> str:
    """A copy of an assistant with other tensors or another configuration."""
    folder = tmp_path / "changed"
    shutil.copytree(assistant(kind).folder, folder)
    tensors, file = load_file(folder / "model.safetensors"), folder / "config.json"
    config = json.loads(file.read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config))
    return str(folder)


QUERY = "model.layers.0.self_attn.q_proj.weight"
ORDER = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("tied", lambda t, c: t.pop(QUERY), rf"lacks the tensor {QUERY}"),
        ("tied", lambda t, c: t.pop("model.layers.2.layer_scalar"), r"lacks the tensor .*layer_scalar"),
        ("tied", lambda t, c: t.pop("model.embed_tokens.weight"), r"lacks the tensor model\.embed_tokens"),
        ("tied", lambda t, c: t.update(odd=torch.ones(2)), r"has an unknown tensor: odd"),
        (
            "tied",
            lambda t, c: t.update({QUERY: torch.ones(8, 24)}),
            r"q_proj\.weight of shape \[8, 24\], not \[32",
        ),
        (
            "tied",
            lambda t, c: c.update(backbone_hidden_size=48),
            r"for a target of hidden size 48 and 320 tokens",
        ),
        ("tied", lambda t, c: c["text_config"].update(vocab_size=64), r"hidden size 32 and 64 tokens"),
        (
            "ordered",
            lambda t, c: c.update(num_centroids=7),
            r"has 7 centroids for 320 tokens and scores those of 3",
        ),
        (
            "ordered",
            lambda t, c: c.update(centroid_intermediate_top_k=17),
            r"16 centroids .* scores those of 17",
        ),
        ("ordered", lambda t, c: t[ORDER].fill_(3), r"token_ordering that does not hold each token once"),
        ("ordered", lambda t, c: t.pop(ORDER), r"lacks the tensor masked_embedding\.token_ordering"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_told_by_name(
    kind: str, change: Any, told: str, tmp_path: Path
) -> None:
    spec = SpeculativeConfig("mtp", options={"model": changed(tmp_path, change, kind)})
    with pytest.raises(ModelError, match=told) as refused:
        create_drafter(spec, context(target()))
    assert "\n" not in str(refused.value)


def test_it_is_described_with_the_targets_that_it_fits() -> None:
    assert method_of(assistant("ordered").folder) == "mtp"
    head = HeadOnDisk(assistant("ordered").folder, "mtp")
    details = head.details()
    found = {name: details[name] for name in ("target_hidden_size", "vocab_size", "num_layers")}
    assert found == {"target_hidden_size": HIDDEN, "vocab_size": VOCAB, "num_layers": 3}
    assert head.drafts_for(TargetFiles(gemma4().folder)) == "yes"
    assert "for a target of hidden size 32" in head.drafts_for(TargetFiles(EMBEDDED_TARGET))
    same_sizes = TargetFiles(gemma4().folder)
    same_sizes.config.layer_types = ["full_attention"] * 6
    assert "of type sliding_attention" in head.drafts_for(same_sizes)


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    lm = load_model(EMBEDDED_TARGET)

    def fit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["backbone_hidden_size"], config["text_config"]["vocab_size"] = lm.hidden_size, lm.vocab_size

    spec = SpeculativeConfig("mtp", options={"model": changed(tmp_path, fit)})
    with pytest.raises(
        ModelError, match=r"keys and values of a layer of type sliding_attention, and .* has none"
    ):
        create_drafter(spec, context(lm))


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden", "pre"), ("recycled", "y"), ("order", "he"), ("correction", "a.safetensors")],
)
def test_options_of_prediction_layers_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"mtp {option} is not for an assistant"):
        make("tied", **{option: value})

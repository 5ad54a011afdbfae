"""P-EAGLE heads compute what the speculators library computes, and the drafter drafts what they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.eagle_files import load_eagle, read_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.heads_native import NativeEagle
from slipstream.draft.heads.peagle import PEagleDrafter
from slipstream.errors import ConfigError, ModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup
from slipstream.tools.doctor.examination import kind_of
from slipstream.vllm_names import own_speculation
from tests.kit.head_drafters import target
from tests.kit.peagle_heads import MASK, peagle_folder, random_peagle
from tests.unit.draft.test_eagle import save

RECORDED = Path(__file__).parents[2] / "parity" / "recorded"
DEPTH = 5


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2)


def level_logits(head: EagleHead, embeds: Tensor, features: Tensor, mask: Tensor, depth: int) -> Tensor:
    """[depth, draft vocab], from the embeddings and features of committed rows, in one plain causal pass."""
    assert head.mask_hidden is not None
    embeds = torch.cat([embeds, mask.expand(depth - 1, -1)])
    features = torch.cat([features, head.mask_hidden[0].expand(depth - 1, -1)])
    positions = torch.arange(len(embeds))[None]
    return head.logits(head(embeds[None], head.encode(features)[None], positions, causal)[0, -depth:])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_speculators(name: str, tmp_path: Path) -> None:
    recorded = load_file(RECORDED / f"peagle_{name}.safetensors")
    tensors = {key.removeprefix("head."): each for key, each in recorded.items() if key.startswith("head.")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((RECORDED / f"peagle_{name}.json").read_text())
    table = tensors["embed_tokens.weight"]
    sizes = SimpleNamespace(
        hidden_size=16, vocab_size=30, num_layers=4, context_length=64, embed=lambda ids: 0 * table[ids]
    )
    head = read_eagle(str(tmp_path), sizes)
    assert kind_of(str(tmp_path)) == "peagle"
    assert head.embedding is not None
    assert head.config.mask_token_id is not None
    depth, errors = int(recorded["depth"].max()) + 1, []
    for anchor in range(1, len(recorded["tokens"]) - depth):
        rows = (recorded["anchor"] == anchor).nonzero()[:, 0]
        if len(rows) < depth:
            continue  # a level of it was left out by chance
        embeds = head.embedding[recorded["tokens"][: anchor + 1]]
        mask = head.embedding[head.config.mask_token_id]
        ours = level_logits(head, embeds, recorded["features"][: anchor + 1], mask, depth)
        errors.append(float((ours - recorded["logits"][rows]).detach().abs().max()))
    assert len(errors) > 2
    assert max(errors) <= 1e-4


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("options", [{"num_layers": 1}, {"num_layers": 3, "draft_vocab_size": 700}])
def test_survives_the_disk(options: dict[str, Any], layout: str, tmp_path: Path) -> None:
    head = random_peagle(**options)
    again = load_eagle(save(head, tmp_path, layout), target())
    assert again.config == head.config
    expected = head.state_dict()
    assert {name: each.tolist() for name, each in again.state_dict().items()} == {
        name: each.tolist() for name, each in expected.items()
    }
    assert kind_of(str(tmp_path)) == "peagle"


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_drafts_are_those_of_one_plain_pass(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy chains of a running engine, whatever was accepted before, against the module over text and masks."""
    if kernels == "torch":
        monkeypatch.setattr(NativeEagle, "refusal", lambda *_: "PyTorch is asked for")
    spec = {"method": "peagle", "model": peagle_folder(), "num_speculative_tokens": DEPTH}
    llm = LLM(speculative_config=spec, kv_cache_dtype="float32")
    drafter = llm.engine.drafter
    assert isinstance(drafter, PEagleDrafter)
    made: list[tuple[list[int], tuple[int, ...]]] = []
    propose = drafter.propose

    def noted(sequences: Any, budgets: Any) -> Any:
        proposals = propose(sequences, budgets)
        made.extend(
            (list(s.token_ids), p.token_ids) for s, p in zip(sequences, proposals, strict=True) if len(p)
        )
        return proposals

    monkeypatch.setattr(drafter, "propose", noted)
    llm.generate(["Show me", "SELECT name FROM table WHERE"], SamplingParams(temperature=0, max_tokens=8))
    assert len(made) > 8
    head, lm = load_eagle(peagle_folder(), target()), target()
    for token_ids, drafted in made:
        pool = KVPool(lm.shapes, len(token_ids), lm.dtype, lm.device)
        layers = head.config.feature_layers
        hidden = lm.forward([RowGroup(pool.slots, 0, token_ids, [])], pool, layers).hidden
        features = torch.cat([hidden[layer] for layer in layers], dim=-1)[:-1]
        embeds, mask = lm.embed(torch.tensor(token_ids[1:])), lm.embed(torch.tensor([MASK]))
        logits = level_logits(head, embeds, features, mask, len(drafted))
        assert list(drafted) == head.draft_token_ids[logits.argmax(-1)].tolist()


PROMPTS = ["Show me the command tar.", "SELECT name FROM", "def add(a, b):"]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize(
    "options", [{"tree_top_k": 1, "num_draft_nodes": None}, {"tree_top_k": 3, "num_draft_nodes": 10}]
)
def test_texts_are_those_of_the_target(method: str, options: dict[str, Any]) -> None:
    """Of a head of two layers in one pass, and of the same one level by level."""
    params = [SamplingParams(temperature=t, max_tokens=16, seed=3) for t in (0.0, 0.9, 0.7)]
    expected = [each.outputs[0].token_ids for each in LLM().generate(PROMPTS, params)]
    llm = LLM(speculative_config={"method": method, "model": peagle_folder(), **options}, max_num_seqs=2)
    for _ in range(2):  # the second time with reused prefixes
        answers = llm.generate(PROMPTS, params)
        assert [each.outputs[0].token_ids for each in answers] == expected
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0


def test_it_is_found_by_its_configuration_and_by_vllms_name() -> None:
    given = {"method": "eagle3", "model": peagle_folder(), "parallel_drafting": True}
    assert own_speculation(given) == {"method": "peagle", "model": peagle_folder()}
    assert own_speculation({"model": peagle_folder()})["method"] == "peagle"
    assert SpeculativeConfig.from_short(f"peagle:{peagle_folder()}").method == "peagle"


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda t, c: t.pop("mask_hidden"), "names a mask token and has no tensor mask_hidden"),
        (
            lambda t, c: c.pop("mask_token_id"),
            "is a P-EAGLE head, and its configuration has no mask_token_id",
        ),
        (
            lambda t, c: c.update(mask_token_id=4096),
            "mask token 4096 is outside the target's vocabulary of 4096",
        ),
        (lambda t, c: t.update(mask_hidden=torch.zeros(1, 1, 7)), r"tensor mask_hidden is \[1, 1, 7\]"),
        (lambda t, c: t.pop("layers.1.mlp.up_proj.weight"), "missing layers.1.mlp.up_proj.weight"),
        (lambda t, c: c["transformer_layer_config"].update(num_hidden_layers=1), "unknown layers.1"),
        (
            lambda t, c: c["transformer_layer_config"].update(model_type="gemma"),
            "layers of the family 'gemma'",
        ),
        (lambda t, c: c.update(speculators_model_type="mlp"), "is a 'mlp' speculator"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(break_it: Any, complaint: str, tmp_path: Path) -> None:
    save(random_peagle(draft_vocab_size=700), tmp_path, "speculators")
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    break_it(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=complaint):
        load_eagle(str(tmp_path), target())


def test_a_head_without_masks_is_refused(tmp_path: Path) -> None:
    save(random_peagle(mask_token_id=None), tmp_path, "speculators")
    with pytest.raises(ModelError, match=r"was not trained to read mask tokens.*; run it as eagle3"):
        LLM(speculative_config={"method": "peagle", "model": str(tmp_path)})
    with pytest.raises(ConfigError, match="peagle has no correction"):
        LLM(speculative_config={"method": "peagle", "model": str(tmp_path), "correction": "layer"})

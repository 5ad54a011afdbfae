"""EAGLE heads: drafting computes what training trained, true features replace estimates, checkpoints are strict."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.base import DraftContext
from slipstream.draft.heads.eagle import Eagle1Drafter, Eagle3Drafter, EagleDrafter, EagleOptions
from slipstream.draft.heads.eagle_files import load_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from slipstream.draft.heads.heads_native import NativeEagle
from slipstream.errors import ConfigError, ModelError
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models import CausalLM, RowGroup, load_model, load_tokenizer
from slipstream.models.batch import ForwardBatch
from slipstream.testing.stub_drafters import draft_context
from slipstream.train.batches import TargetScores
from slipstream.train.eagle_loss import TargetText, training_time_test

VOCAB = 4096


@functools.cache
def target() -> CausalLM:
    return load_model(EMBEDDED_TARGET)


def random_head(version: int = 3, draft_vocab: int = VOCAB, seed: int = 0, **options: Any) -> EagleHead:
    torch.manual_seed(seed)
    layers = default_feature_layers(6) if version == 3 else (6,)
    sizes = {"hidden_size": 320, "intermediate_size": 200, "num_attention_heads": 5, "num_key_value_heads": 5}
    config = EagleConfig(
        version=version,
        target_hidden_size=320,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        head_dim=64,
        feature_layers=layers,
        **sizes,
        **options,
    )
    head = EagleHead(config)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    if draft_vocab < VOCAB:
        head.draft_token_ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
    return head.eval().requires_grad_(False)


def save(head: EagleHead, folder: Path, layout: str | None = None) -> str:
    layout = layout or ("eagle" if head.config.version == 1 else "eagle3")
    save_eagle(head, folder, target="embedded", layout=layout)
    return str(folder)


def make(folder: str, verifier: str = "coupled", **options: Any) -> EagleDrafter:
    stub = draft_context(VOCAB, 512, verifier, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    known = {name: getattr(stub, name) for name in DraftContext.__dataclass_fields__} | {"target": target()}
    return EagleDrafter(EagleOptions(model=folder, **options), DraftContext(**known))


HEADS: dict[str, dict[str, Any]] = {
    "eagle-1": {"version": 1, "fc_bias": True},
    "eagle-3": {"version": 3},
    "pruned": {"version": 3, "draft_vocab": 700, "norm_before_residual": True},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_survives_the_disk(kind: str, layout: str, tmp_path: Path) -> None:
    head = random_head(**HEADS[kind])
    again = load_eagle(save(head, tmp_path, "eagle" if head.config.version == 1 else layout), target())
    assert again.config == head.config
    expected = head.state_dict()
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in expected.items()
    }


def features_of(token_ids: list[int], head: EagleHead) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's features [n, taps * hidden] and logits [n, vocab] of a whole text."""
    model = target()
    layers = head.config.feature_layers
    pool = KVPool(model.shapes, len(token_ids), model.dtype, model.device)
    out = model.forward([RowGroup(pool.slots, 0, token_ids, range(len(token_ids)))], pool, layers)
    return torch.cat([out.hidden[layer] for layer in layers], dim=-1), out.logits


def noted_logits(head: EagleHead, seen: list[torch.Tensor], monkeypatch: Any) -> None:
    """Keep all logits that `head` computes."""
    compute = EagleHead.logits if head.config.version == 3 else lambda _, state: target().project(state)

    def noted(self: EagleHead, state: torch.Tensor) -> torch.Tensor:
        seen.append(compute(self, state))
        return seen[-1]

    monkeypatch.setattr(EagleHead, "logits", noted)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", HEADS)
def test_drafting_computes_what_training_trained(
    kind: str, kernels: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Greedy chains of the engine's drafter against the training-time test on the text plus those very guesses."""
    if kernels == "torch":
        monkeypatch.setattr(NativeEagle, "refusal", lambda *_: "PyTorch is asked for")
    head = random_head(**HEADS[kind])
    depth = 1 if head.config.version == 1 else 4
    folder = save(head, tmp_path)
    spec = {
        "method": "eagle" if kind == "eagle-1" else "eagle3",
        "model": folder,
        "num_speculative_tokens": depth,
        "tree_top_k": 1,
        "num_draft_nodes": None,
        "draft_sample_method": "greedy",
    }
    llm = LLM(speculative_config=spec)
    drafter = llm.engine.drafter
    assert isinstance(drafter, EagleDrafter)
    proposals: list[tuple[list[int], tuple[int, ...]]] = []
    propose = drafter.propose

    def noted(sequences: Any, budgets: Any) -> Any:
        made = propose(sequences, budgets)
        proposals.extend(
            (list(s.token_ids), p.token_ids) for s, p in zip(sequences, made, strict=True) if len(p) == depth
        )
        return made

    monkeypatch.setattr(drafter, "propose", noted)
    llm.generate(["Show me", "SELECT name FROM table WHERE"], SamplingParams(temperature=0, max_tokens=12))
    assert len(proposals) > 8
    for token_ids, guesses in proposals:
        text = [*token_ids, *guesses]
        features, logits = features_of(text, head)
        seen: list[torch.Tensor] = []
        noted_logits(head, seen, monkeypatch)

        # Only the draft from the last committed token is looked at: learn from its rows alone.
        learns = torch.zeros(1, len(text), dtype=torch.bool)
        learns[0, len(token_ids) - 1 :] = True
        scores = TargetScores.of(logits[len(token_ids) - 1 :], head.draft_token_ids)
        known = scores._replace(
            top=head.draft_token_ids[scores.logits.argmax(dim=-1)]
        )  # so that each row counts
        training_time_test(
            head,
            TargetText(
                target().embed(torch.tensor([text])),
                features[None],
                torch.arange(len(text))[None],
                torch.zeros(1, len(text), dtype=torch.long),
                learns,
            ),
            known,
            lambda state: head.logits(state),
            num_steps=depth,
        )
        made = [int(head.draft_token_ids[rows[0].argmax()]) for rows in seen]
        assert made == list(guesses)


def test_true_features_replace_the_heads_estimates(tmp_path: Path) -> None:
    """After any verdict a proposal is the one that a drafter makes which meets the text for the first time."""
    folder = save(random_head(), tmp_path)
    spec = {
        "method": "eagle3",
        "model": folder,
        "num_speculative_tokens": 3,
        "tree_top_k": 2,
        "num_draft_nodes": 6,
    }
    llm = LLM(speculative_config=spec, enable_prefix_caching=False)
    engine = llm.engine
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    rng = random.Random(0)
    engine.add_request(
        "a",
        [rng.randrange(6, VOCAB) for _ in range(30)],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    )
    checked = 0
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.scheduler.running:
            first = drafter.propose([sequence], [6])[0]
            if sequence.id in drafter.cache.accounting:
                drafter.cache.accounting.close(sequence.id, retain=False)
            anew = drafter.propose([sequence], [6])[0]
            assert first.token_ids == anew.token_ids
            checked += len(first) > 0
    assert checked > 10


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda t, c: t.pop("midlayer.mlp.up_proj.weight"), "missing midlayer.mlp.up_proj.weight"),
        (lambda t, c: t.update({"extra.weight": torch.zeros(2)}), "unknown extra.weight"),
        (lambda t, c: t.update({"norm.weight": torch.zeros(7)}), r"tensor norm.weight is \[7\]"),
        (lambda t, c: t.pop("fc.weight"), "not an EAGLE head"),
        (lambda t, c: t.pop("d2t"), "has no tensor d2t"),
        (lambda t, c: t.update({"d2t": t["d2t"] + 5000}), "is not a one-to-one map into the target's"),
        (lambda t, c: t.update({"t2d": ~t["t2d"]}), "name different tokens"),
        (lambda t, c: c.update({"target_hidden_size": 512}), "for a target with a hidden size of 512"),
        (lambda t, c: c.update({"vocab_size": 32000}), "vocabulary of 32000"),
        (
            lambda t, c: c["eagle_config"].update({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}),
            "has 6 layers",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(break_it: Any, complaint: str, tmp_path: Path) -> None:
    save(random_head(draft_vocab=700), tmp_path)
    tensors, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    break_it(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=complaint):
        load_eagle(str(tmp_path), target())


def test_an_embedding_of_its_own_is_read_and_the_targets_own_is_not_kept_twice(tmp_path: Path) -> None:
    save(random_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = target().embed(torch.arange(VOCAB))
    save_file({**tensors, "embed_tokens.weight": table.half()}, tmp_path / "model.safetensors")
    assert load_eagle(str(tmp_path), target()).embedding is None
    save_file({**tensors, "embed_tokens.weight": table + 1}, tmp_path / "model.safetensors")
    own = load_eagle(str(tmp_path), target()).embedding
    assert own is not None
    assert torch.equal(own, table + 1)
    other = table.clone()
    other[777] += 0.015  # one row, and by little
    save_file({**tensors, "embed_tokens.weight": other}, tmp_path / "model.safetensors")
    drafter = make(str(tmp_path))
    assert drafter.head.embedding is not None
    without = make(save(random_head(), tmp_path / "plain"))
    assert drafter.weight_bytes() - without.weight_bytes() == table.nbytes


def test_a_method_takes_heads_of_its_version(tmp_path: Path) -> None:
    made = make(save(random_head(), tmp_path))
    Eagle3Drafter(made.options, made.context)
    with pytest.raises(ConfigError, match="EAGLE-3 head; use method 'eagle3'"):
        Eagle1Drafter(made.options, made.context)


def test_int8_weights_are_half_and_guess_alike(tmp_path: Path) -> None:
    folder = save(random_head(), tmp_path)
    full, small = make(folder), make(folder, quantization="int8")
    assert 0.4 < small.weight_bytes() / full.weight_bytes() < 0.6
    with pytest.raises(ConfigError, match="int3"):
        make(folder, quantization="int3")
    agree = first_guesses(full) == first_guesses(small)
    assert float(agree.float().mean()) > 0.9


def first_guesses(drafter: EagleDrafter) -> torch.Tensor:
    """int64 [64]: the most probable token of each row, where rows have nothing to do with each other."""
    features = torch.randn(64, 3 * 320, generator=torch.Generator().manual_seed(0))
    rows = ForwardBatch([RowGroup(range(row, row + 1), 0, [row + 9], [0]) for row in range(64)])
    pool = KVPool([LayerShape(5, 64, 64)], 64, torch.float32, torch.device("cpu"))
    return drafter.executor.forward(rows, pool, features, level=0)[1].argmax(-1)

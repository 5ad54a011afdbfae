"""PARD-2 in training: a draft model that reads the target's states learns what the engine drafts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from slipstream import LLM, SamplingParams
from slipstream.draft.model.pard import PardDrafter
from slipstream.errors import ConfigError, ModelError, VocabularyMismatchError
from slipstream.train import pard, target_states
from slipstream.train.batches import Cursor, TrainingBatch, TrainingDocument, make_batch, pack, row_batches
from slipstream.train.distillation import make_draft
from slipstream.train.evaluation import Evaluator
from slipstream.train.features import FeatureCache
from slipstream.train.mask_chains import ChainRows, mask_chains
from slipstream.train.options import DistillOptions, PardTrainOptions, TrainOptions
from slipstream.train.pard import PardStudent, gold_log_probabilities
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Trainer

LENGTH, DEPTHS = 48, 4

Documents = list[TrainingDocument]


def student(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: Documents, **options: Any
) -> PardStudent:
    options = {"num_depths": DEPTHS, **options}
    if "init" not in options:
        options = {"shape": "1x32", "feature_layers": "-1,1", **options}
    return PardStudent(PardTrainOptions(**options), target, tokenizer, documents, seed=0)


def shaken(made: PardStudent) -> PardStudent:
    """With a projection that does something, and weights that a file in float16 keeps."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.copy_(parameter.half())
        states = made.module.get_submodule("states.layer")
        assert isinstance(states.weight, Tensor)
        states.weight.normal_(std=0.1)
    return made


def batch_of(target: FrozenTarget, documents: Documents, made: PardStudent, **more: Any) -> TrainingBatch:
    rows = next(row_batches(documents, 4, LENGTH, 0, 0, Cursor()))
    return make_batch(rows, target, made.feature_layers, **more)


def behind(length: int, num_drafted: int) -> ChainRows:
    """The rows of a text of `length` tokens, and of one chain of masks behind it."""
    depths = torch.tensor([0] * length + [*range(1, num_drafted)])
    places = torch.arange(len(depths)).clamp(max=length - 1)
    seen = torch.ones(len(places), len(places), dtype=torch.bool).tril()
    return ChainRows(0, places, depths, seen, torch.arange(length - 1, len(places)))


def test_the_engine_drafts_with_the_logits_of_training(
    tiny: str,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_states, "LOST_SHARE", 0.0)
    made = shaken(student(target, tokenizer, documents))
    made.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written | {
        "pard2": True, "spd_type": "pard2", "pard2_target_layers": [-1, 1], "pard2_scale": 0.02,
        "pard2_proj_bias": False, "pard2_target_dim": 64, "pard_token": made.mask,
    } == written  # fmt: skip
    spec = made.speculative_config(tmp_path).options | {"method": "pard"}
    llm = LLM(tiny, speculative_config=spec, kv_cache_dtype="float32")
    drafter = llm.engine.drafter
    assert isinstance(drafter, PardDrafter)
    assert drafter.traits.feature_layers == tuple(made.feature_layers) == (3, 1)
    drafted: list[tuple[list[int], Tensor]] = []
    propose, forward, logits = drafter.propose, drafter.model.forward, []

    def noted_pass(*given: Any, **more: Any) -> Any:
        output = forward(*given, **more)
        logits.append(output.logits)
        return output

    def noted(sequences: Any, budgets: Any) -> Any:
        proposals = propose(sequences, budgets)
        drafted.extend(
            (list(one.token_ids), logits[-1]) for one, p in zip(sequences, proposals, strict=True) if len(p)
        )
        return proposals

    monkeypatch.setattr(drafter.model, "forward", noted_pass)
    monkeypatch.setattr(drafter, "propose", noted)
    for prompt in ("What is 3 + 4?", "SELECT name FROM", "def add(a, b):"):
        llm.generate([prompt], SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True))
    assert [len(ours) for _, ours in drafted].count(DEPTHS) > 5
    for text, ours in drafted:
        tokens = np.array(text)
        one = [TrainingDocument("", tokens, tokens >= 0)]
        packed = pack(one, len(text), 0, np.random.default_rng(0))
        batch = make_batch(packed, target, made.feature_layers)
        with torch.no_grad():
            assert torch.allclose(made.logits(batch, behind(len(text), len(ours))), ours, atol=1e-4)


def test_a_token_counts_as_much_as_the_target_says_those_before_it(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss against sums over one row after another, for a target that is fairly sure of the texts."""
    made = shaken(student(target, tokenizer, documents))
    batch = batch_of(target, documents, made)
    log_p = batch.target_logits.log_softmax(dim=-1)
    gold = gold_log_probabilities(batch.target_logits[0, :-1], batch.token_ids[0, 1:])
    assert torch.allclose(gold, log_p[0, :-1].gather(-1, batch.token_ids[0, 1:, None])[:, 0], atol=1e-4)
    sure = torch.rand(batch.token_ids.shape, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.4
    monkeypatch.setattr(pard, "gold_log_probabilities", lambda *given: sure[batch.loss_mask].log())
    total, counts, deepest = 0.0, 0.0, 0
    for rows in mask_chains(batch.documents, batch.loss_mask, made.options, [0, 0]):
        with torch.no_grad():
            log_q = made.logits(batch, rows).log_softmax(dim=-1)
        for number, row in enumerate(rows.learned.tolist()):
            place, depth = int(rows.places[row]), int(rows.depths[row])
            count = float(sure[rows.row, place : place + depth].prod())
            p, q = log_p[rows.row, place + depth], log_q[number]
            text = batch.token_ids[rows.row, place + depth + 1]
            total += count * float(-0.1 * q[text] + (p.exp() * (p - q)).sum())
            counts += count
            deepest += depth == DEPTHS - 1
    assert deepest > 10
    loss, _ = made.loss(batch)
    assert float(loss.detach()) == pytest.approx(total / counts, rel=1e-5)


def test_some_texts_are_read_without_states(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of a text or none; the first token of each reads none."""
    made = shaken(student(target, tokenizer, documents))
    states = made.module.get_submodule("states")
    batch = batch_of(target, documents, made)
    kept = []
    for step in range(40):
        for rows in mask_chains(batch.documents, batch.loss_mask, made.options, [step]):
            has_states = states(batch, rows, [step, rows.row]).abs().sum(dim=-1) > 0
            begins = batch.positions[rows.row][rows.places] == 0
            assert not has_states[begins].any()
            of = batch.documents[rows.row][rows.places]
            for number in of.unique():
                found = has_states[(of == number) & ~begins]
                assert found.all() or not found.any()
                kept.append(bool(found.all()))
    assert 0.75 < sum(kept) / len(kept) < 0.85
    monkeypatch.setattr(target_states, "LOST_SHARE", 1.0)
    rows = next(mask_chains(batch.documents, batch.loss_mask, made.options, [0]))
    with_states = made.logits(batch, rows)
    torch.nn.init.zeros_(states.layer.weight)  # type: ignore[arg-type]
    assert torch.equal(made.logits(batch, rows), with_states)


def test_a_fresh_projection_changes_nothing_and_a_trained_one_is_kept(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: Documents, tmp_path: Path
) -> None:
    plain = student(target, tokenizer, documents, feature_layers=None)
    fresh = student(target, tokenizer, documents)
    assert plain.options.losses == {"hard": 1.0}
    assert fresh.options.losses == {"hard": 0.1, "forward_kl": 1.0}
    batch = batch_of(target, documents, fresh)
    rows = next(mask_chains(batch.documents, batch.loss_mask, fresh.options, [0]))
    assert torch.equal(fresh.logits(batch, rows), plain.logits(batch, rows))
    trained = shaken(fresh)
    trained.save(tmp_path)
    again = student(target, tokenizer, documents, init=str(tmp_path))
    assert again.feature_layers == trained.feature_layers
    assert again.mask == trained.mask
    assert torch.equal(again.logits(batch, rows), trained.logits(batch, rows))


def test_states_that_are_kept_on_disk_are_learned_from(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: Documents, tmp_path: Path
) -> None:
    """Also where the bound holds a part of the data."""
    made = shaken(student(target, tokenizer, documents))
    tokens = [document.tokens for document in documents]
    num_tokens = sum(map(len, tokens))
    whole = num_tokens * (2 * 2 * target.hidden_size + 8)
    computed, _ = made.loss(batch_of(target, documents, made))
    for bound in (None, whole // 2):
        cache = FeatureCache(tmp_path / str(bound), target, tokens, made.feature_layers, bound)
        assert cache.layers == [1, 3]
        assert cache.fill()
        assert (cache.num_tokens == num_tokens) == (bound is None)
        kept, _ = made.loss(batch_of(target, documents, made, features=cache))
        assert float(kept.detach()) == pytest.approx(float(computed.detach()), rel=1e-3)


@pytest.fixture(scope="module")
def taught(
    tiny: str,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """The tiny target after a few steps on the data, so that its answers have something to learn."""
    model = LlamaForCausalLM.from_pretrained(tiny)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    rows = torch.stack([torch.from_numpy(np.resize(document.tokens, LENGTH)) for document in documents])
    for step in range(60):
        some = rows[step * 8 % 40 :][:8]
        model(input_ids=some, labels=some).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("taught")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_it_learns_is_accepted(
    taught: str, tokenizer: PreTrainedTokenizerBase, documents: Documents, data: Path, tmp_path: Path
) -> None:
    """The loss falls, and the engine accepts more than at the start, also of what is drafted behind masks."""
    target = FrozenTarget(taught, torch.device("cpu"), torch.float32)
    made = student(target, tokenizer, documents)
    evaluator = Evaluator(taught, str(data), prompts_per_task=12, max_tokens=12)
    made.save(tmp_path / "start")
    before = evaluator.evaluate(made.speculative_config(tmp_path / "start"))
    options = TrainOptions(
        max_tokens=30_000, batch_rows=4, row_length=LENGTH, learning_rate=5e-3, log_every_s=0.0
    )
    Trainer(made, target, documents, 0, options, tmp_path / "run", {}).run()
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in logged if "loss" in row]
    after = evaluator.evaluate(made.speculative_config(tmp_path / "run" / "pard"))
    assert losses[-1] < 0.8 * losses[0]
    assert made.module.state_dict()["states.layer.weight"].any()
    assert after.greedy.tau > before.greedy.tau + 0.2
    assert after.sampled.tau > before.sampled.tau + 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"feature_layers": "-1,-5"},
            r"from 0 to 3, or from -4 to -1, of a target with 3 layers; got -1, -5",
        ),
        ({"feature_layers": "4"}, r"of a target with 3 layers; got 4"),
        ({"feature_layers": "last"}, "--feature-layers takes numbers separated by commas, got 'last'"),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(
    options: dict[str, Any],
    message: str,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
) -> None:
    with pytest.raises(ConfigError, match=message):
        student(target, tokenizer, documents, **options)


def test_models_that_do_not_fit_are_refused(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: Documents, tmp_path: Path
) -> None:
    made = student(target, tokenizer, documents)
    made.save(tmp_path / "pard2")
    init = str(tmp_path / "pard2")
    with pytest.raises(ConfigError, match=r"is a PARD-2 model and keeps .* omit --feature-layers"):
        student(target, tokenizer, documents, init=init, feature_layers="-1")
    with pytest.raises(ConfigError, match=r"is a PARD-2 model, .* go on from it with `train pard`"):
        make_draft(DistillOptions(init=init), target, 0)
    file = tmp_path / "pard2" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"pard2_target_layers": [-1, -9]}))
    with pytest.raises(ModelError, match=r"reads hidden states \[-1, -9\], but the target has 3 layers"):
        student(target, tokenizer, documents, init=init)
    file.write_text(json.dumps(config))
    (tmp_path / "pard2" / "warp_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no weights: none of warp_model.bin"):
        student(target, tokenizer, documents, init=init)
    made.model.config.vocab_size -= 1
    made.model.resize_token_embeddings(made.model.config.vocab_size)
    made.save(tmp_path / "other")
    with pytest.raises(VocabularyMismatchError):
        student(target, tokenizer, documents, init=str(tmp_path / "other"))

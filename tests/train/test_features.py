"""The target's features on disk: as computed, within a bound, continued after a stop, of one target and its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingBatch, TrainingDocument, make_batch, pack
from slipstream.train.eagle import EagleStudent
from slipstream.train.features import FeatureCache
from slipstream.train.options import EagleTrainOptions, TrainOptions
from slipstream.train.target import FrozenTarget

CPU = torch.device("cpu")
LENGTH = 48


def cache(
    folder: Path,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    layers: tuple[int, ...] = (1,),
    max_bytes: int | None = None,
) -> FeatureCache:
    return FeatureCache(folder, target, [document.tokens for document in documents], layers, max_bytes)


def batch_of(
    target: FrozenTarget, documents: list[TrainingDocument], features: FeatureCache | None = None
) -> TrainingBatch:
    return make_batch(pack(documents, LENGTH, 0, np.random.default_rng(0)), target, [1], features)


def assert_equal_states(batch: TrainingBatch, fresh: TrainingBatch) -> None:
    real = fresh.documents >= 0
    for layer in (1, 3):
        torch.testing.assert_close(
            batch.hidden_states[layer][real], fresh.hidden_states[layer][real], rtol=2e-3, atol=2e-3
        )


def bytes_of(num_tokens: int, all_tokens: int, target: FrozenTarget) -> int:
    """What `num_tokens` with two layers take, and the tops of `all_tokens`."""
    return num_tokens * 2 * 2 * target.hidden_size + 8 * all_tokens


def test_what_is_kept_is_what_the_target_computes(
    target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    assert cache(tmp_path, target, documents).fill()
    again = cache(tmp_path, target, documents)
    assert again.is_complete
    assert_equal_states(batch_of(target, documents, again), batch_of(target, documents))


@pytest.mark.parametrize("part", [0, 0.1, 0.5, 0.97])
def test_what_does_not_fit_the_bound_is_computed_anew(
    part: float, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    total = sum(len(document.tokens) for document in documents)
    bound = bytes_of(int(part * total), total, target)
    kept = cache(tmp_path, target, documents, max_bytes=bound)
    kept.fill()
    assert part * total - LENGTH < kept.num_tokens <= part * total
    assert sum(file.stat().st_size for file in tmp_path.glob("*.*") if file.suffix != ".json") <= bound + 1
    assert_equal_states(batch_of(target, documents, kept), batch_of(target, documents))


def test_a_stopped_computation_continues_where_it_was(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.train.features._PASS_TOKENS", 100)
    computed: list[int] = []
    ask = target.hidden_states

    def noted(token_ids: Any, *others: Any) -> Any:
        computed.append(len(token_ids))
        return ask(token_ids, *others)

    monkeypatch.setattr(target, "hidden_states", noted)
    first = cache(tmp_path, target, documents)
    assert not first.fill(stop=lambda: len(computed) == 3)
    killed = cache(tmp_path, target, documents)

    def die(done: int, total: int) -> None:
        if len(computed) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.fill(die, save_every_s=0.0)
    before = sum(computed[:5])  # the sixth was computed, but not noted
    assert not killed.is_complete
    computed.clear()
    last = cache(tmp_path, target, documents)
    assert last.fill()
    assert before + sum(computed) == len(documents)
    monkeypatch.undo()
    assert_equal_states(batch_of(target, documents, last), batch_of(target, documents))


def test_features_of_something_else_are_refused(
    tiny: str,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    cache(kept, target, documents, (1, 2)).fill()
    assert cache(kept, target, documents, (2,)).is_complete, "fewer layers are read from what is there"
    written = (kept / "features.f16").read_bytes()
    with pytest.raises(ConfigError, match="holds features of another data; delete it"):
        cache(kept, target, documents[::-1])
    with pytest.raises(ConfigError, match=r"another layers: \[1, 2, 3\], not \[0, 3\]"):
        cache(kept, target, documents, (0,))
    with pytest.raises(ConfigError, match="another number of tokens within the bound"):
        cache(kept, target, documents, max_bytes=20_000)
    with pytest.raises(
        ConfigError, match=r"another type of matrix products: torch\.float32, not torch\.bfloat16"
    ):
        cache(kept, FrozenTarget(tiny, CPU, torch.bfloat16), documents)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="another target"):
        cache(kept, FrozenTarget(str(tmp_path / "other"), CPU, torch.float32), documents)
    assert (kept / "features.f16").read_bytes() == written
    (kept / "features.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not describe features"):
        cache(kept, target, documents)


def test_the_whole_vocabulary_is_computed_once_for_a_token(
    target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache the scores of a small vocabulary are those without, and later need no other logits."""
    kept = cache(tmp_path, target, documents)
    kept.fill()
    fresh, batch = batch_of(target, documents), batch_of(target, documents, kept)
    some = torch.arange(5, 400, 7)
    where = batch.loss_mask
    expected = fresh.target_scores_at(where, some)
    logits = fresh.target_logits_at(where)
    assert torch.equal(expected.top, logits.argmax(-1))
    torch.testing.assert_close(expected.log_total, logits.logsumexp(-1))
    first = batch.target_scores_at(where, some)
    project = target.project

    def of_some(hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        assert token_ids is not None, "the whole vocabulary"
        return project(hidden, token_ids)

    monkeypatch.setattr(target, "project", of_some)
    reopened = batch_of(target, documents, cache(tmp_path, target, documents))
    for scores in (first, batch.target_scores_at(where, some), reopened.target_scores_at(where, some)):
        assert (scores.top == expected.top).float().mean() > 0.99  # float16 may turn a tie
        torch.testing.assert_close(scores.log_total, expected.log_total, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(scores.logits, expected.logits, rtol=2e-2, atol=2e-2)


def test_a_head_with_a_small_vocabulary_learns_the_same_with_a_cache(
    target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    options = EagleTrainOptions(draft_vocab_size=40, num_steps=2, feature_layers="0,1,2")
    student = EagleStudent(options, target, documents, 3, seed=0)
    kept = cache(tmp_path, target, documents, (0, 1, 2))
    kept.fill()
    rows = pack(documents, LENGTH, 0, np.random.default_rng(0))
    losses = [
        float(student.loss(make_batch(rows, target, (0, 1, 2), features))[0].detach())
        for features in (None, kept, kept)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == losses[1]


def test_a_bound_needs_a_cache() -> None:
    with pytest.raises(ConfigError, match="bounds what --cache-features keeps"):
        TrainOptions(max_tokens=1, feature_cache_bytes=5)


def test_runs_share_a_folder_of_features(tiny: str, data: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    common = f"{tiny} --data {data} --max-tokens 100 --batch-rows 2 --row-length 48 --cache-features"
    evaluation = "--eval-prompts-per-task 1 --eval-max-tokens 4"
    for method in ("eagle3", "medusa"):
        command = (
            f"train {method} {common} {evaluation} --output {tmp_path / method} --feature-folder {shared}"
        )
        result = CliRunner().invoke(app, [*command.split(), "--feature-cache-bytes", "1MiB"])
        assert result.exit_code == 0, result.output
    assert json.loads((shared / "features.json").read_text())["identity"]["layers"] == [1, 2, 3]
    assert not (tmp_path / "medusa/features").exists()

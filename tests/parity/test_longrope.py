"""LongRoPE at its full context: one set of frequencies for all texts, chosen once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import VOCAB, randomise

from slipstream.config import EngineConfig
from slipstream.engine.memory import plan_memory
from slipstream.engine.target import check_same_target
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.longrope import resolve_frequencies

ORIGINAL, FULL = 16, 64
LONG = [(13 * i * i + 7 * i + 1) % VOCAB for i in range(40)]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": FULL,
    "original_max_position_embeddings": ORIGINAL,
    "pad_token_id": 0,
    "eos_token_id": None,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "phi3"
    model = tf.Phi3ForCausalLM(tf.Phi3Config(**SHAPE))
    randomise(model)
    model.save_pretrained(path)
    return path


def ours(lm: CausalLM, text: list[int]) -> torch.Tensor:
    pool = KVPool(lm.shapes, len(text), lm.dtype, lm.device)
    chunks = [
        RowGroup(pool.slots, begin, text[begin : begin + 8], range(len(text[begin : begin + 8])))
        for begin in range(0, len(text), 8)
    ]
    return torch.cat([lm.forward([chunk], pool).logits for chunk in chunks])


@torch.inference_mode()
def theirs(folder: Path, text: list[int]) -> torch.Tensor:
    model = tf.AutoModelForCausalLM.from_pretrained(folder).eval()
    logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    return logits


def test_within_the_original_length_by_default_and_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lm = load_model(str(folder))
    assert lm.context_length == ORIGINAL
    assert "texts may have 16 of the 64 tokens of its context" in caplog.text
    assert "max_model_len" in caplog.text
    torch.testing.assert_close(
        ours(lm, LONG[:ORIGINAL]), theirs(folder, LONG[:ORIGINAL]), atol=1e-4, rtol=1e-4
    )


def test_the_long_frequencies_where_a_longer_context_is_wanted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lm = load_model(str(folder), max_model_len=48)
    assert lm.context_length == FULL
    assert caplog.text == ""
    expected = theirs(folder, LONG)
    torch.testing.assert_close(ours(lm, LONG), expected, atol=1e-4, rtol=1e-4)
    # A short text is the beginning of a long one, not what the short frequencies make of it.
    short = ours(lm, LONG[:ORIGINAL])
    torch.testing.assert_close(short, expected[:ORIGINAL], atol=1e-4, rtol=1e-4)
    assert (short - theirs(folder, LONG[:ORIGINAL])).abs().max() > 0.1


@pytest.mark.parametrize("wanted", [None, 48])
def test_no_text_changes_anothers(folder: Path, wanted: int | None) -> None:
    lm = load_model(str(folder), max_model_len=wanted)
    alone = ours(lm, LONG[:ORIGINAL])
    pool = KVPool(lm.shapes, 2 * FULL, lm.dtype, lm.device)
    long = LONG if wanted else LONG[:ORIGINAL]
    both = lm.forward(
        [RowGroup(pool.slots, 0, LONG[:ORIGINAL], range(ORIGINAL)), RowGroup(pool.slots[FULL:], 0, long, [])],
        pool,
    )
    torch.testing.assert_close(both.logits, alone, atol=1e-4, rtol=1e-4)


def test_no_more_than_the_full_context(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_model_len=FULL + 1)
    lm = load_model(str(folder), max_model_len=FULL + 1)
    with pytest.raises(ConfigError, match="beyond the model's context of 64"):
        plan_memory(config, lm, 0, 0, 0)


def test_engines_that_share_a_target_share_its_frequencies(folder: Path) -> None:
    configs = [EngineConfig(model=str(folder), max_model_len=length) for length in (None, 8, 48, 60)]
    short, long = (load_model(str(folder), max_model_len=config.max_model_len) for config in configs[1:3])
    for lm, mine, asked in ((short, configs[0], configs[1]), (long, configs[2], configs[3])):
        check_same_target(lm, mine, asked)
        check_same_target(lm, asked, mine)
    for lm, mine, asked in ((short, configs[0], configs[2]), (long, configs[2], configs[1])):
        with pytest.raises(ConfigError, match="need the same of its two sets of frequencies, got max_model"):
            check_same_target(lm, mine, asked)


def test_frequencies_that_cannot_be_resolved_are_refused(folder: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    model.model.rotary_emb.rope_type = {"full_attention": "longrope"}  # as where layers have their own
    with pytest.raises(UnsupportedModelError, match="code of its own; set max_model_len to at most 16"):
        resolve_frequencies(model, FULL)


def test_a_rotation_that_still_changes_is_refused(tmp_path: Path) -> None:
    """PhiMoE scales by the longest text of a pass in code of its own."""
    rope = {**SHAPE["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.3}
    rope["original_max_position_embeddings"] = ORIGINAL
    config = tf.PhimoeConfig(**{**SHAPE, "rope_parameters": rope}, num_local_experts=2)
    model = tf.PhimoeForCausalLM(config)
    randomise(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="set max_model_len to at most 16"):
        load_model(str(tmp_path), max_model_len=48)

"""With `fast_prompts` the text is another one, and depends on nothing but the request."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig
from slipstream.engine.factory import create_engine
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model, loading
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.tools.audit.replaying import Replayer
from tests.kit.engines import MakeLLM, check_same_in_any_company, sampled_texts
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import gptq_folder

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_text_is_the_same_with_drafts_in_any_batch_after_reuse_and_preemption(
    make_llm: MakeLLM, prompts: list[list[int]], dtype: str
) -> None:
    check_same_in_any_company(make_llm, prompts, fast_prompts=True, dtype=dtype)


def test_an_answer_is_computed_anew_where_it_is_part_of_a_later_prompt(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    """Reuse ends where the earlier request's prompt did."""
    prompt = sorted(prompts, key=len)[12]
    llm = make_llm(fast_prompts=True)
    (answer,) = sampled_texts(llm, [prompt])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    fresh = make_llm(fast_prompts=True, enable_prefix_caching=False)
    for text, reused in (
        ([*prompt, *answer, *prompt[:20]], len(prompt) - 1),
        ([*prompt, *answer[:30]], len(prompt) + 29),  # of the turn before, all but its last row
        (prompt, len(prompt) - 1),
    ):
        (again,), (expected,) = llm.generate([text], params), fresh.generate([text], params)
        assert again.metrics.num_cached_tokens == reused
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert again.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


def logits_of(
    lm: CausalLM, text: list[int], chunks: list[int], num_fast: int, in_batch: bool
) -> torch.Tensor:
    """Return the logits of each row of `text`, computed in chunks, perhaps beside another text's rows."""
    cache = lm.new_cache(2 * 256, prefix_caching=False)
    begin, rows = 0, []
    for size in chunks:
        fast = min(max(num_fast - begin, 0), size)
        groups = [RowGroup(range(256), begin, text[begin : begin + size], range(size), num_fast=fast)]
        if in_batch:
            other = RowGroup(range(256, 512), begin, text[::-1][begin : begin + size], [], num_fast=size // 2)
            groups.insert(0, other)
        rows.append(lm.forward(groups, cache.pool).logits)
        begin += size
    return torch.cat(rows)


def test_a_rows_bits_do_not_depend_on_its_chunk_or_its_batch() -> None:
    lm = load_model(EMBEDDED_TARGET, fast_prompts=True)
    text = [(17 * i * i + 5 * i + 3) % 90 for i in range(110)]
    alone = logits_of(lm, text, [1] * 110, 80, in_batch=False)
    for chunks in ([110], [79, 1, 30], [37, 37, 36], [16] * 6 + [14]):
        assert torch.equal(logits_of(lm, text, chunks, 80, in_batch=True), alone)
    exact = logits_of(lm, text, [110], 0, in_batch=False)
    spread = (exact.max() - exact.min()).item()
    difference = (alone - exact).abs()
    assert 1e-4 < difference[:80].max() / spread < 0.03
    assert difference[80:].max() > 0, "the rows behind read what the fast ones have written"


def test_only_a_prompts_rows_but_its_last_are_fast(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """A prompt of one token has none."""
    fast, exact = make_llm(fast_prompts=True), make_llm()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    for prompt, same in (([prompts[0][0]], True), (prompts[0], False)):
        (one,), (other,) = fast.generate([prompt], params), exact.generate([prompt], params)
        assert (one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob) is same


def test_an_audit_scores_an_answer_by_the_rows_that_it_was_made_with(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(fast_prompts=True)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    answer = llm.generate([prompts[1]], params)[0].outputs[0]
    found = Replayer(llm.engine).replay(prompts[1], answer.token_ids, params, 0)
    assert found.chosen == list(answer.token_ids)
    assert answer.logprobs is not None
    own = [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert found.raw_log_probs.tolist() == pytest.approx(own, abs=1e-5)


@pytest.mark.usefixtures("own_weights")
def test_it_says_that_it_is_on(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipstream"):
        llm = make_llm(fast_prompts=True)
    assert llm.engine.model.runs_as.endswith(", prompts in bfloat16 (fast_prompts)")
    assert "text differs a little" in caplog.text
    assert ("no faster here" in caplog.text) is not native.has_bfloat16_tiles()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "kept in bfloat16 or float16, and this model's are int8"),
        ({"quantization": "int4"}, "kept in bfloat16 or float16, and this model's are int4"),
        ({"dtype": "float32"}, "and this model's are float32"),
        ({"cpu_kernels": "torch"}, "needs the native kernels"),
        ({"attention_backend": "packed"}, "needs the fused decoder"),
        ({"fast_prompts": 1}, "engine fast_prompts must be bool, got 1"),
    ],
)
def test_a_model_that_cannot_have_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"fast_prompts": True, **options})


def test_engines_of_one_target_have_it_all_or_none() -> None:
    engine = create_engine(EngineConfig(EMBEDDED_TARGET, kv_cache_bytes=2**24, fast_prompts=True))
    with pytest.raises(ConfigError, match="need one fast_prompts"):
        create_engine(replace(engine.config, fast_prompts=False), like=engine)


def test_weights_that_stay_quantised_are_refused(tmp_path: Path) -> None:
    """Whatever the others of the checkpoint are kept in."""
    folder = str(gptq_folder(tmp_path / "saved", EMBEDDED_TARGET, 32))
    with pytest.raises(ConfigError, match="kept in bfloat16 or float16, and this model's are GPTQ"):
        load_model(folder, fast_prompts=True)
    assert load_model(folder, fast_prompts=True, dtype="bfloat16").fast_prompts


def test_a_group_has_no_more_fast_rows_than_rows() -> None:
    """The kernels would write behind their arrays."""
    for num_fast in (-1, 4):
        with pytest.raises(ValueError, match=f"num_fast of {num_fast} "):
            ForwardBatch([RowGroup(range(9), 0, [1, 2, 3], [2], num_fast=num_fast)])
    tree = RowGroup(range(9), 0, [1, 2, 3], [2], [0, 1, 1], (), [[0], [1]], num_chain=1, num_fast=2)
    with pytest.raises(ValueError, match="num_fast of 2 "):
        ForwardBatch([tree])
    assert ForwardBatch([replace(tree, num_fast=1)]).fast_rows == [0]


def test_rows_are_fast_in_16_bits_only() -> None:
    """The kernels would read other weights as float16."""
    for quantization in ("int8", "float32"):
        lm = load_model(EMBEDDED_TARGET, quantization=quantization, canary=False)
        pool = KVPool(lm.shapes, 64, lm.dtype, lm.device)
        with pytest.raises(ValueError, match="kept in 16 bits"):
            lm.forward([RowGroup(range(64), 0, [1, 2, 3], [2], num_fast=2)], pool)


def test_stored_weights_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = str(tmp_path / "wide"), str(tmp_path / "narrow")
    for folder, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=dtype).save_pretrained(folder)
    config = Path(narrow, "config.json")
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    assert load_model(narrow, fast_prompts=True, canary=False).fast_prompts, "its files say what it holds"
    quantised = str(gptq_folder(tmp_path / "quantised", EMBEDDED_TARGET, 32))
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    for folder, kept in ((wide, "float32"), (quantised, "GPTQ")):
        with pytest.raises(ConfigError, match=f"this model's are {kept}"):
            load_model(folder, fast_prompts=True)

"""Rows that attend to what an indexer chooses: the choice is a function of the text, ties included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.kv.pool import LayerShape
from slipstream.models import CausalLM, RowGroup, load_model
from tests.kit.recurrent_models import recurrent_model

TEXT = [(17 * i * i + 5 * i + 3) % 128 for i in range(22)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model whose indexers score all entries alike."""
    model = AutoModelForCausalLM.from_pretrained(recurrent_model("deepseek-v3.2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weights_proj" in name:
                parameter.zero_()
    folder: Path = tmp_path_factory.mktemp("tied")
    model.save_pretrained(folder)
    return load_model(str(folder), canary=False)


def rows(lm: CausalLM, cuts: list[int], **tree: Any) -> torch.Tensor:
    """The logits of all rows of the text, in passes that end at the cuts."""
    pool, slots = lm.trial_cache(len(TEXT) + 8)
    logits = []
    for begin, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        group = RowGroup(slots, begin, TEXT[begin:end], range(end - begin), owner=0)
        logits.append(lm.forward([group], pool).logits)
    return torch.cat(logits)


def test_of_equal_scores_the_earlier_entry_is_better(tied: CausalLM) -> None:
    whole = rows(tied, [])
    for cuts in (list(range(1, len(TEXT))), [7, 8, 15]):
        assert float((rows(tied, cuts) - whole).abs().max()) < 1e-4
    # Row 21 attends to the first 6 tokens alone, so that it does not see a change of a later one.
    pool, slots = tied.trial_cache(len(TEXT))
    changed = [*TEXT[:12], (TEXT[12] + 1) % 128, *TEXT[13:]]
    other = tied.forward([RowGroup(slots, 0, changed, range(len(changed)), owner=0)], pool).logits
    assert torch.equal(other[:12], whole[:12])
    assert float((other[12] - whole[12]).abs().max()) > 0.1
    assert float((other[13:] - whole[13:]).abs().max()) < 1e-4


def test_a_trees_rows_choose_as_their_paths_do(tied: CausalLM) -> None:
    pool, slots = tied.trial_cache(40)
    tied.forward([RowGroup(slots, 0, TEXT[:10], [], owner=0)], pool)
    tree = RowGroup(
        slots,
        10,
        [TEXT[10], 3, TEXT[11], 9],
        range(4),
        positions=[10, 10, 11, 11],
        tail_seen=[[0], [1], [0, 2], [1, 3]],
        owner=0,
    )
    found = tied.forward([tree], pool).logits
    for row, path in ((2, [TEXT[10], TEXT[11]]), (3, [3, 9])):
        own, places = tied.trial_cache(20)
        text = [*TEXT[:10], *path]
        lone = tied.forward([RowGroup(places, 0, text, [11], owner=0)], own).logits[0]
        assert float((found[row] - lone).abs().max()) < 1e-4


def test_index_keys_lie_behind_the_layers_entries() -> None:
    lm = load_model(recurrent_model("glm-moe-dsa"))
    assert lm.num_layers == 3
    assert lm.shapes[3:] == (LayerShape(1, 8, 0, values_in_keys=True),) * 2, "the second layer has no indexer"


@pytest.mark.parametrize("family", ["deepseek-v3.2", "glm-moe-dsa"])
def test_texts_are_those_without_drafts(family: str) -> None:
    """Of more tokens than are chosen, in chunks, trees and after reuse."""
    prompts = [TEXT, TEXT[:9] * 2]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)

    def texts(spec: dict[str, Any] | None, **options: Any) -> list[list[int]]:
        llm = LLM(
            recurrent_model(family),
            speculative_config=spec,
            kv_cache_bytes=8 * 2**20,
            num_threads=1,
            **options,
        )
        outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
        assert llm.engine.integrity() == []
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = texts(None, max_num_seqs=1, enable_prefix_caching=False)
    draft = {"method": "draft_model", "model": recurrent_model(family, 0.03)}
    chain, tree = {"method": "ngram"}, {**draft, "tree_top_k": 2, "num_draft_nodes": 8}
    for spec in (None, chain, tree) if family == "deepseek-v3.2" else (tree,):
        assert texts(spec, max_num_batched_tokens=17) == expected, spec

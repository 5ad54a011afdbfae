"""PARD-2 reads the target's hidden states: of the token before each one, and of the last one for masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.model.pard import PardDrafter, PardOptions
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_tokenizer
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import draft_context
from slipstream.tools.doctor.examination import kind_of
from tests.kit.pard_models import MASK, pard2_folder

DEPTH, VOCAB = 5, 4096
PROMPTS = ["Show me the command tar.", "SELECT name FROM", "def add(a, b):"]


def reference(token_ids: list[int], depth: int) -> torch.Tensor:
    """[depth, vocab]: as AMD's code computes them, in Transformers' own models without a cache."""
    folder = Path(pard2_folder())
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = torch.load(folder / "warp_model.bin")["target_proj.weight"]
    with torch.inference_mode():
        states = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[-1], states[-4]], dim=-1)[0, :-1]
        features = torch.cat([torch.zeros(1, 640), features])
        features = torch.cat([features, features[-1:].expand(depth - 1, -1)])
        rows = torch.tensor([[*token_ids, *[MASK] * (depth - 1)]])
        embeds = draft.get_input_embeddings()(rows) + 0.005 * features @ weight.T
        return draft(inputs_embeds=embeds).logits[0, -depth:]


@pytest.mark.parametrize("executor", ["cpu_kernels", "eager"])
def test_its_logits_are_those_of_amds_code(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"method": "pard", "model": pard2_folder(), "num_speculative_tokens": DEPTH}
    llm = LLM(speculative_config=spec, kv_cache_dtype="float32", executor=executor)
    drafter = llm.engine.drafter
    assert isinstance(drafter, PardDrafter)
    assert drafter.traits.feature_layers == (6, 3)
    made: list[tuple[list[int], torch.Tensor]] = []
    propose, forward = drafter.propose, drafter.model.forward
    logits: list[torch.Tensor] = []

    def noted_pass(*given: Any, **more: Any) -> Any:
        output = forward(*given, **more)
        logits.append(output.logits)
        return output

    def noted(sequences: Any, budgets: Any) -> Any:
        proposals = propose(sequences, budgets)
        made.extend(
            (list(s.token_ids), logits[-1]) for s, p in zip(sequences, proposals, strict=True) if len(p)
        )
        return proposals

    monkeypatch.setattr(drafter.model, "forward", noted_pass)
    monkeypatch.setattr(drafter, "propose", noted)
    llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))
    assert len(made) > 3
    worst = [float((ours - reference(text, len(ours))).abs().max()) for text, ours in made]
    assert max(worst) <= 1e-4


@pytest.mark.parametrize("options", [{}, {"tree_top_k": 3}], ids=str)
def test_texts_are_those_of_the_target(options: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0.0, 0.9, 0.7)]
    expected = [each.outputs[0].token_ids for each in LLM().generate(PROMPTS, params)]
    llm = LLM(speculative_config={"method": "pard", "model": pard2_folder(), **options}, max_num_seqs=2)
    for _ in range(2):  # the second time with reused prefixes
        answers = llm.generate(PROMPTS, params)
        assert [each.outputs[0].token_ids for each in answers] == expected
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    assert kind_of(pard2_folder()) == "pard"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pard2_target_layers": None}, "its configuration has no pard2_target_layers"),
        ({"pard2_target_layers": (-1, -9)}, r"reads hidden states \[-1, -9\], but the target has 6 layers"),
        (
            {"pard2_target_layers": (-1,)},
            "reads 640 numbers of the target, and 1 hidden states of this one have 320",
        ),
        ({"pard2_proj_bias": True}, "the tensor target_proj.bias of warp_model.bin is missing"),
    ],
)
def test_a_model_of_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config={"method": "pard", "model": pard2_folder(**changes)})


def test_a_plan_counts_what_it_holds() -> None:
    llm = LLM(speculative_config={"method": "pard", "model": pard2_folder()})
    drafter = llm.engine.drafter
    outline = outline_model(EMBEDDED_TARGET, LoadOptions.of(llm.engine.config))
    context = replace(drafter.context, target=None, target_outline=outline)
    held = PardDrafter.footprint(drafter.options, context)
    assert held.traits.feature_layers == drafter.traits.feature_layers == (6, 3)
    assert held.traits.reads_text_only is drafter.traits.reads_text_only is False
    assert held.head_bytes == 640 * 128 * 4


def test_it_drafts_where_the_target_is_only() -> None:
    assert json.loads((Path(pard2_folder()) / "config.json").read_text())["pard2"] is True
    context = draft_context(VOCAB, 512, "coupled", tokenizer=load_tokenizer(EMBEDDED_TARGET))
    with pytest.raises(ConfigError, match="it drafts in the target's own process only"):
        PardDrafter(PardOptions(model=pard2_folder()), context)

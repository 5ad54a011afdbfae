"""Nemotron-H's prediction layer, which is an attention block and one of experts: logits, texts, and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.registry import create_drafter
from slipstream.errors import ModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import draft_context
from tests.kit.folders import kept_folder
from tests.kit.mtp_drafts import CLOSE, TEXT, texts
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

VOCAB, HIDDEN = 320, 32
OWN = ["linear_attention", "full_attention", "moe"]
BEHIND = ["full_attention", "moe"]


@dataclass(frozen=True)
class Made:
    """A checkpoint, and the modules that it was written from."""

    folder: str
    whole: Any
    """Its last two layers are the prediction layer's blocks."""
    parts: dict[str, Tensor]
    """The other weights of the prediction layer, by their names in the checkpoint."""

    @torch.no_grad()
    def logits(self, token_ids: list[int], states: Tensor) -> Tensor:
        """Row i pairs states[i] [hidden] with token_ids[i] -> [rows, vocab]."""
        rows, decoder = len(token_ids), self.whole.model

        def normed(name: str, given: Tensor) -> Tensor:
            norm = type(decoder.norm_f)(HIDDEN, eps=self.whole.config.layer_norm_epsilon)
            norm.weight.data = self.parts[name]
            return norm(given)  # type: ignore[no-any-return]

        embeds = decoder.embeddings(torch.tensor(token_ids))
        both = torch.cat([normed("0.enorm", embeds), normed("0.hnorm", states)], dim=-1)
        hidden = (both @ self.parts["0.eh_proj"].T)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        for block in decoder.layers[len(OWN) :]:
            hidden = block(hidden, attention_mask=mask if block.block_type == "full_attention" else None)
        found: Tensor = self.whole.lm_head(normed("1.final_layernorm", hidden[0]))
        return found


@functools.cache
def nemotron() -> Made:
    shape = sizes(HIDDEN, len(OWN), 4, 2, inner=48, vocab=VOCAB, context=256, spread=0.2)
    config = tf.NemotronHConfig(
        **shape,
        layers_block_type=[*OWN, *BEHIND],
        **{"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 6, "n_groups": 2},
        **{"chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 24},
        moe_shared_expert_intermediate_size=24,
        attn_implementation="eager",
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    whole = tf.NemotronHForCausalLM(config).eval().requires_grad_(False)
    for name, weight in whole.named_parameters():
        if weight.ndim == 1 and name.endswith(("norm.weight", "norm_f.weight")):
            weight += 0.3 * torch.randn_like(weight)
    parts = {name: 1 + 0.3 * torch.randn(HIDDEN) for name in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    parts["0.eh_proj"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    folder = kept_folder()
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".layers." in name]:
        number, _, part = name.partition(".layers.")[2].partition(".")
        if int(number) >= len(OWN):
            tensors[f"mtp.layers.{int(number) - len(OWN)}.{part}"] = tensors.pop(name)
    tensors |= {f"mtp.layers.{name}.weight": part for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    written = json.loads(file.read_text())
    written |= {"layers_block_type": OWN, "num_nextn_predict_layers": 1, "mtp_layers_block_type": BEHIND}
    written.pop("layer_types", None)
    file.write_text(json.dumps(written))
    byte_level(VOCAB).save_pretrained(folder)
    return Made(str(folder), whole, parts)


def drafter_of(folder: str, **options: Any) -> MtpDrafter:
    context = dataclasses.replace(draft_context(VOCAB, 256), target=load_model(folder))
    drafter = create_drafter(SpeculativeConfig("mtp", options=options), context)
    assert isinstance(drafter, MtpDrafter)
    return drafter


def test_its_logits_are_those_of_the_familys_own_blocks() -> None:
    made = nemotron()
    drafter = drafter_of(made.folder)
    rows = len(TEXT) - 1
    states = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(3))
    pool = KVPool(drafter.head.shapes, rows, torch.float32, torch.device("cpu"))
    found = []
    for begin, end in ((0, 8), (8, rows)):
        part = ForwardBatch([RowGroup(pool.slots, begin, TEXT[begin + 1 : end + 1], range(end - begin))])
        found.append(drafter.executor.forward(part, pool, states[begin:end], level=0)[1])
    expected = made.logits(TEXT[1:], states)
    assert float((torch.cat(found) - expected).abs().max()) < CLOSE
    assert float(expected.std()) > 0.3, "logits of nothing would be close to anything"


def test_texts_are_those_without_it() -> None:
    expected = texts(LLM(nemotron().folder))
    for options in ({}, {"tree_top_k": 2, "num_draft_nodes": 5}):
        spec = {"method": "mtp", **options}
        llm = LLM(nemotron().folder, speculative_config=spec, max_num_batched_tokens=9)
        num_drafted: list[int] = []
        llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)  # noqa: B023
        for _ in range(2):
            assert texts(llm) == expected
        assert llm.engine.stats().num_draft_failures == 0
        assert sum(num_drafted) > 100


def test_a_plan_knows_what_it_holds() -> None:
    drafter = drafter_of(nemotron().folder)
    outline = outline_model(nemotron().folder)
    outlined = dataclasses.replace(drafter.context, target=None, target_outline=outline)
    planned = MtpDrafter.footprint(drafter.options, outlined)
    assert planned.traits == drafter.traits
    drafter.allocate(64)
    assert planned.traits.kv_bytes_per_token * 64 == drafter.cache.memory_bytes()
    assert sum(weight.numel() for weight in drafter.head.parameters()) * 4 <= planned.head_bytes


def changed(tmp_path: Path, lost: str, blocks: list[str]) -> str:
    folder = tmp_path / "changed"
    shutil.copytree(nemotron().folder, folder)
    tensors, file = load_file(folder / "model.safetensors"), folder / "config.json"
    tensors.pop(lost, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_layers_block_type": blocks}))
    return str(folder)


@pytest.mark.parametrize(
    ("lost", "blocks", "told"),
    [
        (
            "mtp.layers.1.final_layernorm.weight",
            BEHIND,
            r"lacks the tensor mtp\.layers\.1\.final_layernorm\.w",
        ),
        ("mtp.layers.0.hnorm.weight", BEHIND, r"lacks the tensor mtp\.layers\.0\.hnorm\.weight"),
        ("mtp.layers.1.norm.weight", BEHIND, r"lacks the tensor mtp\.layers\.1\.norm\.weight"),
        ("", ["moe", "full_attention"], "a prediction layer of moe, full_attention is not known"),
    ],
)
def test_what_is_missing_or_unknown_is_told_by_name(
    lost: str, blocks: list[str], told: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, lost, blocks)
    with pytest.raises(ModelError, match=told) as refused:
        drafter_of(folder)
    assert "\n" not in str(refused.value)

"""DFlash heads on disk: every layout keeps a head as it is, numbers are mapped, and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.heads.dflash_files import load_dflash, read_dflash, save_dflash
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.dflash_layouts import LAYOUTS
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.errors import ModelError
from slipstream.models import load_model
from tests.kit.dflash_heads import HIDDEN, VOCAB, random_head

TABLE = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Target:
    hidden_size: int = 16
    vocab_size: int = VOCAB
    num_layers: int = 6
    context_length: int = 64

    def embed(self, token_ids: Tensor) -> Tensor:
        return TABLE[token_ids]


def correction(kind: str, **options: Any) -> dict[str, Any]:
    sizes = {"top_k": 4, "state_size": 7, "num_uncorrected": 1} | options
    wanted = {"selector": ("top_k",), "gru": ("state_size", "num_uncorrected")}.get(kind, ())
    return {"left_to_right": LeftToRightConfig(kind=kind, rank=6, **{name: sizes[name] for name in wanted})}


DFLASH2 = {"convolution_taps": 2, "windows": (8, 8)}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "from the anchor": {"from_anchor": True},
    "windows": {"windows": (8, None), "causal": (True, False)},
    "windows both ways": {"windows": (8, 8)},
    "causal": {"causal": (True, True)},
    "confidence alone": {"confidence": "hidden", "from_anchor": True},
    "vanilla": {**correction("vanilla"), "confidence": "hidden+token", "from_anchor": True},
    "gated": {**correction("gated"), "confidence": "hidden", "from_anchor": True},
    "rnn": {**correction("rnn"), "from_anchor": True},
    "rnn of masks": correction("rnn"),
    "selector": {**correction("selector"), **DFLASH2},
    "scaled selector": {
        **correction("selector"),
        **DFLASH2,
        "embedding_scale": 3.0,
        "logit_scale": 0.5,
        "logit_softcap": 20.0,
    },
    "gru": {**correction("gru"), "from_anchor": True},
    "gru of masks": correction("gru"),
    "refiner": correction("refiner"),
}
ONLY = {
    "deepspec": ("confidence alone", "vanilla", "gated", "rnn"),
    "speculators": tuple(HEADS.keys() - {"causal", "scaled selector", "gru", "gru of masks"}),
    "z-lab": tuple(HEADS),
}


def with_vocabulary(head: DFlashHead, drafted: int) -> DFlashHead:
    head.lm_head = torch.nn.Linear(HIDDEN, drafted, bias=False)
    torch.nn.init.normal_(head.lm_head.weight)
    if drafted < VOCAB:
        head.draft_token_ids = torch.randperm(VOCAB)[:drafted].sort().values
    return head


def saved(folder: Path, layout: str, drafted: int | None = None, **options: Any) -> DFlashHead:
    if drafted is not None:
        options["draft_vocab_size"] = drafted
    head = random_head(**options)
    if drafted is not None:
        with_vocabulary(head, drafted)
    save_dflash(head, folder, target="some-target", layout=layout)
    return head


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", HEADS)
def test_survives_the_disk(kind: str, layout: str, tmp_path: Path) -> None:
    if kind not in ONLY[layout]:
        with pytest.raises(ModelError, match=r"write (it|this head) (in the layout|as) z-lab"):
            saved(tmp_path, layout, **HEADS[kind])
        return
    head = saved(tmp_path, layout, **HEADS[kind])
    again = read_dflash(str(tmp_path), Target())
    assert again.config == head.config
    expected = head.state_dict()
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in expected.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafted", [VOCAB, 20])
def test_keeps_an_output_layer_and_a_vocabulary_of_its_own(drafted: int, layout: str, tmp_path: Path) -> None:
    head = saved(tmp_path, layout, drafted, **HEADS["vanilla"])
    again = read_dflash(str(tmp_path), Target())
    assert again.lm_head is not None
    assert head.lm_head is not None
    assert torch.equal(again.lm_head.weight, head.lm_head.weight)
    assert torch.equal(again.draft_token_ids, head.draft_token_ids)
    assert {"d2t", "t2d"} <= load_file(tmp_path / "model.safetensors").keys() or drafted == VOCAB


def test_an_embedding_of_its_own_is_kept_and_a_copy_is_not(tmp_path: Path) -> None:
    head = random_head()
    for table, own in ((torch.randn(VOCAB, HIDDEN), True), (TABLE.clone(), False)):
        head.embedding = table
        save_dflash(head, tmp_path, target="some-target")
        assert (read_dflash(str(tmp_path), Target()).embedding is not None) == own


def test_feature_layers_are_counted_as_the_layout_does(tmp_path: Path) -> None:
    """Slipstream's 1 and 3 are the outputs of the first and the third layer, HF's hidden_states[1] and [3]."""
    for layout, expected in (("z-lab", [0, 2]), ("deepspec", [0, 2]), ("speculators", [1, 3])):
        saved(tmp_path, layout, **HEADS["vanilla"])
        raw = json.loads((tmp_path / "config.json").read_text())
        found = raw.get("aux_hidden_state_layer_ids") or raw.get("target_layer_ids")
        assert found == expected
        if layout == "z-lab":
            assert raw["dflash_config"]["target_layer_ids"] == expected


def changed(folder: Path, tensors: dict[str, Tensor | None] | None = None, **raw: Any) -> str:
    """A saved head with some entries of its configuration, or tensors, replaced; None takes one out."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in raw.items():
        places = [place for place in (config, config.get("dflash_config", {})) if name in place]
        for place in places or [config]:
            place[name] = value
            if value is None:
                del place[name]
    (folder / "config.json").write_text(json.dumps(config))
    held: dict[str, Any] = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: t for name, t in held.items() if t is not None}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"vocab_size": 60},
            r"for a target with a vocabulary of 60, this target has 50; use a head trained for it",
        ),
        (
            {"target_hidden_size": 32},
            r"for a target with a hidden size of 32, this target has 16; use a head trained for it",
        ),
        (
            {"mask_token_id": 50},
            r"mask token 50, which is not among the target's 50 tokens; give the mask_token_id",
        ),
        ({"mask_token_id": None}, r"has no mask_token_id"),
        ({"mask_token_id": "<mask>"}, r"has mask_token_id '<mask>', which is not a whole number"),
        ({"block_size": None}, r"has no block_size"),
        ({"block_size": 1, "sample_from_anchor": False}, r"block_size 1, in which no row predicts a token"),
        ({"target_layer_ids": [0, 9]}, r"layers \[1, 10\], counted from 1, but the target has 6 layers"),
        ({"target_layer_ids": None}, r"has no target_layer_ids, the layers of the target that it reads"),
        ({"markov_head_type": "best"}, r"has markov_head_type 'best', not vanilla, gated, rnn"),
        (
            {"layer_types": ["full_attention"]},
            r"cannot be read: .*must be equal to the number of `layer_types`",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, r"has sliding_attention layers but no sliding_window"),
        ({"tensors": {"fc.weight": None}}, r"lacks the tensor fc.weight, which its configuration asks for"),
        (
            {"tensors": {"markov_head.markov_w2.weight": None}},
            r"lacks the tensor markov_head.markov_w2.weight",
        ),
        ({"tensors": {"confidence_head.proj.bias": None}}, r"lacks the tensor confidence_head.proj.bias"),
        ({"tensors": {"norm.weight": torch.ones(3)}}, r"norm.weight is \[3\], the configuration says \[24\]"),
        (
            {"tensors": {"extra.weight": torch.ones(3)}},
            r"has the tensor extra.weight, which no DFlash head here has",
        ),
        ({"tensors": {"d2t": torch.zeros(3)}}, r"d2t maps 3 tokens, but the head drafts 50"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    saved(tmp_path, "z-lab", **HEADS["vanilla"])
    path = changed(tmp_path, **change)
    with pytest.raises(ModelError, match=complaint) as caught:
        read_dflash(path, Target())
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "z-lab")
    path = changed(tmp_path, dflash_config=None, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"is not a DFlash head: its config.json names LlamaForCausalLM"):
        read_dflash(path, Target())
    path = changed(tmp_path, speculators_model_type="mtp")
    with pytest.raises(ModelError, match=r"names mtp, and has neither"):
        read_dflash(path, Target())
    with pytest.raises(ModelError, match=r"no layout 'best'.*z-lab, speculators, deepspec"):
        saved(tmp_path, "best")


def test_reads_the_names_that_other_writers_use(tmp_path: Path) -> None:
    """A prefix around the head, heads in a container, and an encoder around the first layer."""
    head = saved(tmp_path, "z-lab", **HEADS["gru"])
    file = tmp_path / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        name = f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name
        name = name.replace("hidden_norm.", "encoder.output_norm_enc.").replace("fc.", "encoder.fc.")
        renamed[name if name.startswith("encoder.") else f"model.{name}"] = tensor
    save_file(renamed | {"rotary_emb.inv_freq": torch.ones(4)}, file)
    again = read_dflash(str(tmp_path), Target())
    assert again.config == head.config
    assert torch.equal(again.fc.weight, head.fc.weight)


def test_layouts_that_are_not_said_are_those_of_the_writers(tmp_path: Path) -> None:
    """DFlash predicts its own positions, DSpark the next ones; layers with a window are causal unless it is said."""
    saved(tmp_path, "z-lab", **HEADS["vanilla"])
    changed(tmp_path, sample_from_anchor=None)
    path = changed(tmp_path, sample_from_anchor=None)
    assert read_dflash(path, Target()).config.from_anchor
    saved(tmp_path, "z-lab", **HEADS["windows both ways"])
    path = changed(tmp_path, sample_from_anchor=None, causal=None)
    config = read_dflash(path, Target()).config
    assert (config.from_anchor, config.causal) == (False, (True, True))
    path = changed(tmp_path, is_causal=False)
    assert read_dflash(path, Target()).config.causal == (False, False)


def test_reads_the_configuration_that_the_authors_publish(tmp_path: Path) -> None:
    """With old rotary settings, and no word of what the layout `z-lab` adds here."""
    saved(tmp_path, "z-lab")
    path = changed(
        tmp_path,
        rope_parameters=None,
        rope_theta=1000000,
        rope_scaling=None,
        sample_from_anchor=None,
        causal=None,
    )
    config = read_dflash(path, Target()).config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert (config.from_anchor, config.causal, config.windows) == (False, (False, False), (None, None))


@pytest.mark.parametrize(("brings", "lacks"), [((), "embed_tokens"), (("embedding",), "lm_head")])
def test_a_head_of_another_width_must_bring_its_tables(
    brings: tuple[str, ...], lacks: str, tmp_path: Path
) -> None:
    """Those of the target would be read with the wrong width."""
    sizes = {"target_hidden_size": 320, "vocab_size": 4096, "draft_vocab_size": 4096}
    head = DFlashHead(replace(random_head().config, **sizes))
    if brings:
        head.embedding = torch.randn(4096, HIDDEN)
    save_dflash(head, tmp_path, target="embedded")
    with pytest.raises(ModelError, match=rf"hidden size of {HIDDEN}, but its {lacks}"):
        load_dflash(str(tmp_path), load_model(EMBEDDED_TARGET))


def test_a_selector_whose_layers_differ_is_not_written_as_another(tmp_path: Path) -> None:
    mixed = random_head(windows=(8, None), causal=(True, False), **correction("selector"))
    with pytest.raises(ModelError, match="cannot be written in the layout z-lab"):
        save_dflash(mixed, tmp_path, target="t", layout="z-lab")

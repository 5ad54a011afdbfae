"""DFlash's kin of heads on disk: reads and writes the layouts in use (`dflash_layouts` lists them)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import TargetShape, TargetSizes, read_checkpoint, write_checkpoint
from slipstream.draft.heads.corrections import MARKOV_KINDS
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.dflash_layouts import SPECULATORS, ZLAB, DFlashSettings, config_of, written_config
from slipstream.draft.heads.vocabulary import draft_token_ids, own_embedding, vocabulary_tensors
from slipstream.errors import ModelError
from slipstream.models.causal_lm import CausalLM

_COPY_TOLERANCE = 0.05
"""Relative difference up to which an output layer is a copy of a target's, which may be quantised."""


def load_dflash(path: str, target: CausalLM, *, revision: str | None = None) -> DFlashHead:
    """`read_dflash`, ready to draft for `target`: on its device, in its dtype, without gradients.

    An output layer that is a copy of the target's is left out, so that it is held once.
    """
    head = read_dflash(path, target, revision=revision)
    _check_width(head, target, path)
    if head.embedding is not None:
        head.embedding = head.embedding.to(target.device, target.dtype)
    head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if head.lm_head is not None and _is_copy(head.lm_head, head.config, target):
        head.lm_head = None
    return head


def _check_width(head: DFlashHead, target: CausalLM, path: str) -> None:
    """Raise `ModelError` where an embedding or an output layer is of another width than the head."""
    width = head.config.hidden_size
    embedded = target.hidden_size if head.embedding is None else head.embedding.shape[1]
    projected = target.hidden_size if head.lm_head is None else width
    for tensor, found in (("embed_tokens.weight", embedded), ("lm_head.weight", projected)):
        if found != width:
            raise ModelError(
                f"{path!r} has a hidden size of {width}, but its {tensor}, or its target's, is {found} wide; a "
                "head of another width than its target's brings its own embedding and output layer"
            )


def read_dflash(path: str, target: TargetShape, *, revision: str | None = None) -> DFlashHead:
    """The head in a folder or on the hub, in float32; raises `ModelError` where it does not match `target`."""
    raw, tensors = read_checkpoint(path, revision=revision)
    tensors = {_bare(name): tensor for name, tensor in tensors.items()}
    config = dflash_config(raw, tensors, target, path)
    check_dflash(config, target, path)
    head = DFlashHead(config)
    if "lm_head.weight" in tensors:
        head.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    elif config.draft_vocab_size < config.vocab_size:
        raise ModelError(
            f"{path!r} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no tensor lm_head.weight"
        )
    head.embedding = own_embedding(tensors.pop("embed_tokens.weight", None), target, path)
    head.load_state_dict(_renamed(tensors, head, path))
    if head.lm_head is None and not torch.equal(head.draft_token_ids, torch.arange(config.vocab_size)):
        raise ModelError(
            f"{path!r} maps its tokens with d2t but has no tensor lm_head.weight, whose tokens these would be"
        )
    return head


def dflash_config(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetSizes, path: str
) -> DFlashConfig:
    """The configuration of a checkpoint of any layout; raises `ModelError` where it is not such a head's."""
    bare = {_bare(name): tensor for name, tensor in tensors.items()}
    return config_of(DFlashSettings(raw, bare, path), target)


def check_dflash(config: DFlashConfig, target: TargetSizes, path: str) -> None:
    """Raise `ModelError` where the head was trained for another target, or can draft for none."""
    config.check_sizes(target, path)
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ModelError(
            f"{path!r} has mask token {config.mask_token_id}, which is not among the target's {config.vocab_size} "
            "tokens; give the mask_token_id that the head was trained with"
        )
    if any(not 0 <= layer <= target.num_layers for layer in config.feature_layers):
        raise ModelError(
            f"{path!r} reads the outputs of layers {list(config.feature_layers)}, counted from 1, but the target has "
            f"{target.num_layers} layers"
        )
    if config.num_drafts < 1:
        raise ModelError(f"{path!r} has block_size {config.block_size}, in which no row predicts a token")
    if config.confidence == "hidden+token" and (
        config.left_to_right is None or config.left_to_right.kind not in MARKOV_KINDS
    ):
        raise ModelError(f"{path!r} has confidence_head_with_markov but markov_rank 0")


def save_dflash(
    head: DFlashHead,
    folder: str | Path,
    *,
    target: str,
    layout: str = ZLAB,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write `head` for the target called `target`; `notes` goes into `training.json` next to it.

    Raises `ModelError` for a head that `layout` cannot describe.
    """
    config = head.config
    raw = written_config(config, layout, target)
    tensors = {
        name_in_file(name, head, layout): tensor
        for name, tensor in head.state_dict().items()
        if name != "draft_token_ids"
    }
    if head.embedding is not None:
        tensors["embed_tokens.weight"] = head.embedding
    if config.draft_vocab_size < config.vocab_size:
        tensors |= vocabulary_tensors(head.draft_token_ids, config.vocab_size)
    write_checkpoint(folder, raw, tensors)
    if notes is not None:
        (Path(folder) / "training.json").write_text(json.dumps(notes, indent=1) + "\n")


_GRU = {"gru.weight_ih": "prefix_gru.weight_ih_l0", "gru.weight_hh": "prefix_gru.weight_hh_l0"} | {
    "down.weight": "embed_proj.0.weight",
    "up.weight": "embed_proj.2.weight",
}
_XPRESS = {
    "token_embed.": "w1.",
    "mix_l": "mix.L",
    "mlp_gate.": "mlp.gate_proj.",
    "mlp_up.": "mlp.up_proj.",
    "mlp_down.": "mlp.down_proj.",
    "readout.": "w2.",
}
"""A refiner's names here and in speculators, and the beginnings of those in XPress' own files."""


def name_in_file(name: str, head: DFlashHead, layout: str) -> str:
    """The name in files of an entry of the module's state."""
    if name.startswith("confidence_head."):
        return name.replace("confidence_head.", "confidence_head.proj.")
    if not name.startswith("left_to_right."):
        return name
    correction = head.config.left_to_right
    assert correction is not None
    name = name.removeprefix("left_to_right.")
    if correction.kind == "gru":
        return _GRU[name]
    if correction.kind == "refiner" and layout == SPECULATORS:
        return f"refiner_head.{name}"
    if correction.kind == "refiner":
        for here, there in _XPRESS.items():
            name = name.replace(here, there, 1) if name.startswith(here) else name
        return f"xpress_head.{name}"
    return f"candidate_selector.{name}" if correction.kind == "selector" else f"markov_head.{name}"


def _bare(name: str) -> str:
    """A tensor's name without what some writers put around the head or call otherwise."""
    name = re.sub(r"^(model\.|draft_model\.)?(logit_head\.)?", "", name)
    name = name.replace("encoder.fc.", "fc.", 1) if name.startswith("encoder.fc.") else name
    return re.sub(r"^encoder\.output_norm_enc\.", "hidden_norm.", name)


def _renamed(tensors: Mapping[str, Tensor], head: DFlashHead, path: str) -> dict[str, Tensor]:
    """The tensors under the module's names; raises `ModelError` for missing, unknown or misshapen ones."""
    found = {_bare(name): tensor for name, tensor in tensors.items()}
    config = head.config
    ids = draft_token_ids(
        found.pop("d2t", None), found.pop("t2d", None), config.draft_vocab_size, config.vocab_size, path
    )
    expected = head.state_dict()
    renamed = {"draft_token_ids": ids}
    for name, tensor in expected.items():
        if name == "draft_token_ids":
            continue
        names = {name_in_file(name, head, layout) for layout in (ZLAB, SPECULATORS)}
        there = next((each for each in names if each in found), None)
        if there is None:
            raise ModelError(
                f"{path!r} lacks the tensor {' or '.join(sorted(names))}, which its configuration asks for"
            )
        renamed[name] = found.pop(there)
        if renamed[name].shape != tensor.shape:
            raise ModelError(
                f"{path!r}: tensor {there} is {list(renamed[name].shape)}, the configuration says {list(tensor.shape)}"
            )
    ignored = re.compile(r"rotary_emb\.inv_freq$|^verifier_|^xpress_head\.mix_tril|causal_tril$")
    if unknown := sorted(name for name in found if not ignored.search(name)):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(f"{path!r} has the tensor {unknown[0]}{more}, which no DFlash head here has")
    return renamed


def _is_copy(lm_head: nn.Linear, config: DFlashConfig, target: CausalLM) -> bool:
    """Whether an output layer over the whole vocabulary is the target's: it gives the same logits for random states."""
    if config.draft_vocab_size != target.vocab_size or config.hidden_size != target.hidden_size:
        return False
    states = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(0))
    states = states.to(target.device, target.dtype)
    its, own = target.project(states).float(), lm_head(states).float()
    return bool((its - own).norm() <= _COPY_TOLERANCE * own.norm())

"""Layers for multi-token prediction on disk: finds and reads the layouts in use.

| layout | where | recognised by |
|---|---|---|
| `deepseek` | DeepSeek-V3, GLM-4.5, GGUF | `model.layers.N.eh_proj`, N the number of layers |
| `qwen` | Qwen3-Next, Qwen3.5 | `mtp.fc` |
| `mimo` | MiMo-7B | `model.mtp_layers.0.input_proj` |
| `mimo_v2` | MiMo-V2 | `model.mtp.layers.0.eh_proj` |
| `speculators` | the speculators library, in a folder of its own | `mtp_layers.0.input_proj` |

Of several layers the first one is read: vLLM too drafts with it alone for MiMo and MiMo-V2, and other published
checkpoints have one. Copies of the target's embedding and output layer, which some checkpoints bring, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.draft.heads.checkpoints import write_checkpoint
from slipstream.draft.heads.mtp_head import MtpForm, MtpHead
from slipstream.errors import ConfigError, ModelError
from slipstream.models.causal_lm import CausalLM
from slipstream.models.files.unused import COUNTS
from slipstream.models.identity import ModelIdentity
from slipstream.models.outline import ModelOutline
from slipstream.models.single_layer import (
    FINAL_NORM,
    LAYER,
    check_whole,
    single_layer,
    single_layer_config,
    single_layer_outline,
)
from slipstream.models.support import text_config

_NOT_READ = re.compile(r"^(embed_tokens|shared_head\.(head|output))\.|rotary_emb\.inv_freq$")
"""Parts of a layer that are copies of the target's, or follow from the configuration."""


class Parts(NamedTuple):
    """Names of the parts that a prediction layer has in addition to a decoder layer's, without `.weight`."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


@dataclass(frozen=True)
class MtpLayout:
    """The names of a layer's tensors, and how it is fed."""

    name: str
    layer: str
    """What the names of the layer begin with; {} is the target's number of layers."""
    parts: Parts
    """They lie in the layer, or under `mtp.`."""
    form: MtpForm
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the decoder layer that Transformers' class calls otherwise."""
    slides: bool = False
    """Whether its attention has the family's sliding window."""

    def prefix(self, target: ModelIdentity) -> str:
        """What the names of the layer's tensors begin with."""
        return self.layer.format(target.num_layers)

    def places(self, target: ModelIdentity) -> Parts:
        """The parts' full names."""
        prefix = self.prefix(target)
        return Parts(*(name if name.startswith("mtp.") else prefix + name for name in self.parts))


_LAYERNORMS = Parts("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAYOUTS = (
    MtpLayout(
        "deepseek",
        "model.layers.{}.",
        Parts("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        MtpForm(),
    ),
    MtpLayout(
        "qwen",
        "mtp.layers.0.",
        Parts("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        MtpForm(masks_first=False),
    ),
    MtpLayout("mimo", "model.mtp_layers.0.", _LAYERNORMS, MtpForm(hidden_first=True)),
    MtpLayout(
        "mimo_v2",
        "model.mtp.layers.0.",
        Parts("enorm", "hnorm", "eh_proj", "final_layernorm"),
        MtpForm(masks_first=False),
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        slides=True,
    ),
    MtpLayout("speculators", "mtp_layers.0.", _LAYERNORMS, MtpForm(masks_first=False)),
)
_OF_FAMILIES = {"qwen3_": "qwen", "qwen2": "mimo", "mimo_v2": "mimo_v2"}
"""Beginning of a family's name to its layout, for the others than DeepSeek's; MiMo-7B is a Qwen2 model."""
RECYCLES_BEFORE_NORM = ("glm4_moe",)
"""Families whose next step reads the layer's output before its final norm, as vLLM has it."""


def layout_of(names: Collection[str], target: ModelIdentity, path: str) -> MtpLayout:
    """The layout whose projection is among the names of tensors; raises `ConfigError` where there is none."""
    for layout in LAYOUTS:
        if f"{layout.places(target).projection}.weight" in names:
            return layout
    looked_for = ", ".join(f"{each.places(target).projection}.weight" for each in LAYOUTS)
    others = f" among the {len(names)} tensors that the target does not read" if names else ""
    raise ConfigError(
        f"{path!r} has no layer for multi-token prediction: no {looked_for}{others}. Use a checkpoint that keeps "
        "it, or another drafter"
    )


def form_of(layout: MtpLayout, target: ModelIdentity) -> MtpForm:
    """How the layer is fed in the target's family."""
    normed = target.family not in RECYCLES_BEFORE_NORM
    return replace(layout.form, recycles_normed=normed)


def load_mtp(
    tensors: Mapping[str, Tensor], layout: MtpLayout, form: MtpForm, target: CausalLM, path: str
) -> MtpHead:
    """The head, ready to draft for `target`: on its device, in its dtype, without gradients.

    Raises `ModelError` for tensors that are missing, unknown, or of another target's shape.
    """
    refuse = f"the prediction layer in {path!r}"
    prefix, places = layout.prefix(target), layout.places(target)
    layer: dict[str, Tensor] = {}
    for name in tensors:
        part = name.removeprefix(prefix)
        if part == name or _NOT_READ.search(part) or name.rpartition(".")[0] in places:
            continue
        for theirs, ours in layout.renamed.items():
            part = part.replace(theirs, ours, 1) if part.startswith(theirs) else part
        tensor = tensors[name]
        # Widened matrices are narrowed one by one; a router's bias may be wider than the layer.
        layer[LAYER + part] = tensor.to(target.dtype) if tensor.ndim > 1 else tensor
    if (final_norm := f"{places.final_norm}.weight") in tensors:
        layer[FINAL_NORM] = tensors[final_norm]
    made, loaded = single_layer(target, _config(layout, target, layer), layer)
    check_whole(loaded, {LAYER: prefix, "model.norm": places.final_norm}, refuse)
    head = MtpHead(made, form, None if form.hidden_is_normed else _target_scale(target))
    _fill(head.embedding_norm, tensors, f"{places.embedding_norm}.weight", refuse)
    _fill(head.hidden_norm, tensors, f"{places.hidden_norm}.weight", refuse)
    _fill(head.projection, tensors, f"{places.projection}.weight", refuse)
    return head.eval().requires_grad_(False)


def layout_by_config(target: ModelIdentity) -> MtpLayout | None:
    """The layout that the configuration of a checkpoint lets expect; None where it speaks of no such layer."""
    config, family = text_config(target.config), target.family
    counts = [getattr(config, key, None) for key in COUNTS]
    name = next((name for stem, name in _OF_FAMILIES.items() if family.startswith(stem)), "deepseek")
    expects = any(counts) or (family == "qwen3_next" and set(counts) == {None})
    return next(layout for layout in LAYOUTS if layout.name == name) if expects else None


def outline_mtp(names: Collection[str] | None, layout: MtpLayout, target: ModelOutline) -> MtpHead:
    """The head without weights; `names` are those of the checkpoint's tensors, None where only the target is known."""
    return MtpHead(single_layer_outline(target, _config(layout, target, names)), layout.form)


def save_mtp(
    head: MtpHead, folder: str | Path, *, target: str, config: Any, num_speculative_tokens: int = 3
) -> None:
    """Write a head whose layers are not packed, for the target called `target` with this Transformers configuration.

    The layout is that of the speculators library. Raises `ModelError` for a head that it would feed in another way.
    """
    layout = LAYOUTS[-1]
    if replace(head.form, masks_first=False) != layout.form:
        raise ModelError(
            "the layout of speculators is for layers whose embedding comes first, that read the target's state behind "
            "its final norm and recycle their own behind theirs"
        )
    places = Parts(*(layout.layer + name for name in layout.parts))
    modules = Parts("embedding_norm", "hidden_norm", "projection", "norm")
    named = {"decoder.layers.0.": layout.layer}
    named |= {f"{ours}.": f"{theirs}." for ours, theirs in zip(modules, places, strict=True)}
    tensors = {
        named[stem] + name.removeprefix(stem): tensor
        for name, tensor in head.state_dict().items()
        for stem in named
        if name.startswith(stem)
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    written = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": config.to_diff_dict() | {"model_type": config.model_type},
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": list(config.architectures or ())},
        },
    }
    write_checkpoint(folder, written, tensors)


def _config(layout: MtpLayout, target: ModelIdentity, names: Collection[str] | None) -> Any:
    experts = names is None or any(".mlp.experts." in name for name in names)
    return single_layer_config(text_config(target.config), slides=layout.slides, has_experts=experts)


def _target_scale(target: CausalLM) -> Tensor:
    """What takes the target's final norm out of a hidden state; raises `ConfigError` where nothing does."""
    scale = target.final_scale
    if scale is None or not bool((scale != 0).all()):
        raise ConfigError(
            "mtp hidden 'pre' needs a target whose final norm is an RMS norm without zeros; use 'post'"
        )
    return scale


@torch.no_grad()
def _fill(module: Any, tensors: Mapping[str, Tensor], name: str, refuse: str) -> None:
    """Copy a weight; raises `ModelError` where it is missing or has another shape."""
    if name not in tensors:
        raise ModelError(f"{refuse} lacks the tensor {name}")
    weight, given = module.weight, tensors[name]
    if weight.shape != given.shape:
        raise ModelError(f"{refuse} has {name} of shape {list(given.shape)}, not {list(weight.shape)}")
    weight.copy_(given)

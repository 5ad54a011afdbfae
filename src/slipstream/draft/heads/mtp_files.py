"""Layers for multi-token prediction on disk: finds and reads the layouts in use.

| layout | where | recognised by |
|---|---|---|
| `deepseek` | DeepSeek-V3, GLM-4.5, GGUF | `model.layers.N.eh_proj`, N the number of layers |
| `qwen` | Qwen3-Next, Qwen3.5 | `mtp.fc` |
| `nemotron` | Nemotron-H | `mtp.layers.0.eh_proj` |
| `mimo` | MiMo-7B | `model.mtp_layers.0.input_proj` |
| `mimo_v2` | MiMo-V2 | `model.mtp.layers.0.eh_proj` |
| `speculators` | the speculators library, in a folder of its own | `mtp_layers.0.input_proj` |

Of several layers each has the next number. Qwen's share one projection and three norms. One of Nemotron-H's has a
number for its attention and one for its experts: the projection is in the first, the final norm in the last. Copies of
the target's embedding and output layer, which some checkpoints bring, are not read.
"""

from __future__ import annotations

import itertools
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
    LAYERS,
    SingleLayer,
    blocks_of,
    check_whole,
    ends_of,
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
    """The names of the layers' tensors, and how they are fed."""

    name: str
    layer: str
    """What the names of a layer begin with, before its number."""
    parts: Parts
    """They lie in each layer, or under `mtp.` for all."""
    form: MtpForm
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the decoder layer that Transformers' class calls otherwise."""
    slides: bool = False
    """Whether its attention has the family's sliding window."""
    follows: bool = False
    """Whether the layers' numbers go on behind the target's own layers."""

    def prefixes(self, target: ModelIdentity, number: int = 0) -> list[str]:
        """What the names of a layer's tensors begin with, of each of its blocks."""
        blocks = _num_blocks(target)
        begin = self._first(target) + number * blocks
        return [f"{self.layer}{block}." for block in range(begin, begin + blocks)]

    def places(self, target: ModelIdentity, number: int = 0) -> Parts:
        """The full names of a layer's parts."""
        prefixes = self.prefixes(target, number)
        at = Parts(prefixes[0], prefixes[0], prefixes[0], prefixes[-1])
        return Parts(
            *(
                name if name.startswith("mtp.") else place + name
                for place, name in zip(at, self.parts, strict=True)
            )
        )

    def num_in(self, names: Collection[str], target: ModelIdentity) -> int:
        """How many layers there are among the names of tensors, up to the one with the highest number."""
        parts = (
            name.removeprefix(self.layer).partition(".")[0] for name in names if name.startswith(self.layer)
        )
        last = max((int(part) for part in parts if part.isdecimal()), default=0)
        return 1 + (last - self._first(target)) // _num_blocks(target)

    def _first(self, target: ModelIdentity) -> int:
        return target.num_layers if self.follows else 0


def _num_blocks(target: ModelIdentity) -> int:
    """How many layers of Transformers' class one prediction layer is."""
    return len(blocks_of(text_config(target.config))) or 1


_LAYERNORMS = Parts("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAYOUTS = (
    MtpLayout(
        "deepseek",
        "model.layers.",
        Parts("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        MtpForm(),
        follows=True,
    ),
    MtpLayout(
        "qwen",
        "mtp.layers.",
        Parts("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        MtpForm(masks_first=False),
    ),
    MtpLayout(
        "nemotron",
        "mtp.layers.",
        Parts("enorm", "hnorm", "eh_proj", "final_layernorm"),
        MtpForm(masks_first=False),
    ),
    MtpLayout("mimo", "model.mtp_layers.", _LAYERNORMS, MtpForm(hidden_first=True)),
    MtpLayout(
        "mimo_v2",
        "model.mtp.layers.",
        Parts("enorm", "hnorm", "eh_proj", "final_layernorm"),
        MtpForm(masks_first=False),
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        slides=True,
    ),
    MtpLayout("speculators", "mtp_layers.", _LAYERNORMS, MtpForm(masks_first=False)),
)
_OF_FAMILIES = {"qwen3_": "qwen", "qwen2": "mimo", "mimo_v2": "mimo_v2", "nemotron_h": "nemotron"}
"""Beginning of a family's name to its layout, for the others than DeepSeek's; MiMo-7B is a Qwen2 model."""
RECYCLES_BEFORE_NORM = ("glm4_moe", "glm4_moe_lite")
"""Families whose next step reads the layer's output before its final norm, as vLLM has it."""
NEVER_MASKS = ("qwen3_5", "qwen3_next")
"""What the names of families begin with that read the embedding at position 0, also where a GGUF file names their
layers as DeepSeek's."""


def layout_of(names: Collection[str], target: ModelIdentity, path: str) -> MtpLayout:
    """The layout whose projection is among the names of tensors; raises `ConfigError` where there is none."""
    for layout in LAYOUTS:
        if f"{layout.places(target).projection}.weight" in names:
            return layout
    if target.family.startswith("gemma4"):
        raise ConfigError(
            f"{path!r} has no layer for multi-token prediction: Gemma 4's is a checkpoint of its own, an assistant; "
            "name it with `model`, --spec mtp:ASSISTANT"
        )
    looked_for = ", ".join(f"{each.places(target).projection}.weight" for each in LAYOUTS)
    others = f" among the {len(names)} tensors that the target does not read" if names else ""
    raise ConfigError(
        f"{path!r} has no layer for multi-token prediction: no {looked_for}{others}. Use a checkpoint that keeps "
        "it, or another drafter"
    )


def form_of(layout: MtpLayout, target: ModelIdentity) -> MtpForm:
    """How the layers are fed in the target's family."""
    normed = target.family not in RECYCLES_BEFORE_NORM
    masks = layout.form.masks_first and not target.family.startswith(NEVER_MASKS)
    return replace(layout.form, recycles_normed=normed, masks_first=masks)


def num_mtp_layers(
    config: Any, names: Collection[str] | None, layout: MtpLayout, target: ModelIdentity
) -> int:
    """How many layers a configuration, or what is read of `config.json`, says that there are.

    Where it says nothing, as many as there are among the names of tensors; one where there are no names either.
    """
    counts = [
        config.get(key) if isinstance(config, Mapping) else getattr(config, key, None) for key in COUNTS
    ]
    found = next(filter(None, counts), None)
    if found is not None and (type(found) is not int or found < 0):
        raise ConfigError(f"the configuration says that it has {found!r} layers for multi-token prediction")
    return found or (1 if names is None else layout.num_in(names, target))


def load_mtp(
    tensors: Mapping[str, Tensor],
    layout: MtpLayout,
    form: MtpForm,
    target: CausalLM,
    path: str,
    *,
    number: int = 1,
    depth: int = 1,
) -> MtpHead:
    """The head, ready to draft `depth` tokens for `target`: on its device, in its dtype, without gradients.

    Of the `number` layers in the checkpoint those are read that draft. Raises `ModelError` for tensors that are
    missing, unknown, or of another target's shape.
    """
    used = range(min(number, depth))
    names = [
        f"the prediction layer in {path!r}"
        if number == 1
        else f"prediction layer {k + 1} of {number} in {path!r}"
        for k in used
    ]
    layers = [_load_layer(tensors, layout, target, k, names[k]) for k in used]
    head = MtpHead(layers, form, None if form.hidden_is_normed else _target_scale(target), depth)
    for k in used:
        layer, places = head.layer(k), layout.places(target, k)
        _fill(layer.embedding_norm, tensors, f"{places.embedding_norm}.weight", names[k])
        _fill(layer.hidden_norm, tensors, f"{places.hidden_norm}.weight", names[k])
        _fill(layer.projection, tensors, f"{places.projection}.weight", names[k])
    return head.eval().requires_grad_(False)


def _load_layer(
    tensors: Mapping[str, Tensor], layout: MtpLayout, target: CausalLM, number: int, refuse: str
) -> SingleLayer:
    """The decoder layer of the prediction layer of this number, and its final norm."""
    prefixes, places = layout.prefixes(target, number), layout.places(target, number)
    blocks = {f"{LAYERS}{block}.": prefix for block, prefix in enumerate(prefixes)}
    final_norm = f"model.{ends_of(target.model).final_norm}"
    layer: dict[str, Tensor] = {}
    for (ours_in, prefix), name in itertools.product(blocks.items(), tensors):
        part = name.removeprefix(prefix)
        if part == name or _NOT_READ.search(part) or name.rpartition(".")[0] in places:
            continue
        for theirs, ours in layout.renamed.items():
            part = part.replace(theirs, ours, 1) if part.startswith(theirs) else part
        tensor = tensors[name]
        # Widened matrices are narrowed one by one; a router's bias may be wider than the layer.
        layer[ours_in + part] = tensor.to(target.dtype) if tensor.ndim > 1 else tensor
    if (name := f"{places.final_norm}.weight") in tensors:
        layer[f"{final_norm}.weight"] = tensors[name]
    made, loaded = single_layer(target, _config(layout, target, layer), layer)
    check_whole(loaded, blocks | {final_norm: places.final_norm}, refuse)
    return made


def layout_by_config(target: ModelIdentity) -> MtpLayout | None:
    """The layout that the configuration of a checkpoint lets expect; None where it speaks of no such layer."""
    config, family = text_config(target.config), target.family
    counts = [getattr(config, key, None) for key in COUNTS]
    name = next((name for stem, name in _OF_FAMILIES.items() if family.startswith(stem)), "deepseek")
    expects = any(counts) or (family == "qwen3_next" and set(counts) == {None})
    return next(layout for layout in LAYOUTS if layout.name == name) if expects else None


def outline_mtp(
    names: Collection[str] | None, layout: MtpLayout, target: ModelOutline, *, number: int = 1, depth: int = 1
) -> MtpHead:
    """The head without weights; `names` are those of the checkpoint's tensors, None where only the target is known."""
    layers = []
    for k in range(min(number, depth)):
        prefixes = tuple(layout.prefixes(target, k))
        own = None if names is None else [name for name in names if name.startswith(prefixes)]
        layers.append(single_layer_outline(target, _config(layout, target, own)))
    return MtpHead(layers, layout.form, depth=depth)


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
    modules = Parts("embedding_norm", "hidden_norm", "projection", "norm")
    tensors: dict[str, Tensor] = {}
    for number in range(len(head.layers)):
        prefix = f"{layout.layer}{number}."
        named = {"decoder.layers.0.": prefix}
        named |= {
            f"{ours}.": f"{prefix}{theirs}." for ours, theirs in zip(modules, layout.parts, strict=True)
        }
        tensors |= {
            named[stem] + name.removeprefix(stem): tensor
            for name, tensor in head.layer(number).state_dict().items()
            for stem in named
            if name.startswith(stem)
        }
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    written = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": len(head.layers),
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

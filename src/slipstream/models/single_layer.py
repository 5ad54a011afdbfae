"""A model of one decoder layer of another model's family, for layers that lie beside that model in its checkpoint.

Transformers' own classes make it, so that a family's attention, experts and rotary embedding are written once. It has
no vocabulary: it runs on vectors, through the hook like its family's models.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kv.pool import LayerShape
from slipstream.models.attention.base import ATTENTION_NAME, ModelTraits
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.canary import probe_layers
from slipstream.models.causal_lm import CausalLM
from slipstream.models.configuration import meta_model
from slipstream.models.cpu import threads
from slipstream.models.huggingface import creating_models
from slipstream.models.longrope import resolve_frequencies
from slipstream.models.mixers.latent import hold_latents
from slipstream.models.outline import ModelOutline
from slipstream.models.quiet import one_line, silenced
from slipstream.models.unloaded import probed_outline

LAYERS = "model.layers."
"""What the names of the layer's tensors begin with, before its number; see `blocks_of`."""
_TYPES = (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types"))
_NO_TOKEN = ("bos_token_id", "eos_token_id", "pad_token_id")


class Ends(NamedTuple):
    """What a family's decoder calls the parts that are in no layer."""

    embedding: str
    final_norm: str


def ends_of(model: Any) -> Ends:
    """Those of a causal language model."""
    decoder = model.get_decoder()
    names = Ends("embed_tokens", "norm"), Ends("embeddings", "norm_f")
    return next((each for each in names if hasattr(decoder, each.final_norm)), names[0])


def blocks_of(config: Any) -> list[str]:
    """The types of the layers of Transformers' class that make up one prediction layer together, attention first.

    In most families that is one layer, and the list is empty. Raises `ModelError` for blocks of another kind.
    """
    blocks = list(getattr(config, "mtp_layers_block_type", None) or [])
    if blocks and (blocks[0] != "full_attention" or not {"moe", "mlp"}.issuperset(blocks[1:])):
        raise ModelError(
            f"a prediction layer of {', '.join(blocks)} is not known; it must be attention, and feed-forward layers "
            "behind it"
        )
    return blocks


def single_layer_config(config: Any, *, slides: bool = False, has_experts: bool = True) -> Any:
    """The configuration of one layer: with full attention where the family has such, or a window with `slides`.

    `has_experts` says whether it has experts, in families whose layers may.
    """
    own = copy.deepcopy(config)
    number, blocks = own.num_hidden_layers, blocks_of(config)
    own.num_hidden_layers = 1
    own.vocab_size = 1
    own.tie_word_embeddings = False
    for name in _NO_TOKEN:
        setattr(own, name, None)
    if blocks:
        own.layer_types = blocks
    for name, of_own in () if blocks else _TYPES:
        types = list(getattr(own, of_own, None) or getattr(own, name, None) or [])
        if not types:
            continue
        if name == "mlp_layer_types":
            wanted = "sparse" if has_experts else "dense"
        else:
            wanted = "sliding_attention" if slides else "full_attention"
        setattr(own, name, [wanted if wanted in types else types[-1]])
    if getattr(own, "first_k_dense_replace", None) is not None:
        own.first_k_dense_replace = 0 if has_experts else number
    if getattr(own, "mlp_only_layers", None) is not None:
        own.mlp_only_layers = [] if has_experts else [0]
    if getattr(own, "decoder_sparse_step", None) is not None:
        own.decoder_sparse_step = 1
    if getattr(own, "quantization_config", None) is not None:
        del own.quantization_config
    return own


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """Such a model, and what was seen when it was tried out."""

    model: Any
    """Transformers' causal language model."""
    shape: LayerShape
    """What the layer stores for a token."""
    called: frozenset[str]
    """As `Probed.called`, by names within the decoder."""


def single_layer(
    like: CausalLM, config: Any, tensors: Mapping[str, Tensor]
) -> tuple[SingleLayer, Mapping[str, Any]]:
    """The model of one layer with these weights, and what Transformers says of them (`output_loading_info`).

    It is of the family of `like`, in its type and on its device. `tensors` are named as in a checkpoint of the family,
    which has no other layer.
    """
    dtype = like.dtype
    table = torch.zeros(1, config.hidden_size, dtype=dtype)
    embedding = f"model.{ends_of(like.model).embedding}.weight"
    state = {embedding: table, "lm_head.weight": table.clone(), **tensors}
    with one_line("cannot make the layer"), silenced(), creating_models(config):
        model, loaded = type(like.model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the caller reports them
        )
    resolve_frequencies(model, like.context_length)
    model = model.to(like.device).eval().requires_grad_(False)
    if like.backend.holds_latents:
        is_native = like.executor.is_native and dtype == torch.float32
        hold_latents(model, ATTENTION_NAME, threads.available() if is_native else 0)
    probed = probe_layers(model, PackedBackend(ModelTraits(config, like.device, dtype, native=False)))
    prefix = f"{model.base_model_prefix}."
    called = frozenset(name.removeprefix(prefix) for name in probed.called if name.startswith(prefix))
    return SingleLayer(model, probed.shapes[0], called), loaded


def single_layer_outline(like: ModelOutline, config: Any) -> SingleLayer:
    """The same without weights, on the meta device."""
    model = meta_model(config, ATTENTION_NAME, False)
    if like.backend.holds_latents:
        hold_latents(model, ATTENTION_NAME)
    traits = ModelTraits(config, like.device, like.dtype, native=False)
    return SingleLayer(model, probed_outline(model, PackedBackend(traits)).shapes[0], frozenset())


def check_whole(loaded: Mapping[str, Any], named: Mapping[str, str], refuse: str) -> None:
    """Raise `ModelError`, with `refuse` in front, for tensors that are missing, unknown or of another shape.

    `named` maps the beginnings of the model's names to those of the file's.
    """

    def theirs(name: str) -> str:
        stem = max((each for each in named if name.startswith(each)), key=len, default="")
        return named[stem] + name.removeprefix(stem) if stem else name

    for what, names in (
        ("lacks the tensor", loaded["missing_keys"]),
        ("has an unknown tensor", loaded["unexpected_keys"]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{refuse} {what} {theirs(min(names))}{more}")
    for name, have, want in sorted(loaded["mismatched_keys"]):
        raise ModelError(f"{refuse} has {theirs(name)} of shape {list(have)}, not {list(want)}")

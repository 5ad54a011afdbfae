"""How each engine reads an EAGLE head in Hugging Face form.

A *dialect* is what an engine expects of such a folder beyond EAGLE's own layout: its names of architectures, its
numbers of the target's layers, and what its code leaves out. All of it was read in the engines' loaders; what an
engine would ignore or misread in silence is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.draft.heads.checkpoints import TargetShape
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.methods import EAGLE3
from slipstream.tools.export.refusals import ExportError


@dataclass(frozen=True, kw_only=True)
class EagleDialect:
    """An engine's reading of EAGLE heads."""

    name: str
    """As a user writes it."""
    architectures: Mapping[int, str]
    """By EAGLE version; a version that is missing cannot be loaded."""
    layer_shift: int
    """Added to our numbers of the hidden states that a head reads. Ours count the layer that reads a state, as EAGLE's
    code does; -1 counts the layer that wrote it."""
    layers_in_head: bool = True
    """False: the numbers are taken from the engine's settings."""
    num_layers_read: int | None = None
    """How many hidden states an EAGLE-3 head must read; None: any number."""
    norm_before_residual: bool = True
    own_embedding: bool = True
    """False: an embedding of the head's own is replaced with the target's, silently."""
    attention_bias: bool = True
    fc_bias: Mapping[int, str] = field(default_factory=lambda: {1: "never", 3: "never"})
    """By EAGLE version: `never` (the layer has none), `optional`, or `always` (missing ones are not initialised)."""
    deep: bool = False
    """True: heads of several layers are loaded, and those that read mask tokens."""
    all_tensors: bool = False
    """True: what is missing in the file is filled at random, so the embedding and the map are always written."""
    without_version_1: str = "train an EAGLE-3 head with `slipstream train eagle3`, or use a draft model"


DIALECTS: Mapping[str, EagleDialect] = {
    "vllm": EagleDialect(
        name="vLLM",
        architectures={1: "EagleLlamaForCausalLM", 3: "LlamaForCausalLMEagle3"},
        layer_shift=0,
        deep=True,
    ),
    "sglang": EagleDialect(
        name="SGLang",
        architectures={1: "LlamaForCausalLMEagle", 3: "LlamaForCausalLMEagle3"},
        layer_shift=-1,
        norm_before_residual=False,
        own_embedding=False,
        attention_bias=False,
        fc_bias={1: "always", 3: "optional"},
    ),
    "tensorrt_llm": EagleDialect(
        name="TensorRT-LLM",
        architectures={3: "LlamaForCausalLMEagle3"},
        layer_shift=-1,
        layers_in_head=False,
        norm_before_residual=False,
        fc_bias={3: "optional"},
    ),
    "openvino": EagleDialect(
        name="OpenVINO",
        architectures={3: "LlamaForCausalLMEagle3"},
        layer_shift=-1,
        layers_in_head=False,
        num_layers_read=3,
        norm_before_residual=False,
        own_embedding=False,
        attention_bias=False,
        all_tensors=True,
    ),
    "llama_cpp": EagleDialect(
        name="llama.cpp",
        architectures={3: EAGLE3.name},
        layer_shift=0,
        num_layers_read=3,
        attention_bias=False,
    ),
}


def check_head(dialect: EagleDialect, head: EagleHead, target: TargetShape, path: str) -> None:
    """Raise `ExportError`, with the reason and what can be done, where the engine cannot run the head as trained."""
    config = head.config
    what = f"{dialect.name} cannot run {path!r}"
    if config.version not in dialect.architectures:
        raise ExportError(f"{what}: it loads no EAGLE-{config.version} heads; {dialect.without_version_1}")
    if config.norm_before_residual and not dialect.norm_before_residual:
        raise ExportError(
            f"{what}: the head adds its residual after the norm (norm_before_residual), which {dialect.name} does not; "
            "vLLM and llama.cpp do, or train the head without it"
        )
    if config.attention_bias and not dialect.attention_bias:
        raise ExportError(
            f"{what}: its attention has biases, which {dialect.name} drops; vLLM reads them, or train a head without"
        )
    if not dialect.deep and (config.num_layers > 1 or config.mask_token_id is not None):
        has = f"{config.num_layers} layers" if config.num_layers > 1 else "mask tokens"
        raise ExportError(f"{what}: the head has {has}, for which {dialect.name} has no place; vLLM reads it")
    own = head.embedding is not None and config.hidden_size == target.hidden_size
    if own and not dialect.own_embedding:
        raise ExportError(
            f"{what}: the head has an embedding of its own, which {dialect.name} replaces with the target's without a "
            "word; vLLM and llama.cpp keep it, or train the head with the target's embedding"
        )
    bias = head.fc.bias
    if bias is not None and bias.any() and dialect.fc_bias[config.version] == "never":
        raise ExportError(
            f"{what}: its layer fc has a bias, for which {dialect.name} has no place; train it without one, as "
            "`slipstream train` does"
        )
    if config.version == 3:
        _check_layers(dialect, config.feature_layers, target, what)


def _check_layers(dialect: EagleDialect, layers: tuple[int, ...], target: TargetShape, what: str) -> None:
    if dialect.num_layers_read not in (None, len(layers)):
        raise ExportError(
            f"{what}: the head reads {len(layers)} hidden states, {dialect.name} gives {dialect.num_layers_read}; "
            "vLLM takes any number, or train it with --feature-layers and three numbers"
        )
    if target.num_layers in layers:
        raise ExportError(
            f"{what}: the head reads the target's last hidden state, after the final norm, which {dialect.name} "
            "does not give; train it with --feature-layers below the number of layers"
        )
    if 0 in layers and dialect.layer_shift < 0:
        raise ExportError(
            f"{what}: the head reads the target's embedding as hidden state 0, which {dialect.name} cannot number; "
            "vLLM can, or train it with --feature-layers from 1 on"
        )

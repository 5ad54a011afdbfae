"""The parts of Transformers that Slipstream uses, without those that it does not.

Import them from here. `from transformers import AutoModelForCausalLM` reads every file of the package once to learn
what is where, and then imports distributed tensors, PyTorch's compiler, continuous batching and losses of object
detectors, which together take longer than all else that a start does. Here each name comes from the file that defines
it, and what no decoder uses is deferred (`slipstream.models.deferred`). Where the calling program has imported
Transformers itself, its modules are used as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Unpack

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slipstream.models.deferred import defer_package, deferred

_PROCESSORS = "transformers.processing_utils"
_UNUSED = (
    "accelerate",
    "scipy",
    "sklearn",
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    *(
        f"transformers.distributed.{name}"
        for name in (
            "expert_parallel",
            "pipeline_parallel",
            "sharding_utils",
            "tensor_parallel",
        )
    ),
    "transformers.generation.candidate_generator",
    "transformers.generation.continuous_batching.cache",
    "transformers.generation.continuous_batching.continuous_api",
    "transformers.generation.continuous_batching.requests",
    "transformers.generation.continuous_batching.scheduler",
    *(
        f"transformers.integrations.{name}"
        for name in (
            "deepgemm",
            "eager_paged",
            "flash_attention",
            "flex_attention",
            "npu_flash_attention",
            "sonicmoe",
        )
    ),
    _PROCESSORS,
    *(
        f"transformers.loss.loss_{name}"
        for name in (
            "d_fine",
            "deformable_detr",
            "deimv2",
            "for_object_detection",
            "grounding_dino",
            "lw_detr",
            "rf_detr",
            "rt_detr",
        )
    ),
)
"""Modules of which a decoder uses nothing. A name that a release no longer has does no harm."""
_KNOWN = {f"{_PROCESSORS}.Unpack": Unpack}
"""What every model's file imports from a module that runs the whole package's `__init__` again."""


def unused_deferred() -> AbstractContextManager[None]:
    """A block in which what no decoder uses is not imported: for code that makes a model, and so imports its file.

    Where PyTorch's compiler has been imported everything is, because it cannot trace placeholders.
    """
    return nullcontext() if "torch._dynamo" in sys.modules else deferred(_UNUSED, _KNOWN)


_DRAWS = frozenset(
    f"{name}_"
    for name in (
        *("normal", "uniform", "trunc_normal"),
        *("kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform"),
    )
)
"""Functions that fill a tensor with first numbers."""


class _Unnumbered(TorchFunctionMode):
    """Makes models on the meta device without the compiler and SymPy, which its own arithmetic imports.

    First numbers are not drawn: weights are read afterwards. Ranges are made on the CPU where they were to be on the
    meta device; they become frequencies and the like, which are computed again with the weights. Where one meets a
    tensor that is on the meta device, it goes there too. What leaves that device is made where it goes. Other threads
    are not concerned.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func is torch.arange and str(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.empty_like and kwargs.get("device") is not None:
            like = args[0] if args else kwargs["input"]
            return torch.empty(like.shape, dtype=kwargs.get("dtype") or like.dtype, device=kwargs["device"])
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if not any(each.is_meta for each in tensors):
                raise
            args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, kwargs))
            return func(*args, **kwargs)


def model_class(config: Any) -> Any:
    """Transformers' class of language models for a configuration; raises `KeyError` where it has none.

    The files of some families, Gemma 3's among them, look into classes of processors while they are imported.
    """
    mapping = auto_class(config)._model_mapping
    if type(config) not in mapping:
        raise KeyError(type(config))
    try:
        with unused_deferred():
            return mapping[type(config)]
    except Exception:  # what such a look meets depends on the release
        with deferred([name for name in _UNUSED if name != _PROCESSORS]):
            return mapping[type(config)]


def encoder_decoders(config: Any) -> Any | None:
    """The auto class of encoder-decoders that has one for this configuration; None where none has."""
    autos: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    return next((auto for auto in autos if type(config) in auto._model_mapping), None)


def auto_class(config: Any) -> Any:
    """The auto class that makes and loads a language model of this configuration."""
    is_both = getattr(config, "is_encoder_decoder", False)
    return (encoder_decoders(config) if is_both else None) or AutoModelForCausalLM


@contextmanager
def creating_models(config: Any) -> Iterator[None]:
    """A block in which Transformers makes a model whose weights are read afterwards, or never.

    Its file is imported before the block begins. Weights that are tied in the configuration are not tied in here, but
    by `from_pretrained` or `tie_weights`.
    """
    with suppress(KeyError):  # code that a checkpoint brings
        model_class(config)
    with unused_deferred(), _Unnumbered():
        yield


if "transformers" not in sys.modules:
    defer_package("transformers")
    defer_package("transformers.models")

with unused_deferred():
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

__all__ = [
    "CONFIG_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "BaseModelOutput",
    "DynamicCache",
    "EncoderDecoderCache",
    "GenerationConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerFast",
    "auto_class",
    "cached_file",
    "creating_models",
    "eager_mask",
    "encoder_decoders",
    "model_class",
    "unused_deferred",
]

"""Heads in GGUF files for llama.cpp (architectures `dflash` and `eagle3`), as the checkpoints that folders hold.

The tables of names serve both ways: `slipstream export` writes by them. A file holds the draft vocabulary as *absolute*
ids of the target, a folder as offsets; and the numbers of a block head's feature layers are one more than in the
folders of DFlash's authors. EAGLE-3's queries and keys lie as llama.cpp's Llama has them: it rotates neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from slipstream.draft.methods import DFLASH, EAGLE3
from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf, GgufTensor, open_gguf
from slipstream.models.files.gguf_architectures import halves_order
from slipstream.models.files.gguf_family import NO_WEIGHTS, Keys
from slipstream.models.files.gguf_model import GgufMatrix, find_gguf
from slipstream.models.files.gguf_rope import rope_parameters

ARCHITECTURES = (DFLASH.name, EAGLE3.name)
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""GGUF's key after the architecture's name to Transformers' key."""
LAYER_KEYS = ("target_layers", "extract_layers")
"""llama.cpp's key of the hidden states' numbers, now and in its first releases with EAGLE-3."""
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SHARED = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
}
EAGLE3_NAMES: Mapping[str, str] = {
    **_SHARED,
    **{f"midlayer.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in _LAYER.items()},
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}
"""EAGLE's own name of a tensor to the file's."""
DFLASH_NAMES: Mapping[str, str] = {
    **_SHARED,
    "hidden_norm.weight": "enc.output_norm.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
"""DFlash's authors' name of a tensor outside the layers to the file's."""
DFLASH_LAYER_NAMES: Mapping[str, str] = {
    **{f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _LAYER.items()},
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""The same inside a layer."""
_OPTIONAL = re.compile(r"embed_tokens|d2t|confidence_head|markov_head|candidate_selector|_conv\.")
"""Tensors that not every head has. A missing one that a head's keys ask for is found when the head is built."""


def dflash_name(name: str) -> str:
    """The file's name of a block head's tensor, which DFlash's authors call `name`."""
    part, _, rest = name.partition(".")
    if part != "layers":
        return DFLASH_NAMES[name]
    index, _, inner = rest.partition(".")
    return f"blk.{index}.{DFLASH_LAYER_NAMES[inner]}"


def gguf_head_kind(path: str, revision: str | None = None) -> str | None:
    """The method that runs the head in a GGUF file; None where it holds anything else, or the name is of none."""
    file = find_gguf(path, revision)
    architecture = None if file is None else open_gguf(file).architecture
    return architecture if architecture in ARCHITECTURES else None


def read_gguf_head(path: str, revision: str | None, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `read_checkpoint` returns, of a GGUF file: numbers as they are stored, quantised ones in float32.

    On the device `meta` the tensors have shapes only. Raises `ModelError` for a file that holds no head, or a part of
    one.
    """
    return _GgufHead(open_gguf(str(find_gguf(path, revision)))).read(device)


class _GgufHead:
    """The head in a file."""

    def __init__(self, file: Gguf) -> None:
        self.file, self.keys = file, Keys(file)
        if file.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file.path!r} holds a {file.architecture or 'nameless'} model, not a draft head; GGUF heads are "
                f"{' and '.join(ARCHITECTURES)}"
            )
        self.is_block = file.architecture == DFLASH.name
        self.sizes = self._sizes()

    def read(self, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(its configuration, its tensors under the names of folders)"""
        names = dict(self._names())
        theirs = {theirs: ours for ours, theirs in names.items()}
        for name in self.file.tensors:
            if name not in theirs and name.removesuffix(".weight") not in NO_WEIGHTS:
                self._refuse(f"has the tensor {name}, which no {self.file.architecture} head has")
        found = {theirs[name]: entry for name, entry in self.file.tensors.items() if name in theirs}
        raw = self._dflash(found) if self.is_block else self._eagle3()
        tensors = {name: self._tensor(name, entry, device) for name, entry in found.items()}
        if "d2t" in tensors and device != "meta":
            tensors["d2t"] = self._offsets(tensors["d2t"])
        return raw, tensors

    def _sizes(self) -> dict[str, Any]:
        """Transformers' keys of the sizes; float32 numbers as they are usually written."""
        keys, epsilon = self.keys, self.keys.number("attention.layer_norm_rms_epsilon")
        if epsilon is None:
            self._refuse("does not say the epsilon of its norms")
        optional = ("attention.head_count_kv", "attention.key_length", "vocab_size")
        sizes: dict[str, Any] = {
            name: keys.size(key)
            for key, name in SIZES.items()
            if name != "rms_norm_eps" and (key in keys or key not in optional)
        }
        heads = sizes["num_attention_heads"]
        usual = {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads}
        usual["vocab_size"] = len(self.file.fields.get("tokenizer.ggml.tokens") or ())
        sizes = usual | sizes
        rope = rope_parameters(self.file, sizes["head_dim"])
        return {**sizes, "rms_norm_eps": float(f"{epsilon:.6g}"), "rope_parameters": rope}

    def _names(self) -> Iterator[tuple[str, str]]:
        """Names of folders and the file's names of all tensors that such a head may have.

        Raises `ModelError` at the first one that every head has and the file has not.
        """
        named = DFLASH_NAMES if self.is_block else EAGLE3_NAMES
        for ours, theirs in named.items():
            self._check(ours, theirs, is_optional=self.is_block and ours == "lm_head.weight")
            yield ours, theirs
        for layer in range(self.sizes["num_hidden_layers"] if self.is_block else 0):
            for ours, theirs in DFLASH_LAYER_NAMES.items():
                self._check(ours, f"blk.{layer}.{theirs}")
                yield f"layers.{layer}.{ours}", f"blk.{layer}.{theirs}"

    def _check(self, ours: str, theirs: str, is_optional: bool = False) -> None:
        if theirs not in self.file.tensors and not is_optional and not _OPTIONAL.search(ours):
            self._refuse(f"lacks the tensor {theirs}")

    def _dflash(self, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
        """A block head's configuration in the layout of DFlash's authors."""
        keys, sizes = self.keys, self.sizes
        own: dict[str, Any] = {
            "mask_token_id": self.file.fields.get("tokenizer.ggml.mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in self._feature_layers()],
            "causal": False,
        }
        if "sample_from_anchor" in keys:
            own["sample_from_anchor"] = bool(keys.get("sample_from_anchor"))
        if read := tensors.get("confidence_head.proj.weight"):
            own["confidence_head_with_markov"] = read.shape[-1] > sizes["hidden_size"]
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if name in keys:
                own[name] = keys.size(name)
        for name in ("markov_w1", "markov_w2"):
            if found := tensors.get(f"markov_head.{name}.weight"):
                own |= {"projector_type": "dspark", "markov_rank": found.shape[-1]}
        return {**sizes, **self._windows(), "block_size": keys.size("block_size"), "dflash_config": own}

    def _windows(self) -> dict[str, Any]:
        """Which layers see a part of the committed tokens only."""
        if "attention.sliding_window" not in self.keys:
            return {}
        pattern, num_layers = (
            self.keys.get("attention.sliding_window_pattern"),
            self.sizes["num_hidden_layers"],
        )
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            self._refuse(f"does not say which of its {num_layers} layers have a sliding window")
        return {
            "sliding_window": self.keys.size("attention.sliding_window"),
            "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        }

    def _eagle3(self) -> dict[str, Any]:
        """An EAGLE-3 head's configuration in EAGLE's own layout."""
        if self.sizes["num_hidden_layers"] != 1:
            self._refuse(
                f"has {self.sizes['num_hidden_layers']} layers; EAGLE-3 heads in GGUF files have one"
            )
        return {
            **self.sizes,
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": self.keys.size("target_hidden_size"),
            "norm_before_residual": bool(self.keys.get("norm_before_residual", False)),
            "norm_before_fc": bool(self.keys.get("norm_before_fc", False)),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self._feature_layers()},
        }

    def _feature_layers(self) -> list[int]:
        """In Slipstream's numbers, as llama.cpp has them too."""
        layers = next((self.keys.get(key) for key in LAYER_KEYS if key in self.keys), None)
        if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
            self._refuse(
                f"lacks {self.file.architecture}.{LAYER_KEYS[0]}, the layers of the target that it reads"
            )
        return layers

    def _tensor(self, name: str, entry: GgufTensor, device: str) -> Tensor:
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        part = re.search(r"\.([qk])_proj\.weight$", name)
        order = None
        if part is not None and not self.is_block:
            num_heads = self.sizes[heads[part[1]]]
            if entry.shape[0] % (2 * num_heads):
                self._refuse(
                    f"has {entry.name} of {entry.shape[0]} rows, which {num_heads} heads cannot share"
                )
            order = halves_order(entry.shape[0], num_heads)
        if device == "meta":
            return torch.empty(entry.shape, dtype=entry.format.dtype or torch.float32, device=device)
        if entry.format.dtype is None:
            if len(entry.shape) != 2:
                self._refuse(f"holds {entry.format.name} blocks in {entry.name}, which is no matrix")
            return GgufMatrix(entry, name, order).widened(0, entry.shape[0])
        numbers = entry.numbers()
        return numbers.clone() if order is None else numbers[order]

    def _offsets(self, ids: Tensor) -> Tensor:
        """[draft vocab]: what is added to the head's ids to get the file's, the target's."""
        vocab_size = self.sizes["vocab_size"]
        is_map = ids.dtype in (torch.int32, torch.int64) and ids.ndim == 1
        if (
            not is_map
            or len(set(ids.tolist())) != len(ids)
            or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
        ):
            self._refuse(
                f"has a d2t that is no one-to-one map of the head's tokens into the target's {vocab_size}; GGUF files "
                "hold absolute ids, not offsets"
            )
        return ids.to(torch.int64) - torch.arange(len(ids))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self.file.path!r} {why}")

"""Heads read for conversion, in the dtype of their file, and written as the folders that engines load."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.checkpoints import TargetShape, check_fits, read_checkpoint, write_checkpoint
from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.medusa import WEIGHT_FILES, MedusaHeads, load_medusa, save_medusa
from slipstream.draft.methods import EAGLE, EAGLE3
from slipstream.tools.export.checkpoints.eagle_dialects import EagleDialect, check_head
from slipstream.tools.export.checkpoints.target_files import TargetFiles


@dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint:
    """The checkpoints that an engine must load, and what its user must know of them."""

    target: Path | None = None
    """None: the engine loads the record's target as it is."""
    draft: Path | None = None
    """None: the engine loads the record's draft model or head as it is, or the record has none."""
    files: tuple[Path, ...] = ()
    """All files that were written."""
    notes: tuple[str, ...] = ()
    """A line each, for the user."""


SHIFTS = {0: "the layer that reads it", -1: "the layer that wrote it"}


def read_head(path: str, target: TargetShape, revision: str | None = None) -> EagleHead:
    """The head in a folder or on the hub; raises `ModelError` where it is none or does not fit `target`.

    All tensors get the widest dtype of the file, so that no value changes. `embedding` is None where the head has
    none or a copy of the target's.
    """
    _, tensors = read_checkpoint(path, revision=revision)
    head = read_eagle(path, target, revision=revision)
    dtype = _widest(tensors)
    head.requires_grad_(False).to(dtype)
    if head.embedding is not None:
        head.embedding = head.embedding.to(dtype)
    return head


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of floating point that holds every value of a file."""
    kinds = (tensor.dtype for tensor in tensors.values())
    return functools.reduce(torch.promote_types, (kind for kind in kinds if kind.is_floating_point))


def write_eagle(
    head: EagleHead,
    dialect: EagleDialect,
    target: TargetFiles,
    folder: Path,
    *,
    path: str,
    layout: str | None = None,
    num_speculative_tokens: int = 4,
) -> ConvertedCheckpoint:
    """Write `head`, which was read from `path`, for an engine; `layout` is EAGLE's own or `speculators`.

    Raises `ExportError` where the engine would not run the head as it was trained.
    """
    check_head(dialect, head, target, path)
    usual = (
        "speculators" if head.config.norm_queries else {1: EAGLE.name, 3: EAGLE3.name}[head.config.version]
    )
    layout = layout or usual
    save_eagle(head, folder, target=target.path, layout=layout, num_speculative_tokens=num_speculative_tokens)
    config, tensors = read_checkpoint(str(folder))
    tensors = _tensors(tensors, head, dialect)
    if dialect.all_tensors:
        tensors = _filled(tensors, head, target)
    write_checkpoint(folder, _config(config, head, dialect, target), tensors)
    files = (folder / "config.json", folder / "model.safetensors")
    return ConvertedCheckpoint(draft=folder, files=files, notes=tuple(_notes(head, dialect)))


def _config(
    written: Mapping[str, Any], head: EagleHead, dialect: EagleDialect, target: TargetFiles
) -> dict[str, Any]:
    config, ours = dict(written), head.config
    inner = config.get("transformer_layer_config", config)
    inner |= {
        # Two names of one thing: which one is read depends on the Transformers that an engine comes with.
        "dtype": _name_of(head.fc.weight.dtype),
        "torch_dtype": _name_of(head.fc.weight.dtype),
        **{
            name: getattr(target.config, name, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
    }
    if ours.rope_parameters.get("rope_type", "default") != "default":
        inner["rope_scaling"] = dict(ours.rope_parameters)
    if (
        "speculators_model_type" in config
    ):  # its own names of architectures and layers hold for all its readers
        return config
    config["architectures"] = [dialect.architectures[ours.version]]
    config["bias"] = ours.fc_bias or dialect.fc_bias[ours.version] == "always"
    if ours.version == 1:
        return config
    layers = [layer + dialect.layer_shift for layer in ours.feature_layers]
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
    config["eagle_aux_hidden_state_layer_ids"] = layers
    config["num_aux_hidden_states"] = len(layers)
    return config


def _tensors(tensors: Mapping[str, Tensor], head: EagleHead, dialect: EagleDialect) -> dict[str, Tensor]:
    written = dict(tensors)
    wanted = dialect.fc_bias[head.config.version]
    if wanted == "always" and "fc.bias" not in written:
        written["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=head.fc.weight.dtype)
    if wanted == "never":
        written.pop("fc.bias", None)  # `check_head` lets zeros through only
    return written


def _filled(tensors: Mapping[str, Tensor], head: EagleHead, target: TargetFiles) -> dict[str, Tensor]:
    """Add the tensors that EAGLE's layout may leave out: the target's embedding, a map of the whole vocabulary."""
    size = head.config.vocab_size
    whole = {
        "embed_tokens.weight": target.embed(torch.arange(size)).to(head.fc.weight.dtype),
        "d2t": torch.zeros(size, dtype=torch.int64),
        "t2d": torch.ones(size, dtype=torch.bool),
    }
    return {**whole, **tensors}


def _notes(head: EagleHead, dialect: EagleDialect) -> list[str]:
    notes = []
    if head.embedding is None:
        notes.append(f"the head reads the target's embedding, which {dialect.name} shares with it")
    if head.config.version == 3:
        layers = [layer + dialect.layer_shift for layer in head.config.feature_layers]
        where = "in the head's config.json" if dialect.layers_in_head else "in the settings"
        counted = SHIFTS[dialect.layer_shift]
        notes.append(f"hidden states {layers}, {where}: {dialect.name} numbers a hidden state by {counted}")
    if head.config.draft_vocab_size < head.config.vocab_size:
        notes.append(f"the draft vocabulary of {head.config.draft_vocab_size} tokens is an offset map (d2t)")
    return notes


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_medusa(path: str, target: TargetFiles, revision: str | None = None) -> MedusaHeads:
    """The heads in a folder or on the hub, in the widest dtype of their file; raises `ModelError`."""
    _, tensors = read_checkpoint(path, revision=revision, weight_files=WEIGHT_FILES)
    heads = load_medusa(path, _not_called, revision)
    check_fits(path, heads.config.hidden_size, heads.config.vocab_size, target)
    return heads.requires_grad_(False).to(_widest(tensors))


def write_medusa(heads: MedusaHeads, target: TargetFiles, folder: Path) -> ConvertedCheckpoint:
    """Write `heads` for vLLM up to 0.32; heads that share the target's output layer get a copy of it."""
    shared = heads.config.shares_lm_head
    save_medusa(heads, folder, lm_head=target.output_layer() if shared else None)
    notes = ["vLLM drafts a greedy chain with Medusa heads, one token a head"]
    if shared:
        notes.append("the file holds a copy of the target's output layer, which the heads share")
    files = (folder / "config.json", folder / WEIGHT_FILES[0])
    return ConvertedCheckpoint(draft=folder, files=files, notes=tuple(notes))


def _not_called(states: torch.Tensor) -> torch.Tensor:
    raise AssertionError("heads that are only read are not run")

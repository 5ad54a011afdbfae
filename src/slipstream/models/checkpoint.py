"""A checkpoint that can be loaded, and its weights in a Transformers model: all of them, and no others.

Tensors that the model is known not to read are left in the file, where a drafter may read them (`unused_tensors`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ModelError
from slipstream.models.configuration import load_config, meta_model, read_generation_config
from slipstream.models.encoder_decoder import as_decoder
from slipstream.models.files.folder import as_transformers_reads, check_weight_files
from slipstream.models.files.gguf import Gguf, open_gguf
from slipstream.models.files.gguf_architectures import read_config
from slipstream.models.files.gguf_model import GgufPrediction, find_gguf, read_gguf_model
from slipstream.models.files.lora import apply_adapter, chosen_adapter
from slipstream.models.files.quantised_folder import read_quantised
from slipstream.models.files.quantized import Quantised, resolve_quantized
from slipstream.models.files.stored import StoredModel
from slipstream.models.files.stored_experts import joined
from slipstream.models.files.unused import UnusedQuantised, UnusedTensors, unused_by
from slipstream.models.huggingface import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    auto_class,
    creating_models,
    model_class,
)
from slipstream.models.linear.low_rank import LowRankChange
from slipstream.models.quiet import one_line, silenced
from slipstream.models.support import check_config, unsupported
from slipstream.models.text_tower import KEY_MAPPING, TextTower, text_tower

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose configuration can be loaded."""

    path: str
    revision: str | None
    trust_remote_code: bool
    config: Any
    """Configuration of the language model."""
    tower: TextTower | None
    adapter: str | None
    gguf: Gguf | None = None
    """The file that the weights are in, where it is a GGUF file."""
    quantised: Quantised | None = None
    """How a folder's weights are quantised, where they are kept so."""

    def stored(self) -> StoredModel | None:
        """The weights, where they are not for Transformers to read."""
        if self.gguf is not None:
            return read_gguf_model(self.gguf, self.config)
        if self.quantised is None:
            return None
        return read_weights(self.path, self.revision, self.quantised, self.config, self.tower)

    def unused_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the model is known not to read, such as the layers of multi-token prediction.

        By their names in the files, and each read when it is first used; of a GGUF file by Transformers' names, and
        numbers for what is quantised.
        """
        if self.gguf is not None:
            return GgufPrediction(self.gguf, self.config)
        if self.quantised is not None:
            method, settings = self.quantised.method, self.quantised.settings
            return UnusedQuantised(self.path, self.revision, method, settings, unused_by(self.config))
        return UnusedTensors(self.path, self.revision, unused_by(self.config))

    @property
    def keeps_codes(self) -> bool:
        """Whether layers can stay as the files hold them, quantised."""
        if self.gguf is not None:
            return any(tensor.format.dtype is None for tensor in self.gguf.tensors.values())
        return self.quantised is not None and self.quantised.is_kept

    @property
    def stores_its_numbers(self) -> bool:
        """Whether the model's weights are those in the files: nothing is dequantised, and no adapter merged."""
        return self.adapter is None and getattr(self.config, "quantization_config", None) is None


def read_weights(
    path: str, revision: str | None, quantised: Quantised, config: Any, tower: TextTower | None
) -> StoredModel:
    """The quantised weights of a folder or hub id; of a `tower`, those of its language model, whose `config` it is."""
    stored = read_quantised(path, revision, quantised.method, quantised.settings, unused_by(config))
    if tower is None:
        return stored
    model = meta_model(config, "eager", False)
    return replace(
        stored,
        tensors=tower.of_language_model(stored.tensors, model),
        matrices=tower.of_language_model(stored.matrices, model),
        converted=tower.of_language_model(stored.converted, model),
    )


def open_checkpoint(path: str, revision: str | None, trust_remote_code: bool, lora: str | None) -> Checkpoint:
    """What a name leads to."""
    file = find_gguf(path, revision)
    if file is not None:
        return _open_gguf(file, trust_remote_code, lora)
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    with one_line(f"cannot look for an adapter next to {path!r}"), silenced():
        adapter = chosen_adapter(path, revision, lora)
    tower = text_tower(config)
    config = config if tower is None else tower.config
    check_config(config)
    quantised = resolve_quantized(path, config, read_by_transformers(config))
    check_weight_files(path)
    return Checkpoint(path, revision, trust_remote_code, config, tower, adapter, quantised=quantised)


def read_by_transformers(config: Any) -> bool:
    """Whether only Transformers knows which tensors of a checkpoint are the weights of a model."""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def _open_gguf(file: str, trust_remote_code: bool, lora: str | None) -> Checkpoint:
    gguf = open_gguf(file)
    config = read_config(gguf)
    check_config(config)
    return Checkpoint(file, None, trust_remote_code, config, None, chosen_adapter(file, None, lora), gguf)


def load_weights(
    source: Checkpoint,
    dtype: torch.dtype,
    attention: str,
    keeps: bool = False,
    can_keep: bool = True,
    narrow: torch.dtype | None = None,
    experts_in: str | None = None,
    keeps_fp8: bool = False,
) -> tuple[Any, str]:
    """The Transformers model, with all of its weights from the checkpoint, and an adapter's changes in them or, of
    quantised layers, besides them.

    Where they are quantised they are converted to `dtype`, or, with `keeps`, kept as they are, if what is to compute
    them can (`can_keep`); then the second result says how (it is empty where none stay so). Those that
    nothing can keep are converted to `narrow`, if that is given, and experts stay in the file until they are packed in
    the format `experts_in`, or as they are (`KEPT`). With `keeps_fp8` those of plain layers in FP8 stay so, without an
    adapter.
    """
    with one_line(f"cannot read the weights of {source.path!r}"), silenced():
        stored = source.stored()
    kept = stored.kind if stored is not None and stored.matrices and keeps else ""
    if kept and not can_keep:
        raise not_kept(source.path, kept)
    if stored is not None and stored.converted and keeps_fp8 and source.adapter is None:
        stored = stored.keeping_fp8(meta_model(source.config, "eager", source.trust_remote_code))
    if stored is None:
        model, loaded = _read_folder(source, dtype, attention)
    else:
        make = _model_class(source, stored)
        if kept:
            stored = _fitted(source, stored, experts_in)
        model, loaded = _read_stored(source, stored, make, dtype, attention, bool(kept), narrow or dtype)
    if source.tower is not None:
        log.info("%s is more than its language model, which alone was loaded", source.tower.family)
    _check_complete(source, loaded)
    changes: Mapping[str, LowRankChange] = {}
    if source.adapter is not None:
        with one_line(f"cannot merge the LoRA adapter {source.adapter!r} into {source.path!r}"), silenced():
            names, stacks = (stored.matrices, stored.stacks) if stored is not None and kept else ((), ())
            model, changes = apply_adapter(model, source.adapter, names, stacks)
    if stored is not None and (kept or stored.narrow):
        with one_line(f"cannot load the weights of {source.path!r}"):
            stored.install(model, changes, dtype)
        kept = stored.kind if stored.stay else ""
    return as_decoder(model), kept


def not_kept(path: str, kind: str) -> ModelError:
    """What is raised where nothing that is to compute them holds a file's quantised weights."""
    return ModelError(
        f"{path!r} holds {kind} weights, which are kept as they are on a CPU, and on a GPU for models that its fused "
        "decoder computes; --dtype bfloat16 widens them"
    )


def _model_class(source: Checkpoint, stored: StoredModel) -> Any:
    """Transformers' class of a model whose weights we read."""
    try:
        return model_class(source.config)
    except KeyError:
        raise ModelError(
            f"{source.path!r} holds {stored.kind} weights of a {source.config.model_type} model, which Transformers "
            "does not have"
        ) from None


def _fitted(source: Checkpoint, stored: StoredModel, experts_in: str | None) -> StoredModel:
    """The weights, once it is sure that they can be kept as they are."""
    try:
        return stored.fit(meta_model(source.config, "eager", source.trust_remote_code), experts_in)
    except ModelError as error:
        raise ModelError(f"{source.path!r}: {error}") from None


def _read_stored(
    source: Checkpoint,
    stored: StoredModel,
    make: Any,
    dtype: torch.dtype,
    attention: str,
    keeps: bool,
    narrow: torch.dtype,
) -> tuple[Any, Mapping[str, Any]]:
    """The Transformers model of weights that we read, and what Transformers says of them."""
    if stored.matrices and not keeps:
        log.warning("%r holds %s weights, which are widened to %s", source.path, stored.kind, dtype)
    if stored.converted:
        log.warning(
            "%r holds %s weights, which are converted to %s while they are read; --quantization int8 keeps 8 bits on "
            "a CPU",
            source.path,
            "/".join(sorted({matrix.kind for matrix in stored.converted.values()})),
            str(narrow).removeprefix("torch."),
        )
    with one_line(f"cannot load the weights of {source.path!r}"), silenced(), creating_models(source.config):
        if keeps:
            state = stored.state(dtype)
        else:
            meta = meta_model(source.config, "eager", source.trust_remote_code)
            state = stored.stacked(meta).widened(dtype, narrow)
        model, loaded = make.from_pretrained(
            None,
            config=source.config,
            state_dict=joined(state | stored.converted_to(narrow), source.config.model_type),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_complete` reports them
        )
        if source.gguf is None:
            read_generation_config(model, source.path, source.revision)
    return model, loaded


def _read_folder(source: Checkpoint, dtype: torch.dtype, attention: str) -> tuple[Any, Mapping[str, Any]]:
    """The Transformers model of a folder or a hub id, and what Transformers says of its weights."""
    from_pretrained: Any = auto_class(source.config).from_pretrained
    path, tower = source.path, source.tower
    options = {} if tower is None else {"key_mapping": KEY_MAPPING}
    with (
        one_line(f"cannot load the weights of {path!r}"),
        silenced(),
        creating_models(source.config),
        as_transformers_reads(path, source.revision) as folder,
    ):
        try:
            model, loaded = from_pretrained(
                folder,
                config=source.config,
                dtype=dtype,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_complete` reports them
                **options,
            )
        except KeyError as error:
            if error.args != (attention,):
                raise
            # Older models look their attention class up by name.
            reason = "its attention does not go through the attention interface"
            raise unsupported(source.config, reason) from None
    if tower is not None:
        unexpected = tower.of_language_model(dict.fromkeys(loaded["unexpected_keys"]), model)
        loaded = {**loaded, "unexpected_keys": set(unexpected)}
    return model, loaded


def _check_complete(source: Checkpoint, loaded: Mapping[str, Any]) -> None:
    """Raise `ModelError` for missing or unknown weights. Transformers would initialise or ignore them."""
    mismatched = {key for key, *_ in loaded["mismatched_keys"]}
    is_unused = unused_by(source.config)
    for what, keys in [
        ("lacks", loaded["missing_keys"]),
        ("has unknown", [key for key in loaded["unexpected_keys"] if not is_unused(key)]),
        ("has misshapen", mismatched),
    ]:
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"the checkpoint {source.path!r} {what} weights: {min(keys)}{more}")


def unused_names(path: str, config: Any) -> Collection[str] | None:
    """The names of the tensors that the model of `config` is known not to read; None for what is not here.

    The headers of the files are read, and nothing else.
    """
    file = find_gguf(path) if Path(path).exists() else None
    if file is not None:
        return GgufPrediction(open_gguf(file), config).keys()
    if not Path(path).is_dir():
        return None
    names = UnusedTensors(path, None, unused_by(config)).keys()
    codes = ("qweight", "weight_packed")  # of GPTQ and AWQ, and of compressed-tensors
    return names | {
        f"{stem}.weight" for stem, _, part in (name.rpartition(".") for name in names) if part in codes
    }

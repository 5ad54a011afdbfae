"""Makes a checkpoint that was written for another engine one that Slipstream loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import reject_unknown
from slipstream.core.model_path import names_gguf
from slipstream.draft.heads.checkpoints import read_checkpoint, write_checkpoint
from slipstream.draft.heads.eagle_files import save_eagle
from slipstream.draft.heads.eagle_head import default_feature_layers
from slipstream.draft.methods import DRAFT_MODELS, EAGLE, EAGLE3
from slipstream.errors import ModelError
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import architecture_of, read_config
from slipstream.models.files.gguf_model import read_gguf_model
from slipstream.models.files.gguf_tokenizer import read_tokenizer
from slipstream.tools.export.checkpoints.convert import EAGLE_VERSIONS, ENGINES, model_of, target_of
from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS
from slipstream.tools.export.checkpoints.gguf_fields import refuse_rounded
from slipstream.tools.export.checkpoints.head_folders import ConvertedCheckpoint, read_head
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's families that become folders, and Transformers' classes of their models."""


def convert_back(record: SpeculativeRecord, engine: str, folder: Path) -> ConvertedCheckpoint:
    """Write into `folder` what Slipstream must load to run `record`, whose checkpoints were made for `engine`.

    Raises `ExportError` or `ModelError` where Slipstream would not run them as that engine does.
    """
    reject_unknown([engine], ENGINES, "engine")
    folder = Path(folder)
    target = _model_back(record.target, folder / "target") if record.target else None
    named = str(target) if target else record.target
    if record.method in EAGLE_VERSIONS:
        return _head_back(record, engine, named, target, folder)
    draft = None
    if record.method in DRAFT_MODELS:
        draft = _model_back(model_of(record), folder / "draft")
    written = tuple(path for path in (target, draft) if path)
    return ConvertedCheckpoint(target=target, draft=draft, files=written, notes=_kept(written))


def _model_back(path: str, folder: Path) -> Path | None:
    """The folder that was written; None for a model that is one already.

    Raises `ExportError` for a family that is not written as a folder, and `ModelError` for a damaged file.
    """
    if not path.lower().endswith(".gguf"):
        return None
    file = open_gguf(path)
    refuse_rounded(file)
    if file.architecture not in ARCHITECTURES or architecture_of(file).experts:
        raise ExportError(
            f"{path!r} holds a {file.architecture} model; read are llama, qwen2 and qwen3: import the "
            "checkpoint that it was made from"
        )
    config, tokenizer = read_config(file), read_tokenizer(file.fields, path)
    config.architectures = [ARCHITECTURES[file.architecture]]
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, role, getattr(tokenizer, role))
    tensors = read_gguf_model(file, config).tensors
    dtype = tensors["model.embed_tokens.weight"].dtype  # vectors were widened when the file was written
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    narrow = {name: each.to(dtype) if each.ndim == 1 else each for name, each in tensors.items()}
    write_checkpoint(folder, config.to_dict(), narrow)
    return folder


def _head_back(
    record: SpeculativeRecord, engine: str, target: str | None, written: Path | None, folder: Path
) -> ConvertedCheckpoint:
    if target is None:
        target_of(record)
    files, model = TargetFiles(str(target)), model_of(record)
    if names_gguf(model):
        read_head(model, files, record.revision)  # the sizes fit the target
        kept = (written,) if written else ()
        return ConvertedCheckpoint(target=written, files=kept, notes=_kept(kept))
    place = folder / record.method
    _folder_head_back(record, engine, files, model, place)
    return ConvertedCheckpoint(
        target=written, draft=place, files=(place, *((written,) if written else ())), notes=_kept([place])
    )


def _folder_head_back(
    record: SpeculativeRecord, engine: str, target: TargetFiles, model: str, place: Path
) -> None:
    raw, tensors = read_checkpoint(model, revision=record.revision)
    if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ModelError(
            f"{model!r} reads the target's last hidden state only (use_aux_hidden_state false), which is not supported"
        )
    head = read_head(model, target, record.revision)
    version = EAGLE_VERSIONS[record.method]
    if head.config.version != version:
        raise ModelError(f"{model!r} is an EAGLE-{head.config.version} head, not an EAGLE-{version} one")
    layout = "speculators" if "speculators_model_type" in raw else {1: EAGLE.name, 3: EAGLE3.name}[version]
    save_eagle(head, place, target=target.path, layout=layout, num_speculative_tokens=record.depth or 4)
    if version == 3 and layout == EAGLE3.name:
        config, tensors = read_checkpoint(str(place))
        layers = _layers(record, engine, raw, target)
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
        write_checkpoint(place, config, tensors)
        read_head(str(place), target)  # the layers exist


def _layers(record: SpeculativeRecord, engine: str, raw: Mapping[str, Any], target: TargetFiles) -> list[int]:
    """Which hidden states the head reads, in our numbers: as the engine finds them in the head or in its settings.

    Where neither says, they are the engines' own defaults.
    """
    dialect = DIALECTS[engine]
    listed = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    listed = listed or raw.get("eagle_aux_hidden_state_layer_ids")
    given = record.head.aux_layers if record.head is not None else None
    if given is not None and not (listed and dialect.layers_in_head):
        return list(given.as_convention("before_layer").ids)
    if listed:
        return [layer - dialect.layer_shift for layer in listed]
    if target.num_layers < 10:
        raise ExportError(
            "neither the settings nor the head say which hidden states it reads "
            f"(eagle_aux_hidden_state_layer_ids), and a target of {target.num_layers} layers has no usual ones"
        )
    return list(default_feature_layers(target.num_layers))


def _kept(written: Any) -> tuple[str, ...]:
    return () if written else ("Slipstream loads the checkpoints as they are",)

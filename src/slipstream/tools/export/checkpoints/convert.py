"""Writes what another engine must load: the target and the draft model or head of a speculative setting."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import reject_unknown
from slipstream.core.model_path import names_gguf
from slipstream.draft.heads.dflash_files import read_dflash, save_dflash
from slipstream.draft.methods import DFLASH, DRAFT_MODELS, EAGLE, EAGLE3, HYDRA, MEDUSA, MTP, PEAGLE
from slipstream.models import load_tokenizer
from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS
from slipstream.tools.export.checkpoints.gguf_dflash import dflash_writer
from slipstream.tools.export.checkpoints.gguf_eagle3 import eagle3_writer
from slipstream.tools.export.checkpoints.gguf_models import finish, model_writer
from slipstream.tools.export.checkpoints.head_folders import (
    ConvertedCheckpoint,
    read_head,
    read_medusa,
    write_eagle,
    write_medusa,
)
from slipstream.tools.export.checkpoints.openvino_folders import write_openvino
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError

ENGINES = ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "openvino", "transformers")
EAGLE_VERSIONS = {EAGLE.name: 1, EAGLE3.name: 3, PEAGLE.name: 3}
NEAREST_TO_HEADS = "use a draft model, or train an EAGLE-3 head with `slipstream train eagle3`"


def convert(
    record: SpeculativeRecord,
    engine: str,
    folder: Path,
    *,
    version: str | None = None,
    layout: str | None = None,
) -> ConvertedCheckpoint:
    """Write into `folder` what `engine` must load to run `record`.

    `version` is the engine's, such as 0.33; None: the newest that is known. `layout="speculators"` writes an EAGLE-3
    head for vLLM in that library's form instead of EAGLE's own. Raises `ExportError` where the engine would not run the
    checkpoint as it was trained, with what can be done instead; `ModelError` where it cannot be read.
    """
    reject_unknown([engine], ENGINES, "engine")
    if layout not in (None, EAGLE3.name, "speculators"):
        raise ExportError(f"the layout of an EAGLE-3 head is eagle3 or speculators, got {layout!r}")
    if layout == "speculators" and engine != "vllm":
        raise ExportError("the speculators layout is read by vLLM only; leave the layout out")
    folder = Path(folder)
    if engine == "llama_cpp":
        return _llama_cpp(record, folder)
    if engine == "openvino":
        return write_openvino(record, folder)
    if record.method in EAGLE_VERSIONS:
        return _eagle(record, engine, folder, layout)
    if record.method == MEDUSA.name:
        return _medusa(record, engine, folder, version)
    if record.method == HYDRA.name:
        raise ExportError(f"no other engine runs Hydra heads; {NEAREST_TO_HEADS}")
    if record.method == MTP.name:
        return ConvertedCheckpoint(notes=("the target is loaded as it is: the layer is in its checkpoint",))
    if record.method == DFLASH.name and names_gguf(record.model or ""):
        return _block_folder(record, folder)
    as_is = {**dict.fromkeys(DRAFT_MODELS, "draft model"), DFLASH.name: "head"}.get(record.method)
    notes = () if as_is is None else (f"the target and the {as_is} are loaded as they are",)
    return ConvertedCheckpoint(notes=notes)


def _eagle(record: SpeculativeRecord, engine: str, folder: Path, layout: str | None) -> ConvertedCheckpoint:
    if engine not in DIALECTS:
        raise ExportError(f"Transformers runs no EAGLE heads; {NEAREST_TO_HEADS.split(',')[0]}")
    target, model = target_of(record), model_of(record)
    return write_eagle(
        read_head(model, target, record.revision),
        DIALECTS[engine],
        target,
        folder,
        path=model,
        layout=layout,
        num_speculative_tokens=record.depth or 4,
    )


def _medusa(record: SpeculativeRecord, engine: str, folder: Path, version: str | None) -> ConvertedCheckpoint:
    if engine != "vllm":
        raise ExportError(f"{engine} runs no Medusa heads (vLLM up to 0.32 does); {NEAREST_TO_HEADS}")
    if version is None or _number(version) >= (0, 33):
        raise ExportError(f"vLLM removed Medusa in 0.33; export for version 0.32, or {NEAREST_TO_HEADS}")
    target = target_of(record)
    return write_medusa(read_medusa(model_of(record), target, record.revision), target, folder)


def _block_folder(record: SpeculativeRecord, folder: Path) -> ConvertedCheckpoint:
    """The head of a GGUF file as a folder, since other engines read no such files of heads."""
    target, model = target_of(record), model_of(record)
    save_dflash(read_dflash(model, target, revision=record.revision), folder, target=target.path)
    return ConvertedCheckpoint(draft=folder, files=(folder,), notes=("the target is loaded as it is",))


def _llama_cpp(record: SpeculativeRecord, folder: Path) -> ConvertedCheckpoint:
    """The target too, unless it is a GGUF file: llama.cpp reads no other. Nothing is written where either cannot be."""
    if record.method in (MEDUSA.name, HYDRA.name, EAGLE.name, PEAGLE.name):
        raise ExportError(f"llama.cpp runs no {record.method} heads; {NEAREST_TO_HEADS}")
    if record.method == MTP.name:
        raise ExportError(
            "the layer for multi-token prediction is not written into GGUF files here; convert the target with "
            "llama.cpp's own convert_hf_to_gguf.py, which keeps it"
        )
    draft = None
    if record.method in (*DRAFT_MODELS, EAGLE3.name, DFLASH.name):
        draft = folder / f"{'draft' if record.method in DRAFT_MODELS else record.method}.gguf"
    target = None if names_gguf(target_of(record).path) else folder / "target.gguf"
    writers = []
    notes = ["16-bit and 32-bit weights are written as they are; llama-quantize makes smaller files of them"]
    if target is None:
        notes.append("the target is loaded as it is")
    if draft is not None and record.method == EAGLE3.name:
        files, model = target_of(record), model_of(record)
        head = read_head(model, files, record.revision)
        writers.append(eagle3_writer(head, files, load_tokenizer(files.path), draft, model))
        if head.config.draft_vocab_size < head.config.vocab_size:
            notes.append(
                "the draft vocabulary is a map of absolute ids (d2t); folders of other engines hold offsets"
            )
    elif draft is not None and record.method == DFLASH.name:
        files, model = target_of(record), model_of(record)
        writers.append(dflash_writer(files, load_tokenizer(files.path), draft, model, record.revision))
    elif draft is not None:
        writers.append(model_writer(model_of(record), draft))
    if target is not None:
        writers.append(model_writer(target_of(record).path, target))
    folder.mkdir(parents=True, exist_ok=True)
    for writer in writers:
        finish(writer)
    return ConvertedCheckpoint(
        target=target,
        draft=draft,
        files=tuple(file for file in (target, draft) if file is not None),
        notes=tuple(notes),
    )


def target_of(record: SpeculativeRecord) -> TargetFiles:
    """The record's target; raises `ExportError` where it names none."""
    if record.target is None:
        raise ExportError("a checkpoint is converted for its target, and the setting names none")
    return TargetFiles(record.target)


def model_of(record: SpeculativeRecord) -> str:
    """The record's draft model or head; raises `ExportError` where it names none."""
    if record.model is None:
        raise ExportError(f"method {record.method} has no model to convert: name the folder of its draft")
    return record.model


def _number(version: str) -> tuple[int, int]:
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise ExportError(f"a version is written as 0.32, got {version!r}") from None
    return major, minor

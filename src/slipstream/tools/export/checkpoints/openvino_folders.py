"""Prepares checkpoints for OpenVINO GenAI, whose models are made by its own `optimum-cli`.

The tracing of a model into OpenVINO's form is that tool's work, in an environment of its own. What is written here is
what it must be given, and the commands.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.methods import DFLASH, EAGLE, EAGLE3, HYDRA, MEDUSA
from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS
from slipstream.tools.export.checkpoints.head_folders import ConvertedCheckpoint, read_head, write_eagle
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError

SCRIPT = "convert.sh"
ONLY = "OpenVINO GenAI runs draft models, EAGLE-3 heads and prompt lookup"


def write_openvino(record: SpeculativeRecord, folder: Path) -> ConvertedCheckpoint:
    """Write `convert.sh`, and the head that it reads; running it makes `target` and `draft` next to it.

    Raises `ExportError` for what OpenVINO GenAI cannot run.
    """
    if record.target is None:
        raise ExportError("a checkpoint is converted for its target, and the setting names none")
    if record.method in (EAGLE.name, DFLASH.name, MEDUSA.name, HYDRA.name):
        raise ExportError(f"{ONLY}, not {record.method} heads; train one with `slipstream train eagle3`")
    commands = [_command(record.target, "target")]
    notes = [
        f"run {SCRIPT} where optimum-intel is installed; it makes the models that the setting names",
        f"{SCRIPT} has weights rounded to 16 bits (--weight-format fp16); change it there for another format",
    ]
    files: tuple[Path, ...] = ()
    draft = None
    if record.method == EAGLE3.name and record.model is not None:
        target = TargetFiles(record.target)
        head = read_head(record.model, target, record.revision)
        written = write_eagle(head, DIALECTS["openvino"], target, folder / "head", path=record.model)
        files, draft = written.files, folder / "draft"
        commands += [_command("head", "draft") + " --trust-remote-code", _name_layers(head)]
        notes += [
            *written.notes,
            "optimum-cli also needs the packages diffusers and einops for an EAGLE-3 head",
        ]
    elif record.model is not None:
        commands.append(_command(record.model, "draft"))
        draft = folder / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / SCRIPT
    script.write_text(
        '#!/bin/sh\nset -e\ncd "$(dirname "$0")"\n' + "\n".join(commands) + "\n", encoding="utf-8"
    )
    return ConvertedCheckpoint(
        target=folder / "target", draft=draft, files=(*files, script), notes=tuple(notes)
    )


def _name_layers(head: EagleHead) -> str:
    """A command that writes the hidden states' numbers into the converted head.

    optimum-cli leaves them out, and GenAI then takes its own, which are for targets of ten layers and more.
    """
    shift = DIALECTS["openvino"].layer_shift
    layers = " ".join(str(layer + shift) for layer in head.config.feature_layers)
    mode = '<eagle3_mode value="True" />'
    return f"sed -i.bak 's|{mode}|{mode}<hidden_layers_list value=\"{layers}\" />|' draft/openvino_model.xml"


def _command(model: str, output: str) -> str:
    given = model if model == "head" or not Path(model).exists() else str(Path(model).resolve())
    words = ["optimum-cli", "export", "openvino", "--model", given, "--task", "text-generation-with-past"]
    return shlex.join([*words, "--weight-format", "fp16", output])

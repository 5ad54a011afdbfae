"""Draft models with a mask token, for the embedded target."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from slipstream.assets import EMBEDDED_DRAFT
from tests.kit.folders import kept_folder

MASK = 7


@functools.cache
def pard_folder(mask: Any = MASK) -> str:
    """The embedded draft model with a mask token, which it was not trained to read: its drafts beyond the first are
    random."""
    folder = kept_folder()
    for file in Path(EMBEDDED_DRAFT).iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask, "spd_type": "pard"}))
    return str(folder)


@functools.cache
def pard2_folder(**changes: Any) -> str:
    """The same with a random projection of two of the embedded target's hidden states."""
    folder = kept_folder()
    for file in Path(pard_folder()).iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    own = {"pard2": True, "spd_type": "pard2", "pard2_target_layers": [-1, -4], "pard2_target_dim": 640}
    own |= {"pard2_scale": 0.005, "pard2_proj_bias": False, **changes}
    (folder / "config.json").write_text(json.dumps(config | own))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(config["hidden_size"], 640, generator=generator) * 0.05
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")
    return str(folder)

"""Takes out of a folder of learning what others can use: a version's tensors, or the records as data to train on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.learn.disk_ring import read_ring
from slipstream.learn.folder import LearnFolder
from slipstream.learn.records import Purpose
from slipstream.learn.versions import ABOUT, WEIGHTS, Version, VersionStore


def export_version(folder: LearnFolder, version_id: str, output: Path) -> Version:
    """Copy a version's tensors and its description to a folder, once its sha256 has been found right.

    Raises `LearnError` for a version that is not there or damaged, `OSError` where it cannot be written.
    """
    store = VersionStore(folder)
    version = store.verify(version_id)
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(store.weights_file(version_id), output / WEIGHTS)
    text = json.dumps(asdict(version), indent=1, ensure_ascii=False)
    (output / ABOUT).write_text(text + "\n", encoding="utf-8")
    return version


def exported_rows(
    folder: LearnFolder,
    purpose: Purpose | None = None,
    tenant: str | None = None,
    task: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The records as `slipstream train` reads them: `token_ids`, `answer_spans` and where each came from.

    What is held out to judge versions is among them only if asked for.
    """
    for record in read_ring(folder, purpose, tenant, task):
        prompt = len(record.prompt_ids)
        yield {
            "task": record.task,
            "source": "served",
            "line": record.number,
            "purpose": str(record.purpose),
            "token_ids": record.text_ids.tolist(),
            "answer_spans": [[prompt, prompt + len(record.token_ids)]],
            "finish_reason": record.finish_reason,
            "temperature": record.temperature,
            "seed": record.seed,
            "draft_version": record.draft_version,
        }

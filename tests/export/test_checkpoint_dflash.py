"""DFlash heads go to other engines as they are, and where an engine would not get them, the export is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.draft.methods import DFLASH
from slipstream.tools.export.checkpoints import convert
from slipstream.tools.export.refusals import ExportError
from tests.export.test_checkpoint_eagle import record


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_engines_with_folders_load_the_head_as_it_is(engine: str, tmp_path: Path) -> None:
    made = convert(record("head", method=DFLASH.name), engine, tmp_path / "out")
    assert (made.target, made.draft, made.files) == (None, None, ())
    assert made.notes == ("the target and the head are loaded as they are",)


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [("llama_cpp", "not written into GGUF files.*--target-model-dir"), ("openvino", "not dflash heads")],
)
def test_a_head_that_would_be_left_out_is_refused(engine: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=complaint):
        convert(record("head", method=DFLASH.name), engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Scripts as vLLM's users have them run when one line is changed: the import."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET

SCRIPTS = sorted((Path(__file__).parent / "vllm_scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, shared_engines: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, folder in (("MODEL", EMBEDDED_TARGET), ("DRAFT", EMBEDDED_DRAFT), ("EAGLE3", EMBEDDED_EAGLE3)):
        monkeypatch.setenv(name, folder)
    lines = script.read_text().splitlines()
    [line] = [number for number, text in enumerate(lines) if text.startswith("from vllm ")]
    lines[line] = lines[line].replace("from vllm ", "from slipstream ")
    exec(compile("\n".join(lines), str(script), "exec", dont_inherit=True), {"__name__": "__main__"})
    if any(
        text.strip().startswith("print(") for text in lines
    ):  # the others assert what they want themselves
        assert capsys.readouterr().out.strip()

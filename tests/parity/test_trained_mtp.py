"""A layer for multi-token prediction that was trained on the spot is accepted, and examined."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from trained_heads import trained_heads

from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.tools.doctor import CheckOutcome, canary, examination, examine
from slipstream.tools.doctor.canary import Canary


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "NUM_PROMPTS", 6)


def test_it_is_accepted_and_fed_as_it_was_trained() -> None:
    findings = {each.check: each for each in examine(EMBEDDED_TARGET, trained_heads("mtp"))}
    assert findings["kind"].text.endswith("has a draft of kind mtp")
    assert "mtp_layers.0 (layout speculators)" in findings["checkpoint"].text
    assert all(each.verdict is CheckOutcome.OK for each in findings.values())
    assert "hidden 'pre' instead of 'post'; order 'he' instead of 'eh'" in findings["conventions"].text


def test_a_way_to_feed_it_that_accepts_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(target: Engine, speculative: SpeculativeConfig) -> Canary:
        is_better = speculative.options.get("order") == "he"
        return Canary(first=0.5, length=2.1 if is_better else 1.8, num_failures=0)

    monkeypatch.setattr(examination, "run_canary", measured)
    findings = {each.check: each for each in examine(EMBEDDED_TARGET, trained_heads("mtp"))}
    assert findings["conventions"].verdict is CheckOutcome.FAULT
    assert "with order 'he' instead of 'eh' τ is 2.10 instead of 1.80" in findings["conventions"].text


def test_the_layer_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    """Under DeepSeek's names, in a shard of its own; doctor is given the word `mtp`."""
    folder = tmp_path / "target"
    shutil.copytree(EMBEDDED_TARGET, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj"}
    names |= {"final_layernorm": "shared_head.norm"}
    tensors = {}
    for name, tensor in load_file(Path(trained_heads("mtp")) / "model.safetensors").items():
        part, _, ending = name.removeprefix("mtp_layers.0.").rpartition(".")
        tensors[f"model.layers.6.{names.get(part, part)}.{ending}"] = tensor
    save_file(tensors, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    findings = {each.check: each for each in examine(str(folder), "mtp")}
    assert findings["kind"].text == "the target has a draft of kind mtp"
    assert "the layer model.layers.6 (layout deepseek)" in findings["checkpoint"].text
    assert findings["canary"].verdict is CheckOutcome.OK

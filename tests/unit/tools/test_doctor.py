"""The doctor tells a draft that fits from one that does not, and names the fault."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.dflash_files import read_dflash, save_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.heads.dflash_layouts import DEEPSPEC, LAYOUTS
from slipstream.draft.heads.eagle_files import save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_model, load_tokenizer
from slipstream.tools.doctor import CheckOutcome, Finding, canary, examine
from slipstream.tools.doctor.canary import Canary
from slipstream.tools.doctor.examination import kind_of
from slipstream.tools.doctor.variations import variations
from tests.kit.block_heads import block_head, random_block_head
from tests.kit.mtp_targets import mtp_target
from tests.kit.small_llama import sizes


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """An EAGLE-3 head with random weights, for the embedded target."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "intermediate_size": 64, "num_attention_heads": 5, "num_key_value_heads": 5}
    config = EagleConfig(
        version=3,
        target_hidden_size=320,
        vocab_size=4096,
        draft_vocab_size=4096,
        head_dim=64,
        feature_layers=(1, 3, 5),
        **sizes,
    )
    save_eagle(EagleHead(config), tmp_path / "head", target="embedded")
    return tmp_path / "head"


def faults(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.text for finding in findings if finding.verdict is CheckOutcome.FAULT}


def test_a_good_draft_has_no_fault() -> None:
    findings = list(examine(EMBEDDED_TARGET, EMBEDDED_DRAFT))
    assert faults(findings) == {}
    assert [finding.check for finding in findings] == ["kind", "tokenizer", "checkpoint", "context", "canary"]
    assert "0.6" in findings[-1].text


def test_an_untrained_head_is_found_out_by_the_canary(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "NUM_PROMPTS", 4)
    found = faults(list(examine(EMBEDDED_TARGET, str(head))))
    assert list(found) == ["canary"]
    assert "train it longer, or use one for this target" in found["canary"]


def test_another_vocabulary_ends_the_examination(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(load_tokenizer(EMBEDDED_TARGET))
    tokenizer.add_tokens(["<another>"])
    config = LlamaConfig(**sizes(32, 1, 1, vocab=len(tokenizer), inner=32))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    findings = list(examine(EMBEDDED_TARGET, str(tmp_path)))
    assert list(faults(findings)) == ["tokenizer"]
    assert "<another>" in findings[-1].text
    assert findings[-1].check == "tokenizer"


def test_a_broken_checkpoint_is_named(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weights"] = tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, head / "model.safetensors")
    found = faults(list(examine(EMBEDDED_TARGET, str(head))))
    assert list(found) == ["checkpoint"]
    assert "missing midlayer.mlp.up_proj.weight" in found["checkpoint"]


def edit(head: Path, **changes: Any) -> None:
    config = json.loads((head / "config.json").read_text())
    for name, value in changes.items():
        config.pop(name) if value is None else config.update({name: value})
    (head / "config.json").write_text(json.dumps(config))


@pytest.fixture
def poor_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is heard at once: what it hears of a head without training is tested above."""
    monkeypatch.setattr(
        "slipstream.tools.doctor.examination.run_canary", lambda target, speculative: Canary(0.01, 1.01, 0)
    )


@pytest.mark.usefixtures("poor_canary")
def test_what_engines_read_otherwise_is_pointed_out(head: Path) -> None:
    edit(head, norm_before_residual=None, eagle_config=None, max_position_embeddings=512)
    edit(head, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    warnings = {f.check for f in examine(EMBEDDED_TARGET, str(head)) if f.verdict is CheckOutcome.WARNING}
    assert warnings == {"norm flags", "layers", "context", "rope"}


def test_a_convention_that_does_better_is_named(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary that sings best where hidden states are numbered one lower than the configuration says."""

    def run_canary(target: Any, speculative: Any) -> Canary:
        config = json.loads((Path(speculative.options["model"]) / "config.json").read_text())
        moved = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
        return Canary(0.6, 2.0, 0) if moved else Canary(0.2, 1.2, 0)

    monkeypatch.setattr("slipstream.tools.doctor.examination.run_canary", run_canary)
    found = faults(list(examine(EMBEDDED_TARGET, str(head))))
    assert list(found) == ["conventions"]
    assert (
        "with hidden states [0, 2, 4] instead of [1, 3, 5] τ is 2.00 instead of 1.20" in found["conventions"]
    )


def sings_for(monkeypatch: pytest.MonkeyPatch, **options: str) -> list[dict[str, Any]]:
    """A canary with a τ of 2 for these options and 1.5 for others; returns the options that it is asked for."""
    asked: list[dict[str, Any]] = []

    def run_canary(target: Any, speculative: Any) -> Canary:
        asked.append(dict(speculative.options))
        return Canary(0.5, 2.0 if options.items() <= speculative.options.items() else 1.5, 0)

    monkeypatch.setattr("slipstream.tools.doctor.examination.run_canary", run_canary)
    return asked


@pytest.mark.parametrize(
    ("better", "sentence"),
    [
        ({"hidden": "pre"}, "the hidden state before the target's final norm instead of behind it"),
        ({"order": "he"}, "the hidden state first instead of the embedding first"),
        (
            {"recycled": "y"},
            "the layer's output before its norm recycled instead of the output behind its norm",
        ),
    ],
)
def test_a_prediction_layer_that_is_fed_otherwise_is_found_out(
    better: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sings_for(monkeypatch, **better)
    found = faults(list(examine(mtp_target("llama").folder, "mtp")))
    assert list(found) == ["conventions"]
    assert f"with {sentence} τ is 2.00 instead of 1.50" in found["conventions"]


def test_a_prediction_layer_that_is_fed_as_it_should_is_told_what_others_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MiMo's has its hidden state first, so the other order is the one that is tried."""
    asked = sings_for(monkeypatch)
    findings = list(examine(mtp_target("mimo").folder, "mtp"))
    assert faults(findings) == {}
    assert asked == [{}, {"hidden": "pre"}, {"order": "eh"}, {"recycled": "y"}]
    assert "τ is 2.00 as it is read" in findings[-1].text
    assert "τ 2.00 with the embedding first instead of the hidden state first" in findings[-1].text


def test_a_block_head_whose_rows_are_read_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but one thing is as the checkpoint says, and its weights are the same."""
    folder = block_head("mask")
    tried: list[DFlashConfig] = []

    def run_canary(target: Engine, speculative: SpeculativeConfig) -> Canary:
        head = read_dflash(speculative.options["model"], target.model)
        tried.append(head.config)
        return Canary(0.5, 3.0 if head.config.from_anchor else 1.05, 0)

    monkeypatch.setattr("slipstream.tools.doctor.examination.run_canary", run_canary)
    found = faults(list(examine(EMBEDDED_TARGET, folder)))
    mine, *others = tried
    assert not mine.from_anchor
    layers = mine.feature_layers
    assert [
        {field: other for field, other in asdict(one).items() if other != asdict(mine)[field]}
        for one in others
    ] == [
        {"from_anchor": True},
        *(
            {"feature_layers": tuple(layer + shift for layer in layers)}
            for shift in _possible_shifts(layers, 6)
        ),
        {"causal": (not mine.causal[0],) * mine.num_layers},
    ]
    assert (
        "rows that predict the position behind it instead of its own position τ is 3.00"
        in found["conventions"]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_heads_of_every_layout_are_read_otherwise(layout: str, tmp_path: Path) -> None:
    """What a layout cannot say is left out, and nothing ends the examination."""
    markov = {"left_to_right": LeftToRightConfig(kind="vanilla", rank=8), "from_anchor": True}
    head = random_block_head(**(markov if layout == DEEPSPEC else {}))
    save_dflash(head, tmp_path, target="embedded", layout=layout)
    target = load_model(EMBEDDED_TARGET)
    found = list(variations("dflash", str(tmp_path), cast(Any, None), target))
    assert len(found) >= 3
    for variation in found:
        with variation.speculative() as speculative:
            assert read_dflash(speculative.options["model"], target).config != head.config


def _possible_shifts(layers: tuple[int, ...], num_layers: int) -> list[int]:
    return [shift for shift in (1, -1) if min(layers) + shift >= 1 and max(layers) + shift <= num_layers]


def test_a_target_without_a_prediction_layer_says_what_was_looked_for() -> None:
    found = faults(list(examine(EMBEDDED_TARGET, "mtp")))
    assert list(found) == ["checkpoint"]
    assert "model.layers.6.eh_proj.weight" in found["checkpoint"]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"hydra_num_heads": 2}, "hydra"),
        ({"medusa_num_heads": 2}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
    ],
)
def test_kinds(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of(str(tmp_path)) == kind


def test_bad_questions() -> None:
    with pytest.raises(ConfigError, match="unknown kind of draft 'eagel'"):
        list(examine(EMBEDDED_TARGET, EMBEDDED_DRAFT, "eagel"))
    with pytest.raises(ModelError):
        list(examine("/nowhere", EMBEDDED_DRAFT))


@pytest.mark.usefixtures("poor_canary")
def test_the_command(head: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "embedded", str(head), "--json"])
    assert result.exit_code == 2
    assert {row["check"]: row["verdict"] for row in json.loads(result.stdout)}["canary"] == "fault"
    assert "1 fault found" in result.stderr
    assert "drafting for a few prompts …" in result.stderr


def test_a_layer_numbering_that_is_one_too_low_is_found(tmp_path: Path) -> None:
    """A trained head, as SpecForge or TensorRT-LLM would number its layers."""
    folder = tmp_path / "head"
    shutil.copytree(EMBEDDED_EAGLE3, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    layers = [layer - 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    assert "hidden states [1, 3, 5]" in faults(list(examine(EMBEDDED_TARGET, str(folder))))["conventions"]

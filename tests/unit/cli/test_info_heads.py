"""`slipstream info` describes draft heads of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.draft.heads.dflash_files import save_dflash
from slipstream.draft.heads.dflash_layouts import LAYOUTS, ZLAB
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from tests.kit.block_heads import random_block_head
from tests.kit.head_drafters import random_heads
from tests.kit.peagle_heads import peagle_folder

VANILLA = LeftToRightConfig(kind="vanilla", rank=16)
DSPARK: dict[str, Any] = {"from_anchor": True, "left_to_right": VANILLA, "confidence": "hidden+token"}


def told(path: str, *more: str) -> dict[str, str]:
    """The lines, by their names."""
    result = CliRunner().invoke(app, ["info", path, *more])
    assert result.exit_code == 0, result.output
    rows = [line.split("  ", 1) for line in result.stdout.splitlines()]
    return {name.strip(): value.strip() for name, value in rows}


def as_json(path: str, *more: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["info", path, "--json", *more])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_head_is_described(layout: str, tmp_path: Path) -> None:
    head = random_block_head(**DSPARK)
    save_dflash(head, tmp_path, target=EMBEDDED_TARGET, layout=layout)
    lines, details = told(str(tmp_path)), as_json(str(tmp_path))
    config = head.config
    assert lines["method"].startswith("dflash: ")
    assert lines["left to right"] == "a Markov head of rank 16"
    assert lines["confidence head"] == "reads the hidden state and the token before"
    assert "each predicts the token behind it" in lines["block"]
    assert lines["block"].endswith(f"{config.block_size} draft tokens a pass")
    assert lines["try"].endswith(f"--model TARGET --spec dflash:{tmp_path}")
    assert details["layout"] == layout
    assert details["num_drafts"] == details["block_size"] == config.block_size
    assert details["feature_layers"] == list(config.feature_layers)
    assert details["left_to_right"] == {"kind": "vanilla", "rank": 16}
    assert details["num_layers"] == config.num_layers
    assert details["num_parameters"] == head.num_parameters()
    assert (details["target_hidden_size"], details["vocab_size"]) == (320, 4096)


def test_a_block_head_of_another_kind(tmp_path: Path) -> None:
    save_dflash(
        random_block_head(causal=(True, True), windows=(None, 64)),
        tmp_path,
        target=EMBEDDED_TARGET,
        layout=ZLAB,
    )
    lines = told(str(tmp_path))
    assert "the anchor's predicts none" in lines["block"]
    assert lines["rows see"] == "the rows before them; in layers 2 only 64 tokens before it"
    assert lines["left to right"].startswith("nothing")


@pytest.mark.parametrize(
    ("path", "method", "more"),
    [
        (lambda: EMBEDDED_EAGLE3, "eagle3", {"feature_layers": [1, 3, 5], "own_output_layer": True}),
        (lambda: peagle_folder(), "peagle", {"num_layers": 2, "draft_vocab_size": 700}),
        (lambda: peagle_folder("eagle3"), "peagle", {"num_layers": 2, "draft_vocab_size": 700}),
        (lambda: random_heads("medusa"), "medusa", {"num_heads": 4}),
        (lambda: random_heads("hydra"), "hydra", {"num_heads": 4}),
    ],
)
def test_other_heads_are_described(path: Any, method: str, more: dict[str, Any]) -> None:
    details = as_json(path(), "--draft-for", "embedded")
    assert details["method"] == method
    assert (details["target_hidden_size"], details["vocab_size"]) == (320, 4096)
    assert more.items() <= details.items()
    assert details["drafts_for"] == {EMBEDDED_TARGET: "yes"}
    assert told(path())["for a target of"] == "hidden size 320, 4,096 tokens"
    refused = as_json(path(), "--draft-for", EMBEDDED_DRAFT)["drafts_for"][EMBEDDED_DRAFT]
    assert refused.startswith("no: ")
    assert "hidden size" in refused


def test_flags_of_models_are_refused_for_a_head() -> None:
    result = CliRunner().invoke(app, ["info", EMBEDDED_EAGLE3, "--measure", "--quick"])
    assert result.exit_code == 2
    assert "is a draft head of method eagle3; --measure takes a model, omit it" in result.output


def test_a_damaged_head_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dflash_config": {}, "block_size": 4}))
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no weights" in result.output

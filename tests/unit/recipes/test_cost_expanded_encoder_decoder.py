"""Enlarged encoder-decoders compute what their source computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from recipes.cost_expanded.__main__ import main
from recipes.cost_expanded.encoder_decoder import Growth, expand
from slipstream.errors import ConfigError, ModelError
from tests.kit.encoder_decoders import save

TOKENS = torch.tensor([[1, 5, 60, 33, 8, 120, 7]])
GROWTHS = [
    Growth(times_wider=3),
    Growth(decoder_layers=7),
    Growth(intermediate_size=160),
    Growth(times_wider=2, decoder_layers=5, intermediate_size=300),
]


@pytest.fixture(autouse=True)
def progress_bars_as_before() -> Iterator[None]:
    """The command line turns them off for its process."""
    before = tf.utils.logging.is_progress_bar_enabled()
    yield
    if before:
        tf.utils.logging.enable_progress_bar()


def logits(folder: str | Path, is_speech: bool) -> torch.Tensor:
    auto: Any = tf.AutoModelForSpeechSeq2Seq if is_speech else tf.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(folder).eval()
    made = torch.Generator().manual_seed(2)
    given = (
        {"input_features": torch.randn(1, 20, 100, generator=made)} if is_speech else {"input_ids": TOKENS}
    )
    with torch.no_grad():
        computed: torch.Tensor = model(**given, decoder_input_ids=TOKENS, use_cache=False).logits
    return computed


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("family", ["t5", "flan", "whisper"])
def test_the_logits_are_the_sources(family: str, growth: Growth, tmp_path: Path) -> None:
    source = save(family, tmp_path)
    number = expand(source, tmp_path / "large", growth)
    expected = logits(source, family == "whisper")
    torch.testing.assert_close(
        logits(tmp_path / "large", family == "whisper"), expected, rtol=2e-3, atol=2e-3
    )
    config = json.loads((tmp_path / "large/config.json").read_text())
    assert config["cost_expanded"] == {"from": family, "parameters": number}
    assert (tmp_path / "large/tokenizer.json").is_file()


def test_what_cannot_be_enlarged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bart = save("bart", tmp_path)
    with pytest.raises(ModelError, match="holds a bart model; only t5 and whisper can be enlarged so"):
        expand(bart, tmp_path / "large", Growth(2))
    source = save("t5", tmp_path)
    with pytest.raises(ConfigError, match="num_decoder_layers 1 is below 3"):
        expand(source, tmp_path / "large", Growth(decoder_layers=1))
    assert main(["encoder-decoder", source, source, "--times-wider", "2"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["encoder-decoder", source, str(tmp_path / "large"), "--times-wider", "2"]) == 0
    assert "parameters" in capsys.readouterr().err

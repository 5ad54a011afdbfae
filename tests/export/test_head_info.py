"""What heads are is read from their files, and vocabulary maps are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.errors import ConfigError, ModelError
from slipstream.tools.export import ENGINES, SpeculativeRecord
from slipstream.tools.export.head_info import (
    AuxLayers,
    VocabularyMap,
    context_length,
    head_info,
    kind_of_map,
    to_absolute,
    to_offsets,
)

VOCAB = 64
IDS = np.array([0, 1, 2, 5, 9, 10, 40, 63])
MARKS = np.isin(np.arange(VOCAB), IDS)


@pytest.mark.parametrize("marks", [MARKS, None], ids=["t2d", "alone"])
def test_offsets_and_ids_are_told_apart(marks: np.ndarray | None) -> None:
    assert kind_of_map(to_offsets(IDS), VOCAB, marks) == "offset"
    assert kind_of_map(IDS, VOCAB, marks) == "absolute"
    assert np.array_equal(to_absolute(to_offsets(IDS)), IDS)


def test_where_both_fit_the_marks_decide() -> None:
    ids = np.array([0, 2, 4, 6])  # as offsets they name 0, 3, 6, 9
    assert kind_of_map(ids, VOCAB) == "absolute"
    assert kind_of_map(ids, VOCAB, np.isin(np.arange(VOCAB), [0, 3, 6, 9])) == "offset"
    assert kind_of_map(np.zeros(8, dtype=np.int64), VOCAB) == "offset"  # the first tokens


@pytest.mark.parametrize("wrong", [[0, 0, VOCAB], [-1, 5, 5], []])
def test_what_is_no_map_is_refused(wrong: list[int]) -> None:
    with pytest.raises(ModelError, match="fits neither"):
        kind_of_map(np.array(wrong, dtype=np.int64), VOCAB)
    with pytest.raises(ModelError, match="that t2d marks"):
        kind_of_map(IDS[:4], VOCAB, MARKS)


def test_the_embedded_head() -> None:
    info = head_info(EMBEDDED_EAGLE3)
    assert info is not None
    assert (info.layout, info.version, info.method) == ("eagle3", 3, "eagle3")
    assert info.aux_layers == AuxLayers((1, 3, 5))
    assert info.norms.before_residual is False
    assert (info.vocabulary, info.output, info.embedding) == (None, "own", "shared")
    assert head_info(EMBEDDED_DRAFT) is None
    assert context_length(EMBEDDED_DRAFT) == 2048


def test_a_head_with_its_own_parts(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = np.zeros((VOCAB, 2), dtype=np.float32)
    save_file({"embed_tokens.weight": table, "d2t": IDS, "t2d": MARKS}, tmp_path / "model.safetensors")
    info = head_info(tmp_path)
    assert info is not None
    assert info.vocabulary == VocabularyMap("absolute", 8)
    assert (info.embedding, info.output, info.aux_layers) == ("own", "shared", None)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot read"):
        head_info(tmp_path)


def test_two_numberings_of_layers() -> None:
    before = AuxLayers((2, 16, 29))
    assert before.as_convention("after_layer") == AuxLayers((1, 15, 28), "after_layer")
    assert before.as_convention("after_layer").as_convention("before_layer") == before
    with pytest.raises(ConfigError, match="layer convention"):
        AuxLayers((1,), "between")


def test_weights_in_pytorchs_own_format_are_not_guessed(tmp_path: Path) -> None:
    """EAGLE's own heads come as pytorch_model.bin: no engine's form may be refused for what was not read."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    info = head_info(tmp_path)
    assert info is not None
    assert (info.embedding, info.output) == (None, None)
    assert info.vocabulary == VocabularyMap("offset", 8)
    record = SpeculativeRecord(method="eagle3", target="t", model=str(tmp_path), depth=4, head=info)
    assert ENGINES["vllm"].to_engine(record).record.method == "eagle3"

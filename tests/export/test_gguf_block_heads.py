"""Block heads that were exported to GGUF files are drafted with from these files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.checkpoints import outline_checkpoint, read_checkpoint
from slipstream.draft.heads.description import HeadOnDisk, method_of
from slipstream.draft.heads.dflash_files import read_dflash, save_dflash
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.methods import DFLASH
from slipstream.errors import ModelError
from slipstream.models import load_tokenizer
from slipstream.models.files.gguf import open_gguf
from slipstream.tools.doctor.examination import kind_of
from slipstream.tools.export import SpeculativeRecord, from_own, settings_format
from slipstream.tools.export.checkpoints import convert
from slipstream.tools.export.checkpoints.gguf_dflash import dflash_writer
from slipstream.tools.export.checkpoints.gguf_models import finish
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.converting import converted
from tests.export.test_checkpoint_dflash import saved
from tests.export.test_checkpoint_eagle import record
from tests.kit.dflash_heads import attend_over
from tests.kit.gguf_files import requantised, rounded, write

pytest.importorskip("gguf", reason="the extra `export` is not installed")

VANILLA = LeftToRightConfig(kind="vanilla", rank=32)
SELECTOR = LeftToRightConfig(kind="selector", rank=32, top_k=8)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"windows": (None, 64)},
    "a part of the vocabulary": {"draft_vocab_size": 1000},
    "DSpark": {"from_anchor": True, "left_to_right": VANILLA, "confidence": "hidden+token"},
    "DFlash2": {"convolution_taps": 2, "left_to_right": SELECTOR},
}


def exported(tmp_path: Path, **options: Any) -> tuple[str, Path]:
    """A random head's folder, and its GGUF file."""
    _, folder = saved(tmp_path / "head", **options)
    return folder, written(folder, tmp_path / "dflash.gguf")


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED_TARGET)


def written(folder: str, file: Path) -> Path:
    """The file that an export to llama.cpp writes, without the target."""
    finish(dflash_writer(TargetFiles(EMBEDDED_TARGET), tokenizer(), file, folder))
    return file


def changed(file: Path, place: Path, keys: dict[str, Any] | None = None, **tensors: Any) -> str:
    """The file with other keys and tensors; None leaves one out."""
    content = open_gguf(str(file))
    held = {name: entry.numbers().numpy() for name, entry in content.tensors.items()}
    held |= {name.replace("__", "."): each for name, each in tensors.items()}
    fields = {**content.fields, **(keys or {})}
    fields = {
        name: each for name, each in fields.items() if each is not None and name != "general.architecture"
    }
    held = {name: each for name, each in held.items() if each is not None}
    return str(write(place, content.architecture, fields, held))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_comes_back_from_its_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    head, folder = saved(tmp_path / "head", **HEADS[kind])
    save_dflash(head.to(dtype), folder, target=EMBEDDED_TARGET)
    files = TargetFiles(EMBEDDED_TARGET)
    ours = read_dflash(folder, files)
    file = str(written(folder, tmp_path / "dflash.gguf"))
    found = read_dflash(file, files)
    assert found.config == ours.config
    expected = ours.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert kind_of(file) == DFLASH.name


@pytest.mark.parametrize("kind", HEADS)
def test_a_quantised_file_is_widened_to_what_its_blocks_say(kind: str, tmp_path: Path) -> None:
    folder, plain = exported(tmp_path, **HEADS[kind])
    files = TargetFiles(EMBEDDED_TARGET)
    ours = read_dflash(folder, files).requires_grad_(False)
    found = read_dflash(str(requantised(tmp_path / "q.gguf", plain, "Q8_0")), files).requires_grad_(False)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(found.state_dict()[name], rounded(tensor, "Q8_0")), name
    generator = torch.Generator().manual_seed(0)
    features, embeds = (torch.randn(rows, width, generator=generator) for rows, width in ((6, 960), (8, 320)))
    positions = torch.arange(6, 14)[None]
    mine, its = (
        head.logits(head(embeds[None], positions, attend_over(head, features)), lambda hidden: hidden)
        for head in (ours, found)
    )
    assert not torch.equal(mine, its)
    assert (mine - its).norm() < 0.02 * mine.norm()


@pytest.mark.parametrize("kind", HEADS)
def test_the_text_is_that_without_drafts_and_the_drafts_are_the_folder_s(kind: str, tmp_path: Path) -> None:
    folder, file = exported(tmp_path, **HEADS[kind])
    found = []
    for model in (None, folder, str(file)):
        spec = None if model is None else {"method": DFLASH.name, "model": model, "num_speculative_tokens": 3}
        answer = LLM(EMBEDDED_TARGET, speculative_config=spec).generate(
            ["Show me the command tar."], SamplingParams(temperature=0, max_tokens=16)
        )[0]
        metrics = answer.metrics
        found.append((answer.outputs[0].token_ids, metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert found[0][0] == found[1][0]
    assert found[1] == found[2]
    assert found[2][1] > 0


def test_an_outline_has_the_shapes(tmp_path: Path) -> None:
    _, file = exported(tmp_path, **HEADS["DSpark"])
    rounded_file = requantised(tmp_path / "q.gguf", file, "Q4_0")
    for path in (str(file), str(rounded_file)):
        outline, whole = outline_checkpoint(path), read_checkpoint(path)
        assert outline[0] == whole[0]
        assert all(tensor.is_meta for tensor in outline[1].values())
        shapes = [{name: (t.shape, t.dtype) for name, t in each.items()} for _, each in (outline, whole)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("keys", "tensors", "complaint"),
    [
        ({}, {"blk__1__attn_k__weight": None}, "lacks the tensor blk.1.attn_k.weight"),
        ({}, {"fc__weight": None}, "lacks the tensor fc.weight"),
        ({}, {"markov_w1__weight": None}, "lacks the tensor markov_head.markov_w1.weight"),
        (
            {},
            {"more__weight": np.zeros((2, 2), np.float32)},
            "has the tensor more.weight, which no dflash head",
        ),
        ({"dflash.embedding_length": 640}, {}, "is for a target with a hidden size of 640"),
        ({"dflash.vocab_size": 99}, {}, "is for a target with a vocabulary of 99"),
        (
            {"dflash.target_layers": [1, 3, 7]},
            {},
            r"layers \[1, 3, 7\], counted from 1, but the target has 6",
        ),
        ({"dflash.target_layers": None}, {}, "lacks dflash.target_layers"),
        ({"dflash.block_size": None}, {}, "dflash.block_size is None"),
        ({"tokenizer.ggml.mask_token_id": None}, {}, "has no mask_token_id"),
        ({"dflash.feed_forward_length": 128}, {}, r"mlp.gate_proj.weight is \[64, 320\]"),
        ({"dflash.attention.sliding_window": 64}, {}, "which of its 2 layers have a sliding window"),
    ],
)
def test_what_is_no_head_for_the_target_is_refused_in_a_line(
    keys: dict[str, Any], tensors: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    _, file = exported(tmp_path, **HEADS["DSpark"])
    path = changed(file, tmp_path / "changed.gguf", keys, **tensors)
    with pytest.raises(ModelError, match=complaint) as raised:
        read_dflash(path, TargetFiles(EMBEDDED_TARGET))
    assert "\n" not in str(raised.value)
    assert path in str(raised.value)


def test_a_map_of_offsets_and_another_model_are_refused(tmp_path: Path) -> None:
    _, file = exported(tmp_path, draft_vocab_size=1000)
    path = changed(file, tmp_path / "offsets.gguf", d2t=np.zeros(1000, dtype=np.int64))
    with pytest.raises(ModelError, match="absolute ids, not offsets"):
        read_dflash(path, TargetFiles(EMBEDDED_TARGET))
    model = convert(record(EMBEDDED_DRAFT, method="draft_model"), "llama_cpp", tmp_path / "pair").draft
    eagle = convert(record(EMBEDDED_EAGLE3), "llama_cpp", tmp_path / "eagle").draft
    for other, what in ((model, "holds a llama model, not a draft head"), (eagle, "is not a DFlash head")):
        with pytest.raises(ModelError, match=what):
            read_dflash(str(other), TargetFiles(EMBEDDED_TARGET))
    with pytest.raises(ModelError, match="there is no file"):
        read_dflash(str(tmp_path / "none.gguf"), TargetFiles(EMBEDDED_TARGET))


def test_other_engines_get_a_folder_of_it(tmp_path: Path) -> None:
    folder, file = exported(tmp_path, **HEADS["DSpark"])
    made = convert(record(str(file), method=DFLASH.name), "vllm", tmp_path / "vllm")
    files = TargetFiles(EMBEDDED_TARGET)
    ours, theirs = read_dflash(folder, files), read_dflash(str(made.draft), files)
    assert ours.config == theirs.config
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_a_file_is_described_as_its_folder_is(tmp_path: Path) -> None:
    folder, file = exported(tmp_path, **HEADS["DSpark"])
    its, mine = (HeadOnDisk(path, str(method_of(path))).details() for path in (str(file), folder))
    assert its["layout"] == "gguf"
    assert {**its, "head": folder, "layout": mine["layout"]} == mine


def test_what_a_confidence_head_reads_is_seen_by_its_width(tmp_path: Path) -> None:
    _, file = exported(tmp_path, **HEADS["DSpark"])
    files = TargetFiles(EMBEDDED_TARGET)
    markov: dict[str, Any] = {"markov_w1__weight": None, "markov_w2__weight": None}
    path = changed(file, tmp_path / "wide.gguf", **markov)
    with pytest.raises(ModelError, match="confidence_head_with_markov but markov_rank 0"):
        read_dflash(path, files)
    narrow = np.ones((1, files.hidden_size), np.float32)
    found = read_dflash(changed(file, tmp_path / "narrow.gguf", **markov, conf_proj__weight=narrow), files)
    assert (found.config.confidence, found.config.left_to_right) == ("hidden", None)


def test_a_dspark_head_drafts_from_its_anchor_where_the_file_does_not_say(tmp_path: Path) -> None:
    _, file = exported(tmp_path, **HEADS["DSpark"])
    path = changed(file, tmp_path / "silent.gguf", {"dflash.sample_from_anchor": None})
    assert read_dflash(path, TargetFiles(EMBEDDED_TARGET)).config.from_anchor


@pytest.mark.parametrize(
    ("engine", "plain", "dspark"),
    [
        ("llama-cpp", "draft-dflash", "draft-dspark"),
        ("vllm", "dflash", "dspark"),
        ("sglang", "DFLASH", "DSPARK"),
    ],
)
def test_engines_with_a_method_of_its_own_for_dspark_get_that(
    engine: str, plain: str, dspark: str, tmp_path: Path
) -> None:
    """Run as a DFlash head, one of DSpark's loses what its anchor's row drafts, without an error."""
    for name, method in (("plain", plain), ("DSpark", dspark)):
        for path in exported(tmp_path / name, **HEADS[name]):
            config = SpeculativeConfig(DFLASH.name, options={"model": str(path)})
            setting = settings_format(engine).to_engine(from_own(config, EMBEDDED_TARGET)[0])
            words = re.findall(r"[\w-]+", " ".join(setting.argv))
            assert method in words
            assert (dspark in words) == (name == "DSpark")
            assert SpeculativeRecord.from_mapping(setting.record.to_mapping()) == setting.record
    made, _ = converted(from_own(config, EMBEDDED_TARGET)[0], engine, tmp_path / "made")
    assert made.head is not None
    assert made.head.method == DFLASH.name

"""DFlash and DSpark heads learn, resume exactly, begin with other heads, and are what the engine drafts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.errors import ConfigError, ModelError
from slipstream.train.batches import TrainingDocument, make_batch, pack
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.dflash import BlockStudent
from slipstream.train.eagle import EagleStudent
from slipstream.train.evaluation import Evaluator
from slipstream.train.mask_tokens import mask_token
from slipstream.train.options import EagleTrainOptions, TrainOptions
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Trainer

LENGTH = 48
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash of a small vocabulary": ("dflash", {"draft_vocab_size": 40, "num_layers": 2, "window": 16}),
    "jetspec": ("dflash", {"causal": True, "loss": "forward_kl", "position_weights": "uniform"}),
    "d-pace": ("dflash", {"position_weights": "dpace"}),
    "dspark": (
        "dspark",
        {"loss": "hard=1,total_variation=1,confidence=1"},
    ),  # its own learns slowly from nothing
    "dspark of a small vocabulary": ("dspark", {"draft_vocab_size": 40, "left_to_right": "rnn"}),
    "dflash2": ("dflash", {"left_to_right": "selector"}),
    "domino": ("dflash", {"left_to_right": "gru", "layout": "anchor"}),
}


@pytest.fixture
def student(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: list[TrainingDocument]
) -> Any:
    def make(method: str = "dflash", seed: int = 0, **options: Any) -> BlockStudent:
        sizes: dict[str, Any] = {} if "init" in options else {"intermediate_size": 40, "rank": 8}
        given = BlockTrainOptions(**{"num_anchors": 8, **sizes, **options})
        return BlockStudent(given, target, tokenizer, documents, method, seed)

    return make


def trainer(
    student: BlockStudent,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    output: Path,
    **options: Any,
) -> Trainer:
    asked = TrainOptions(**{"max_tokens": 1500, "batch_rows": 4, "row_length": LENGTH, **options})
    return Trainer(student, target, documents, 0, asked, output, {"method": student.name})


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_drafter_learns(
    kind: str, student: Any, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    method, options = KINDS[kind]
    run = trainer(
        student(method, **options),
        target,
        documents,
        tmp_path,
        max_tokens=15_000,
        learning_rate=5e-3,
        log_every_s=0.0,
    )
    run.run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert np.mean([row["loss"] for row in rows[-5:]]) < 0.9 * rows[0]["loss"]
    assert np.mean([row["agrees_1"] for row in rows[-5:]]) > rows[0]["agrees_1"] + 0.05
    assert np.mean([row["tau"] for row in rows[-5:]]) > rows[0]["tau"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_bfloat16_is_nearly_the_one_in_float32(
    kind: str, student: Any, tiny: str, target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    method, options = KINDS[kind]
    made = student(method, **options)
    rows = pack(documents, LENGTH, 0, np.random.default_rng(0)).take(slice(0, 4))
    losses = []
    for of in (target, FrozenTarget(tiny, torch.device("cpu"), torch.bfloat16)):
        batch = make_batch(rows, of, made.feature_layers)
        with torch.autocast("cpu", of.dtype, enabled=of.dtype != torch.float32):
            loss, _ = made.loss(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("kind", ["dflash of a small vocabulary", "dspark", "domino"])
def test_a_resumed_run_ends_bit_identical(
    kind: str, student: Any, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    method, options = KINDS[kind]

    def make(output: str) -> Trainer:
        return trainer(student(method, **options), target, documents, tmp_path / output, accumulation=2)

    whole, first, second = make("whole"), make("parts"), make("parts")
    end = whole.run()
    first.stop = lambda progress: progress.step == 2
    assert first.run().step == 2
    assert second.run().step == end.step > 3
    for name, weight in whole.student.module.state_dict().items():
        assert torch.equal(weight, second.student.module.state_dict()[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_loads_and_drafts_with_what_was_saved(
    kind: str, tiny: str, student: Any, tmp_path: Path
) -> None:
    method, options = KINDS[kind]
    made = student(method, **options)
    made.save(tmp_path)
    figures = Evaluator(tiny, prompts_per_task=1, max_tokens=8).evaluate(made.speculative_config(tmp_path))
    assert figures.greedy.tau >= 1
    assert 1 <= len(figures.greedy.conditional) <= made.head.config.num_drafts


@pytest.mark.parametrize("kind", ["dflash of a small vocabulary", "dspark"])
def test_training_goes_on_from_a_head(
    kind: str, student: Any, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    method, options = KINDS[kind]
    first = student(method, **options, block_size=5)
    trainer(first, target, documents, tmp_path / "run").run()
    first.save(tmp_path / "head")
    second = student(method, seed=1, init=str(tmp_path / "head"))
    assert second.head.config == first.head.config
    for name, weight in first.module.state_dict().items():
        assert torch.equal(weight, second.module.state_dict()[name]), name
    assert "begin anew" not in second.about_loss()
    trainer(second, target, documents, tmp_path / "more", max_tokens=600).run()
    changed = {
        name
        for name, weight in first.module.named_parameters()
        if not torch.equal(weight, second.module.get_parameter(name))
    }
    assert changed == {name for name, weight in second.module.named_parameters() if weight.requires_grad}


def test_a_dspark_head_begins_with_a_dflash_head(student: Any, tmp_path: Path) -> None:
    """What an option adds begins anew, and is said; the rest is taken."""
    first = student("dflash")
    first.save(tmp_path)
    second = student("dspark", seed=1, init=str(tmp_path), left_to_right="markov", layout="anchor")
    assert second.head.config.block_size == first.head.config.block_size
    assert second.head.config.from_anchor
    said = second.about_loss()
    assert "confidence_head.bias, confidence_head.weight, left_to_right.markov_w1.weight" in said
    assert torch.equal(first.head.fc.weight, second.head.fc.weight)


def test_a_block_drafter_begins_with_an_eagle_head(
    student: Any, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    shape = EagleTrainOptions(draft_vocab_size=40, intermediate_size=40, feature_layers="0,1,2")
    eagle = EagleStudent(shape, target, documents, 3, seed=3)
    with torch.no_grad():
        for weight in eagle.head.parameters():
            weight.add_(torch.randn(weight.shape))
    eagle.save(tmp_path / "eagle3")
    made = student(init=str(tmp_path / "eagle3"), num_layers=2)
    head, old = made.head, eagle.head.layer
    width = target.hidden_size
    assert torch.equal(head.draft_token_ids, eagle.head.draft_token_ids)
    assert head.config.feature_layers == (0, 1, 2)
    first = head.layers[0].self_attn
    assert torch.equal(first.q_proj.weight, old.self_attn.q_proj.weight[:, :width])
    assert torch.equal(first.k_proj.weight, old.self_attn.k_proj.weight[:, width:])
    assert torch.equal(first.v_proj.weight, old.self_attn.v_proj.weight[:, width:])
    for mine, its in (
        (head.fc, eagle.head.fc),
        (head.norm, eagle.head.norm),
        (head.lm_head, eagle.head.lm_head),
        (head.hidden_norm, old.hidden_norm),
        (head.layers[0].mlp.down_proj, old.mlp.down_proj),
        (head.layers[0].input_layernorm, old.input_layernorm),
    ):
        assert torch.equal(mine.weight, its.weight)
    said = made.about_loss()
    assert "13 of 26 tensors are taken" in said
    assert "layers.1.mlp.up_proj.weight" in said
    wider = student(
        init=str(tmp_path / "eagle3"), intermediate_size=48, draft_vocab_size=50, feature_layers="1,2"
    )
    assert "mlp.up_proj.weight" in wider.about_loss()
    assert not torch.equal(wider.head.norm.weight, old.hidden_norm.weight)
    EagleStudent(EagleTrainOptions(), target, documents, 1, seed=0).save(tmp_path / "eagle")
    with pytest.raises(ConfigError, match="is an EAGLE-1 head"):
        student(init=str(tmp_path / "eagle"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        student(init=str(tmp_path / "nothing"))


class _Tokens:
    """A tokenizer of ten tokens, two of them special; ids 10 and 11 of the target have no text."""

    mask_token_id: int | None = None
    bos_token_id = pad_token_id = unk_token_id = None
    eos_token_id = 9
    added_tokens_decoder: ClassVar[dict[int, str]] = {8: "<tool>", 9: "<end>"}

    def get_vocab(self) -> dict[str, int]:
        return {f"t{number}": number for number in range(10)}

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"t{token}"

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("used", "vocab_size", "expected"),
    [
        ([0, 1, 9], 12, (8, "'t8' (id 8), which the data do not use")),
        ([0, 8, 9], 12, (11, "id 11, which the data do not use")),
        ([0, 7, 8, 9], 10, (6, "'t6' (id 6), which the data do not use")),
    ],
)
def test_the_mask_token_is_one_that_no_text_uses(
    used: list[int], vocab_size: int, expected: tuple[int, str]
) -> None:
    documents = [TrainingDocument("a", np.array(used), np.ones(len(used), dtype=bool))]
    assert mask_token(None, _Tokens(), vocab_size, documents) == expected


def test_a_mask_token_may_be_named(target: FrozenTarget) -> None:
    every = [TrainingDocument("a", np.arange(10), np.ones(10, dtype=bool))]
    assert mask_token("t4", _Tokens(), 10, every)[0] == mask_token("4", _Tokens(), 10, every)[0] == 4
    with pytest.raises(ConfigError, match="--mask-token 10 is not among the target's 10 tokens"):
        mask_token("10", _Tokens(), 10, every)
    with pytest.raises(ConfigError, match="--mask-token <m> is not among"):
        mask_token("<m>", _Tokens(), 10, every)
    with pytest.raises(ConfigError, match="the data use every token"):
        mask_token(None, _Tokens(), 10, every)
    own = _Tokens()
    own.mask_token_id = 2
    assert mask_token(None, own, 10, every)[1] == "'t2' (id 2), the tokenizer's own"


def test_what_learns_and_what_does_not(student: Any) -> None:
    """The target's output layer does not learn; a correction begins without an effect."""
    made = student("dspark", draft_vocab_size=40)
    frozen = [name for name, weight in made.module.named_parameters() if not weight.requires_grad]
    assert frozen == ["lm_head.weight"]
    assert not made.head.left_to_right.markov_w2.weight.any()
    assert made.head.left_to_right.markov_w1.weight.any()
    assert made.options.losses == {"hard": 0.1, "total_variation": 1.8, "confidence": 1.0}
    assert (made.head.config.block_size, made.head.config.num_drafts) == (7, 7)
    plain = student("dflash").head.config
    assert (plain.block_size, plain.num_drafts, plain.num_layers, plain.confidence) == (8, 7, 1, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "masks"}, "did you mean 'mask'"),
        ({"loss": "kl"}, "unknown loss"),
        ({"left_to_right": "markow"}, "did you mean 'markov'"),
        ({"position_weights": "exp"}, "unknown position_weights"),
        ({"block_size": 1}, "at least 2"),
        ({"left_to_right": "selector", "loss": "hard=1,confidence=1"}, "a selector leaves out"),
        ({"gamma": 0.0}, "--gamma must be above 0"),
        ({"dpace_alpha": 2.0}, r"--dpace-alpha must be in \[0, 1\]"),
        ({"num_anchors": 0}, "at least 1"),
        ({"feature_layers": "1,3"}, "ascending numbers from 1 to 2"),
        ({"feature_layers": "a"}, "separated by commas"),
        ({"draft_vocab_size": 10**6}, "more than the target's"),
        ({"mask_token": "999999"}, "--mask-token 999999 is not among the target's"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(options: dict[str, Any], message: str, student: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        student(**options)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_commands(method: str, tiny: str, data: Path, tmp_path: Path) -> None:
    small = "--max-tokens 200 --batch-rows 2 --row-length 48 --eval-prompts-per-task 1 --eval-max-tokens 4"
    command = ["train", method, tiny, "--data", str(data), "--output", str(tmp_path / "out"), *small.split()]
    result = CliRunner().invoke(app, [*command, "--cache-features"])
    assert result.exit_code == 0, result.output
    assert "the mask token is" in " ".join(result.output.split())
    assert (tmp_path / "out" / method / "config.json").is_file()


def test_an_output_layer_of_its_own_is_kept(student: Any, tmp_path: Path) -> None:
    """Also over the whole vocabulary, where a fresh head uses the target's."""
    first = student("dflash", block_size=5)
    first.head.lm_head = torch.nn.Linear(
        first.head.config.hidden_size, first.head.config.vocab_size, bias=False
    )
    first.save(tmp_path)
    second = student("dflash", seed=1, init=str(tmp_path))
    assert torch.equal(second.head.lm_head.weight, first.head.lm_head.weight)
    assert not second.head.lm_head.weight.requires_grad


def test_a_selector_to_begin_with_learns_no_confidence(student: Any, tmp_path: Path) -> None:
    student("dflash", block_size=5, left_to_right="selector").save(tmp_path)
    with pytest.raises(ConfigError, match="a selector leaves out most tokens"):
        student("dspark", init=str(tmp_path))

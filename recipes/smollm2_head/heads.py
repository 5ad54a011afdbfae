"""Trains heads on the answers with nothing but PyTorch and Transformers, as on a GPU machine that has no more.

On a machine with Slipstream's requirements, `slipstream train` does the same, and evaluates with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes.smollm2_head.answers import read_rows
from recipes.smollm2_head.gguf_weights import EOS, read_gguf
from recipes.smollm2_head.tau import accepted_lengths, steps_of
from slipstream.draft.heads.eagle_head import default_feature_layers
from slipstream.train.batches import Cursor, TrainingDocument, make_batch, row_batches
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.dflash import BlockStudent
from slipstream.train.eagle import EagleStudent
from slipstream.train.features import FeatureCache
from slipstream.train.options import EagleTrainOptions, TrainOptions
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Trainer

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"freeze_lm_head": True},
    "dflash": {"num_anchors": 128},
    # DSpark's own loss hardly learns from nothing: total variation has no slope where two distributions do not meet.
    "dspark": {"num_anchors": 128, "loss": "hard=1,confidence=0.2"},
}
"""Options of each kind that are not the trainer's own."""
WEIGHTS = "model.safetensors"
HELD_OUT = 0.01
"""Share of the answers that no head learns from."""
_ROWS = 2
"""Rows of texts behind whose every token is drafted at once."""
_LARGEST_FILE = 16 * 2**20
"""Bytes of a file that the weights are cut into, so that they can be carried where transfers are bounded."""


def unpack(parts: Sequence[Path], folder: Path) -> None:
    """Write the GGUF file's weights, in 16 bits, as a checkpoint that Transformers loads; once."""
    if (folder / "config.json").exists():
        return
    fields, weights = read_gguf(parts)
    size = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["embedding_length"],
        intermediate_size=size["feed_forward_length"],
        num_hidden_layers=size["block_count"],
        num_attention_heads=size["attention.head_count"],
        num_key_value_heads=size["attention.head_count_kv"],
        max_position_embeddings=size["context_length"],
        rms_norm_eps=size["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": size["rope.freq_base"]},
        tie_word_embeddings=True,
        eos_token_id=fields.get(EOS),
    )
    model: Any = LlamaForCausalLM(config)
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for number in range(config.num_hidden_layers):
        for mine, theirs in _NAMES.items():
            weight = weights[f"blk.{number}.{mine}.weight"]
            if mine in ("attn_q", "attn_k"):
                heads = size["attention.head_count" if mine == "attn_q" else "attention.head_count_kv"]
                # GGUF files pair neighbouring channels for the rotary embedding; Transformers pairs the two halves.
                weight = weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{number}.{theirs}.weight"] = weight
    model.load_state_dict(state, strict=False)
    model.to(torch.float16).save_pretrained(folder)


_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Answer:
    """One answer of the target, and its prompt."""

    document: TrainingDocument
    is_greedy: bool


def read_answers(files: Sequence[Path], length: int) -> list[Answer]:
    """The answers of several files, in the order of the prompts, cut to `length` tokens."""
    found: dict[int, Answer] = {}
    for file in files:
        for row in read_rows(file):
            tokens = np.array(row["token_ids"][:length])
            is_answer = np.zeros(len(tokens), dtype=bool)
            for begin, end in row["answer_spans"]:
                is_answer[begin:end] = True
            if is_answer.any():
                found[row["index"]] = Answer(TrainingDocument("answer", tokens, is_answer), row["greedy"])
    return [found[index] for index in sorted(found)]


def train_head(
    kind: str, folder: Path, minutes: float, *, device: str, options: dict[str, Any], shape: dict[str, Any]
) -> dict[str, float]:
    """Train a head of one of `OPTIONS` in `folder`, which `unpack` and the answers filled; goes on where it stopped.

    `options` are fields of `TrainOptions`, `shape` those of the head's own options. Returns what is written to
    `tau.json` too: the acceptance length on held-out greedy answers, and how many there are.
    """
    plan = TrainOptions(time_limit_minutes=minutes, **options)
    answers = read_answers(sorted(folder.glob("answers*.jsonl")), plan.row_length)
    held_out = answers[: max(1, round(HELD_OUT * len(answers)))]
    documents = [answer.document for answer in answers[len(held_out) :]]
    if len(documents) < plan.batch_rows:
        raise ValueError(
            f"{folder} has {len(answers)} answers, too few for a batch of {plan.batch_rows} rows"
        )
    target = FrozenTarget(str(folder / "target"), torch.device(device), getattr(torch, plan.dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    # All kinds read the same features, so that one cache serves them.
    layers = ",".join(map(str, default_feature_layers(target.num_layers)))
    if shape.get("init"):  # its shape is kept
        shape = {**OPTIONS[kind], "init": shape["init"]}
    else:
        shape = {"feature_layers": layers, **OPTIONS[kind], **shape}
    student: BlockStudent | EagleStudent
    if kind == "eagle3":
        student = EagleStudent(EagleTrainOptions(**shape), target, documents, 3, plan.seed)
    else:
        student = BlockStudent(BlockTrainOptions(**shape), target, tokenizer, documents, kind, plan.seed)
    pad = int(tokenizer.eos_token_id)
    output, cache = folder / kind, None
    if plan.cache_features:
        tokens = [document.tokens for document in documents]
        cache = FeatureCache(folder / "features", target, tokens, student.feature_layers)
        cache.fill(lambda done, of: _say(f"features of {done:,} of {of:,} answers"))
    made_with = {"method": kind, "shape": shape}
    Trainer(student, target, documents, pad, plan, output, made_with, say=_say, features=cache).run()
    figures = measured(student, [answer.document for answer in held_out if answer.is_greedy], plan, pad)
    (output / "tau.json").write_text(json.dumps(figures) + "\n")
    _say(f"{kind}: {figures}")
    cut(output / student.name / WEIGHTS)
    return figures


def measured(
    student: BlockStudent | EagleStudent, documents: Sequence[TrainingDocument], plan: TrainOptions, pad: int
) -> dict[str, float]:
    """The acceptance length of chains of each depth."""
    head = student.head.eval()
    most = getattr(head.config, "num_drafts", 8)
    tokens, steps = [0] * (most + 1), [0] * (most + 1)
    num_rows = min(_ROWS, len(documents))
    num_batches = -(-sum(len(each.tokens) for each in documents) // (num_rows * plan.row_length))
    stream = row_batches(documents, num_rows, plan.row_length, pad, 0, Cursor())
    for _ in range(num_batches):
        batch = make_batch(next(stream), student.target, student.feature_layers)
        accepted = accepted_lengths(student, batch, most).cpu()
        for row in range(len(batch.token_ids)):
            for first, end in _answers_in(batch.loss_mask[row].cpu()):
                for depth in range(1, most + 1):
                    tokens[depth] += end - 1 - first
                    steps[depth] += steps_of(accepted[row].clamp(max=depth).tolist(), first, end)
    taus = {f"tau_{depth}": tokens[depth] / max(steps[depth], 1) for depth in range(1, most + 1)}
    return {**taus, "num_tokens": tokens[1]}


def _answers_in(loss_mask: torch.Tensor) -> list[tuple[int, int]]:
    """For each answer of a packed row, its first token, and the end of its last one."""
    edges = torch.diff(torch.nn.functional.pad(loss_mask.int(), (1, 1))).nonzero()[:, 0].tolist()
    return [
        (begin + 1, end + 1) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin + 1
    ]


def halve(checkpoint: Path, folder: Path) -> int:
    """Copy a head's checkpoint into `folder` with weights in 16 bits; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "training.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    tensors = load_file(checkpoint / WEIGHTS)
    half = {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}
    save_file(half, folder / WEIGHTS, metadata={"format": "pt"})
    return (folder / WEIGHTS).stat().st_size


def cut(file: Path) -> list[Path]:
    """Cut a file into parts of at most 16 MiB beside it, `FILE.part0` and so on; returns them."""
    data = file.read_bytes()
    parts = []
    for number, begin in enumerate(range(0, len(data), _LARGEST_FILE)):
        parts.append(file.with_name(f"{file.name}.part{number}"))
        parts[-1].write_bytes(data[begin : begin + _LARGEST_FILE])
    return parts


def _say(line: str) -> None:
    print(line, flush=True)

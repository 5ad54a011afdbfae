"""The two architectures, the packed forward pass and the export."""

import copy
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from slipstream.train.attention import ATTENTION, block_diagonal_mask
from slipstream.train.batches import TrainingRows, next_tokens

from .tokenizer import MAX_POSITIONS


class Shape(NamedTuple):
    """What makes one Llama different from another here."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int


SHAPES = {"target": Shape(6, 320, 864, 5), "draft": Shape(2, 128, 352, 2)}


class Batch(NamedTuple):
    """Rows on the device, ready for a pass."""

    tokens: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64: the next token of the same document, -100 where there is none
    is_answer: torch.Tensor  # [B, T] bool: whether the label is the assistant's
    mask: torch.Tensor  # [B, 1, T, T] additive: 0 where a token may look, large and negative elsewhere


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A float32 model of this shape with fresh weights from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=ATTENTION,
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path) -> LlamaForCausalLM:
    """The float32 model of a checkpoint folder, set up for packed rows."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a float16 safetensors checkpoint with its tokenizer; `model` keeps its own precision."""
    copy.deepcopy(model).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def to_batch(rows: TrainingRows, device: torch.device, dtype: torch.dtype) -> Batch:
    """Move rows to `device` and work out labels and the block-diagonal causal mask, which has `dtype`."""
    tokens, documents, is_answer = (
        torch.from_numpy(part).to(device) for part in (rows.tokens, rows.documents, rows.is_answer)
    )
    mask = block_diagonal_mask(documents, dtype)
    return Batch(tokens, next_tokens(tokens, documents), F.pad(is_answer[:, 1:], (0, 1)), mask)


def token_losses(model: LlamaForCausalLM, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Cross-entropy of each label in nats, `[B, T]`, 0 where there is none; matrices multiply in `dtype`."""
    with torch.autocast(batch.tokens.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=batch.tokens, attention_mask=batch.mask, use_cache=False).logits  # [B, T, V]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="none")
    return losses.view_as(batch.labels)

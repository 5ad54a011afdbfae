"""Medusa heads: each predicts one token further ahead from the same hidden state, independently of the others.

Cai, Li, Geng, Peng, Lee, Chen and Dao, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (ICML 2024). Medusa-1, which is trained here, trains the heads of a frozen target; Medusa-2 also trains the
target, which gives another target with heads of the same form. The paper's typical acceptance is not used, because it
changes the target's output distribution.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import HeadCheckpoint, write_checkpoint
from slipstream.draft.heads.residual import HeadsConfig, ProjectedHeads, Projection, ResidualBlock
from slipstream.draft.proposers.parallel import HeadDrafter, HeadOptions
from slipstream.models.causal_lm import CausalLM

PICKLED = "medusa_lm_head.pt"
"""The weights' file as the authors' own code reads it."""
WEIGHT_FILES = ("model.safetensors", "medusa_lm_head.safetensors", PICKLED)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadsConfig):
    """The shape of a set of heads."""

    bias: bool = True
    """In the blocks; the projections have none."""


class MedusaHeads(ProjectedHeads):
    """Head k predicts the token k + 1 positions after the target's own next one.

    They read what the target's output layer reads: the last hidden state, after the final norm.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, lm_head: Projection | None = None) -> None:
        """`lm_head` is the target's output layer, needed where `config.shares_lm_head`; it is never trained."""
        hidden, vocab = config.hidden_size, config.vocab_size
        num_own = 0 if config.shares_lm_head else config.num_heads
        super().__init__([nn.Linear(hidden, vocab, bias=False) for _ in range(num_own)], lm_head)
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden, hidden, config.bias) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """[..., hidden] -> logits [heads, ..., vocab] of all heads or the first few."""
        return self.some(hidden, 0, num_heads)


def load_medusa(path: str, lm_head: Projection | None = None, revision: str | None = None) -> MedusaHeads:
    """Heads in the layout of the authors or of vLLM, float32; `lm_head` as for `MedusaHeads`.

    Raises `ModelError` where the files are not exactly a set of heads.
    """
    checkpoint = HeadCheckpoint(path, WEIGHT_FILES, revision)
    num_layers = checkpoint.size("medusa_num_layers", "num_hidden_layers", default=1)
    checkpoint.rename(lambda name: _usual_name(name, num_layers))
    last = f"0.{num_layers}.weight"
    shares = bool(checkpoint.config.get("original_lm_head"))
    vocab_size = checkpoint.size("vocab_size") if shares else checkpoint.length(last)
    if checkpoint.config.get("truncated_vocab_size") not in (None, vocab_size):
        checkpoint.refuse("has a truncated vocabulary (truncated_vocab_size), which is not supported")
    config = MedusaConfig(
        hidden_size=checkpoint.length("0.0.linear.weight"),
        vocab_size=vocab_size,
        num_heads=checkpoint.size("medusa_num_heads", "num_heads"),
        num_layers=num_layers,
        bias=bool(checkpoint.config.get("medusa_fc_bias", "0.0.linear.bias" in checkpoint.tensors)),
        shares_lm_head=shares,
        base_model=str(checkpoint.config.get("base_model_name_or_path") or ""),
    )
    if shares:
        checkpoint.tensors.pop(last, None)  # a copy of the target's output layer, which some engines need
    heads = MedusaHeads(config, lm_head)
    checkpoint.load_into(heads, _names(heads))
    return heads


def save_medusa(
    heads: MedusaHeads, folder: str | Path, weight_file: str = WEIGHT_FILES[0], lm_head: Tensor | None = None
) -> None:
    """Write heads in the layout of the authors' code (which needs `weight_file=PICKLED`) and of vLLM.

    For heads that share it, vLLM needs the target's output layer in the file: `lm_head` [vocab, hidden].
    """
    config, names = heads.config, _names(heads)
    tensors = {names[name]: tensor for name, tensor in heads.state_dict().items()}
    if config.shares_lm_head and lm_head is not None:
        tensors[f"0.{config.num_layers}.weight"] = lm_head
    config_json = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": config.base_model,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.shares_lm_head,
    }
    write_checkpoint(folder, config_json, tensors, weight_file)


def _names(heads: MedusaHeads) -> dict[str, str]:
    """Entry of the state to its name in the authors' files, where a head is a list of its blocks and its projection."""
    names = {}
    for name in heads.state_dict():
        part, head, rest = name.split(".", 2)
        names[name] = (
            f"{head}.{heads.config.num_layers}.{rest}" if part == "projections" else f"{head}.{rest}"
        )
    return names


def _usual_name(name: str, num_layers: int) -> str:
    """The authors' name of a tensor that may have vLLM's name."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
    name = re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_layers}.", name)
    return re.sub(r"^lm_head\.", rf"0.{num_layers}.", name)


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """Keys of `speculative_config` for `method: medusa`."""

    method: ClassVar[str] = "medusa"


class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads."""

    Options = MedusaOptions
    weight_files = WEIGHT_FILES

    @classmethod
    def load(cls, options: HeadOptions, target: CausalLM) -> MedusaHeads:
        return load_medusa(options.model, target.project, options.revision)

"""Hydra heads: like Medusa's, but each also reads the draft tokens before its own.

Ankner, Parthasarathy, Nrusimha, Rinard, Ragan-Kelley and Brandon, "Hydra: Sequentially-Dependent Draft Heads for Medusa
Decoding" (COLM 2024). These are the paper's plain Hydra heads; Hydra++ adds a decoder layer before them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import HeadCheckpoint, write_checkpoint
from slipstream.draft.heads.residual import HeadsConfig, ProjectedHeads, Projection, ResidualBlock
from slipstream.draft.proposers.parallel import HeadDrafter, HeadOptions
from slipstream.models.causal_lm import CausalLM

PICKLED = "hydra_lm_head.pt"
"""The weights' file as the authors' own code reads it."""
WEIGHT_FILES = ("model.safetensors", PICKLED)
ONLY = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
"""Configuration values that are supported; a key may be absent."""


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadsConfig):
    """The shape of a set of heads; the first block of each reads the embeddings too."""


class HydraHeads(ProjectedHeads):
    """Head k predicts the token k + 1 positions after the target's own next one, given all tokens before it.

    It reads the target's last hidden state, after the final norm, and then the target's embeddings of the k + 1 tokens
    that follow the token of that state, side by side: [(k + 2) * hidden].
    """

    config: HydraConfig
    reads_tokens = True

    def __init__(self, config: HydraConfig, lm_head: Projection | None = None) -> None:
        """`lm_head` is the target's output layer, needed where `config.shares_lm_head`; it is never trained."""
        hidden, vocab = config.hidden_size, config.vocab_size
        num_own = 0 if config.shares_lm_head else config.num_heads
        super().__init__([nn.Linear(hidden, vocab) for _ in range(num_own)], lm_head)
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ResidualBlock((head + 2) * hidden, hidden),
                *(ResidualBlock(hidden, hidden) for _ in range(config.num_layers - 1)),
            )
            for head in range(config.num_heads)
        )

    def step(self, head: int, rows: Tensor) -> Tensor:
        """Logits [..., vocab] of one head for its inputs `rows` [..., (head + 2) * hidden]."""
        return self.some(rows, head, 1)[0]

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Teacher forcing: logits [heads, batch, length, vocab] where the text itself follows each position.

        `hidden` and `embeddings` [batch, length, hidden] belong to the same tokens. Rows whose following tokens lie
        beyond the end read zeros in their place; they have no label either.
        """
        rows, states = hidden, []
        for head, block in enumerate(self.blocks):
            following = nn.functional.pad(embeddings[:, head + 1 :], (0, 0, 0, head + 1))
            rows = torch.cat([rows, following[:, : hidden.shape[1]]], dim=-1)
            states.append(block(rows))
        return self.project(torch.stack(states))


def load_hydra(path: str, lm_head: Projection | None = None, revision: str | None = None) -> HydraHeads:
    """Heads in the layout of the authors, float32; `lm_head` as for `HydraHeads`.

    Raises `ModelError` where the files are not exactly a set of plain Hydra heads.
    """
    checkpoint = HeadCheckpoint(path, WEIGHT_FILES, revision)
    for key, only in ONLY.items():
        if checkpoint.config.get(key, only) != only:
            checkpoint.refuse(f"has {key} {checkpoint.config[key]!r}; only {only!r} is supported")
    shares = bool(checkpoint.config.get("original_lm_head"))
    config = HydraConfig(
        hidden_size=checkpoint.length("hydra_mlp.0.0.linear.weight"),
        vocab_size=checkpoint.size("vocab_size") if shares else checkpoint.length("hydra_lm_head.0.weight"),
        num_heads=checkpoint.size("hydra_num_heads"),
        num_layers=checkpoint.size("hydra_num_layers"),
        shares_lm_head=shares,
        base_model=str(checkpoint.config.get("base_model_name_or_path") or ""),
    )
    heads = HydraHeads(config, lm_head)
    checkpoint.load_into(heads, _names(heads))
    return heads


def save_hydra(heads: HydraHeads, folder: str | Path, weight_file: str = WEIGHT_FILES[0]) -> None:
    """Write heads in the layout of the authors' code (which needs `weight_file=PICKLED`)."""
    config, names = heads.config, _names(heads)
    config_json = {
        "model_type": "hydra",
        "base_model_name_or_path": config.base_model,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "original_lm_head": config.shares_lm_head,
        **ONLY,
    }
    tensors = {names[name]: tensor for name, tensor in heads.state_dict().items()}
    write_checkpoint(folder, config_json, tensors, weight_file)


def _names(heads: HydraHeads) -> dict[str, str]:
    """Entry of the state to its name in the authors' files."""
    usual = {"blocks": "hydra_mlp", "projections": "hydra_lm_head"}
    return {name: re.sub(r"^\w+", lambda part: usual[part[0]], name) for name in heads.state_dict()}


@dataclass(frozen=True, kw_only=True)
class HydraOptions(HeadOptions):
    """Keys of `speculative_config` for `method: hydra`."""

    method: ClassVar[str] = "hydra"


class HydraDrafter(HeadDrafter):
    """Drafts with Hydra heads."""

    Options = HydraOptions
    weight_files = WEIGHT_FILES

    @classmethod
    def load(cls, options: HeadOptions, target: CausalLM) -> HydraHeads:
        return load_hydra(options.model, target.project, options.revision)

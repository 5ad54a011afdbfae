"""Drafters for the embedded target that no run has trained, for programs that ask only whether texts stay the same.

Each begins as a run of its trainer does, with the weights of the embedded drafter nearest to it; what that one has no
weights for is random, by a fixed seed. So they are the same on every machine, and a few of their tokens are accepted.
The layer for multi-token prediction is the target's own first layer, which knows what often follows a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.draft.heads.mtp_files import save_mtp
from slipstream.draft.heads.mtp_head import MtpForm, MtpHead
from slipstream.draft.methods import DFLASH, MTP, PARD, PEAGLE
from slipstream.kv.pool import LayerShape
from slipstream.models import load_tokenizer
from slipstream.models.single_layer import SingleLayer, single_layer_config
from slipstream.text.prompts import encode_chat
from slipstream.train.batches import TrainingDocument
from slipstream.train.block_options import DSPARK, BlockTrainOptions
from slipstream.train.dflash import BlockStudent
from slipstream.train.options import PardTrainOptions, PEagleTrainOptions
from slipstream.train.pard import PardStudent
from slipstream.train.peagle import PEagleStudent
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Student

NUM_DOCUMENTS = 20
"""Prompts by which the trainers find the mask token and the scale of the target's states."""


def untrained(folder: Path) -> dict[str, Path]:
    """Write all into `folder`; method, or `dspark`, to the folder of its own."""
    target = FrozenTarget(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)
    for name, student in _students(target).items():
        student.save(folder / name)
    _save_mtp(target.model, folder / MTP.name)
    return {name: folder / name for name in (DFLASH.name, DSPARK, PEAGLE.name, PARD.name, MTP.name)}


def _students(target: FrozenTarget) -> dict[str, Student]:
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    documents = [_document(tokenizer, row) for row in sample_prompts()[:NUM_DOCUMENTS]]
    blocks = BlockTrainOptions(init=EMBEDDED_EAGLE3)
    return {
        **{
            name: BlockStudent(blocks, target, tokenizer, documents, name, 0)
            for name in (DFLASH.name, DSPARK)
        },
        PEAGLE.name: PEagleStudent(
            PEagleTrainOptions(init=EMBEDDED_EAGLE3, num_layers=2), target, tokenizer, documents, 0
        ),
        PARD.name: PardStudent(PardTrainOptions(init=EMBEDDED_DRAFT), target, tokenizer, documents, 0),
    }


def _document(tokenizer: Any, row: dict[str, Any]) -> TrainingDocument:
    tokens = torch.tensor(encode_chat(tokenizer, row["messages"])).numpy()
    return TrainingDocument(row["task"], tokens, tokens >= 0)


def _save_mtp(target: Any, folder: Path) -> None:
    """A prediction layer that reads a token's embedding and, weaker, the target's state of the token before."""
    config: Any = AutoConfig.from_pretrained(EMBEDDED_TARGET)
    model: Any = AutoModelForCausalLM.from_config(single_layer_config(config), dtype=torch.float32)
    own, decoder = model.get_decoder(), target.get_decoder()
    own.layers[0].load_state_dict(decoder.layers[0].state_dict())
    own.norm.load_state_dict(decoder.norm.state_dict())
    head = MtpHead([SingleLayer(model, LayerShape(1, 1, 1), frozenset())], MtpForm(masks_first=False))
    identity = torch.eye(config.hidden_size)
    head.layer(0).projection.weight.data = torch.cat([identity, 0.3 * identity], dim=1)
    save_mtp(head, folder, target=EMBEDDED_TARGET, config=config)

"""A real draft with another tokenizer: the embedded one without its later merges, its tokens in another order.

The weights are those of the embedded draft; common words that its tokenizer now spells in pieces cost it some accuracy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slipstream.assets import EMBEDDED_DRAFT

NUM_MERGES = 2500


def save_cut_draft(folder: Path) -> str:
    """Write the draft to `folder`, which must not exist; returns it."""
    shutil.copytree(EMBEDDED_DRAFT, folder)
    path = folder / "tokenizer.json"
    path.chmod(0o644)
    state = json.loads(path.read_text())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    gone = {"".join(merge) for merge in merges[NUM_MERGES:]} - {
        "".join(merge) for merge in merges[:NUM_MERGES]
    }
    kept = sorted(number for token, number in vocab.items() if token not in gone)
    kept = kept[len(kept) // 2 :] + kept[: len(kept) // 2]
    new = {number: position for position, number in enumerate(kept)}
    state["model"]["vocab"] = {token: new[number] for token, number in vocab.items() if number in new}
    state["model"]["merges"] = merges[:NUM_MERGES]
    for added in state["added_tokens"]:
        added["id"] = new[added["id"]]
    path.write_text(json.dumps(state))

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT)
    rows = model.get_input_embeddings().weight.data[kept].clone()
    model.resize_token_embeddings(len(kept))
    model.get_input_embeddings().weight.data.copy_(rows)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, key, None)
        setattr(model.generation_config, key, None)
    model.to(torch.float16).save_pretrained(folder)
    return str(folder)

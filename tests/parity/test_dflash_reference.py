"""DFlash heads compute what the libraries that train them compute; `dflash_reference/record.py` recorded that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.draft.heads.dflash_files import read_dflash, save_dflash
from slipstream.draft.heads.dflash_head import DFlashHead
from tests.kit.dflash_heads import attend_over

FILE = Path(__file__).parent / "dflash_reference" / "recorded.safetensors"
TENSORS = load_file(FILE)
with safe_open(FILE, "pt") as opened:
    METADATA: dict[str, str] = opened.metadata()
CASES: dict[str, Any] = json.loads(METADATA["cases"])
BLOCKS: list[int] = json.loads(METADATA["blocks"])
TOKENS, FEATURES, EMBED, PROJECT = (
    TENSORS[f"text/{name}"] for name in ("tokens", "features", "embed", "project")
)
TOLERANCE = 1e-4


class RecordedTarget:
    """The target of the recorded heads, as far as it is needed to read them."""

    hidden_size, vocab_size, num_layers, context_length = 16, 40, 6, 64

    def embed(self, token_ids: Tensor) -> Tensor:
        return EMBED[token_ids]


def written(case: str, folder: Path) -> str:
    """The case's checkpoint as its library writes it."""
    prefix = f"{case}/weights/"
    tensors = {name.removeprefix(prefix): t for name, t in TENSORS.items() if name.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CASES[case]))
    return str(folder)


def drafted(head: DFlashHead, place: int) -> tuple[Tensor, Tensor | None]:
    """Logits [drafts, draft vocab] and confidences [drafts] of the block at `place` of the recorded text."""
    config = head.config
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = TOKENS[place]
    positions = torch.arange(place, place + config.block_size)
    hidden = head(EMBED[ids][None], positions[None], attend_over(head, FEATURES[:place]))
    predicting = hidden[:, config.first_slot :]
    logits = head.logits(predicting, lambda states: states @ PROJECT.T)
    tokens, before = TOKENS[positions][None], TOKENS[place - 1 : place]
    if head.left_to_right is not None:
        logits = head.left_to_right(hidden, logits, tokens, before, RecordedTarget().embed)
    confidence = head.confidence(predicting, tokens[:, : config.num_drafts])
    return logits[0], None if confidence is None else confidence[0]


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest, of the tokens that are possible; infinite where other tokens are."""
    possible = theirs > float("-inf")
    if not torch.equal(possible, mine > float("-inf")):
        return float("inf")
    return float((mine - theirs)[possible].abs().max())


def compare(head: DFlashHead, case: str) -> float:
    first, largest = head.config.first_slot, 0.0
    for block, place in enumerate(BLOCKS):
        logits, confidence = drafted(head, place)
        largest = max(largest, difference(logits, TENSORS[f"{case}/logits"][block, first:]))
        assert (confidence is None) == (f"{case}/confidence" not in TENSORS)
        if confidence is not None:
            largest = max(largest, difference(confidence, TENSORS[f"{case}/confidence"][block, first:]))
    return largest


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_the_reference_s(case: str, tmp_path: Path) -> None:
    head = read_dflash(written(case, tmp_path), RecordedTarget()).eval()
    assert compare(head, case) <= TOLERANCE
    layout = "speculators" if case.startswith("speculators") else "z-lab"
    save_dflash(head, tmp_path / "again", target="recorded", layout=layout)
    assert compare(read_dflash(str(tmp_path / "again"), RecordedTarget()).eval(), case) <= TOLERANCE


def test_every_kind_of_head_is_recorded() -> None:
    names = " ".join(CASES)
    for part in ("vanilla", "gated", "rnn", "confidence", "dflash2", "xpress", "domino", "window", "reduced"):
        assert part in names
    assert max(float(TENSORS[f"{case}/logits"][0, -1].nan_to_num(neginf=0).std()) for case in CASES) > 1

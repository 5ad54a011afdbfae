"""Several layers for multi-token prediction that draft in turn: their logits, trees, files and errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import LLM
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.mtp_files import LAYOUTS, num_mtp_layers
from slipstream.draft.registry import create_drafter
from slipstream.errors import ModelError
from slipstream.models import RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import draft_context
from tests.kit.mtp_drafts import (
    CLOSE,
    TEXT,
    changed,
    drafted,
    fill,
    flags,
    make,
    states_of,
    texts,
    texts_without,
)
from tests.kit.mtp_targets import VOCAB, mtp_target


def reference_levels(family: str, text: list[int], chain: list[int] | None, depth: int) -> list[Tensor]:
    """The logits that each draft token of a chain is drawn from, by whole passes over each layer; None is greedy.

    A layer's row reads what the layer before put out for the row before: the first layer's the target's state, and
    behind the text what the last layer put out.
    """
    made, found, tokens = mtp_target(family), [], list(text)
    number, fed, read = len(made.parts), flags(made), [states_of(family, text)[:-1]]
    ends: list[Tensor] = []  # what each layer put out for the last row
    for level in range(depth):
        before, ends = ends, []
        for k in range(number):
            if level:
                read[k] = torch.cat([read[k], before[k - 1]])
            output = made.step(tokens[1 + k :], read[k], number=k, **fed)
            recycled = output if family.startswith("glm") else made.parts[k].final_norm(output)
            ends.append(recycled[-1:])
            if not level and k + 1 < number:
                read.append(recycled[:-1])
            if level % number == k:
                found.append(made.logits(output[-1:], k)[0])
        tokens.append(int(found[-1].argmax()) if chain is None else chain[level])
    return found


SEVERAL = ["llama*2", "deepseek*2", "glm*3", "qwen3.5*2", "mimo*2", "mimo-v2*3"]


@pytest.mark.parametrize("family", SEVERAL)
def test_the_logits_of_each_of_several_layers(family: str) -> None:
    """Five levels, so that the first layer goes on behind the last one; the text comes in three passes."""
    drafter = make(family, num_speculative_tokens=5)
    states, chain, rows = states_of(family, TEXT)[:-1], [5, 99, 7, 300, 12], len(TEXT) - 1
    pool = fill(rows + 5, drafter)
    for begin, end in ((0, 1), (1, 8), (8, rows)):
        group = RowGroup(pool.slots, begin, TEXT[begin + 1 : end + 1], [end - begin - 1])
        given, logits = drafter.executor.forward(ForwardBatch([group]), pool, states[begin:end], level=0)
    found = [logits[0]]
    for level, token_id in enumerate(chain[:-1], start=1):
        group = RowGroup(pool.slots, rows + level - 1, [token_id], [0])
        given, logits = drafter.executor.forward(ForwardBatch([group]), pool, given[-1:], level=level)
        found.append(logits[0])
    for ours, theirs in zip(found, reference_levels(family, TEXT, chain, 5), strict=True):
        assert float((ours - theirs).abs().max()) < CLOSE
        assert float(theirs.std()) > 0.3


@pytest.mark.parametrize("family", ["llama*2", "mimo-v2*3"])
def test_a_tree_of_several_layers_has_the_logits_of_its_paths(family: str) -> None:
    """Two siblings, and a child below each; another sequence lies before the rows."""
    drafter = make(family, num_speculative_tokens=3)
    states, rows = states_of(family, TEXT)[:-1], len(TEXT) - 1
    pool = fill(2 * rows + 8, drafter)
    slots = range(rows, 2 * rows + 8)
    both = [RowGroup(pool.slots, 0, TEXT[1:], []), RowGroup(slots, 0, TEXT[1:], [rows - 1])]
    given, _ = drafter.executor.forward(ForwardBatch(both), pool, torch.cat([states, states]), level=0)
    level_1 = RowGroup(slots, rows, [5, 9], [0, 1], [rows] * 2, (), [[0], [1]])
    given, logits = drafter.executor.forward(ForwardBatch([level_1]), pool, given[-1:].expand(2, -1), level=1)
    places = [rows + 1] * 2
    level_2 = RowGroup(slots, rows, [40, 41], [0, 1], places, [rows] * 2, [[0, 2], [1, 3]])
    _, below = drafter.executor.forward(ForwardBatch([level_2]), pool, given, level=2)
    for number, path in enumerate(([5, 40, 0], [9, 41, 0])):
        expected = reference_levels(family, TEXT, path, 3)
        assert float((logits[number] - expected[1]).abs().max()) < CLOSE
        assert float((below[number] - expected[2]).abs().max()) < CLOSE


@pytest.mark.parametrize("depth", [2, 5])
def test_a_chain_of_several_layers(depth: int) -> None:
    """Of more layers than it drafts tokens, it reads as many as it needs."""
    drafter = make("glm*3", num_speculative_tokens=depth)
    assert len(drafter.head.layers) == min(3, depth)
    expected = [int(logits.argmax()) for logits in reference_levels("glm*3", TEXT, None, depth)]
    assert drafted(drafter, TEXT, depth) == expected


SECOND = r"prediction layer 2 of 2 in .* "


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        (
            "llama*2",
            lambda t, c: t.pop("model.layers.3.hnorm.weight"),
            SECOND + r"lacks the tensor model\.layers\.3\.hnorm\.weight",
        ),
        (
            "llama*2",
            lambda t, c: t.pop("model.layers.3.mlp.up_proj.weight"),
            SECOND + r"lacks the tensor model\.layers\.3\.mlp\.up_proj\.weight",
        ),
        (
            "qwen3.5*2",
            lambda t, c: t.pop("mtp.layers.1.mlp.up_proj.weight"),
            SECOND + r"lacks the tensor mtp\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            "llama",
            lambda t, c: c.update(num_nextn_predict_layers=2),
            SECOND + r"lacks the tensor model\.layers\.3\..* and \d+ more",
        ),
        (
            "llama*2",
            lambda t, c: t.update({"model.layers.3.eh_proj.weight": torch.ones(32, 32)}),
            SECOND + r"has model\.layers\.3\.eh_proj\.weight of shape \[32, 32\], not \[32, 64\]",
        ),
    ],
)
def test_what_is_missing_of_several_layers_is_told(
    family: str, change: Any, told: str, tmp_path: Path
) -> None:
    lm = load_model(changed(tmp_path, change, family))
    with pytest.raises(ModelError, match=told) as refused:
        create_drafter(SpeculativeConfig("mtp"), dataclasses.replace(draft_context(VOCAB, 256), target=lm))
    assert "\n" not in str(refused.value)


def test_the_number_of_layers_is_the_configurations_or_the_files(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "mimo")
    for key, expected in ((0, 2), (1, 1)):
        folder = changed(tmp_path / str(key), lambda t, c: c.update(num_nextn_predict_layers=key), "mimo*2")  # noqa: B023
        names = list(load_file(Path(folder) / "model.safetensors"))
        outlined = outline_model(folder)
        assert num_mtp_layers(outlined.config, names, layout, outlined) == expected


def test_auto_chooses_it() -> None:
    """Beside a lookup: the layers in the target's checkpoint, and the target's states, reach the drafter."""
    spec: dict[str, Any] = {"method": "auto", "drafters": [{"method": "suffix"}, {"method": "mtp"}]}
    always = {**spec, "plan": [{"drafter": 1, "num_speculative_tokens": 3}]}
    alone = {"method": "mtp", "num_speculative_tokens": 3}
    drafted: dict[int, list[tuple[int, ...]]] = {}
    for run, given in enumerate((spec, always, alone)):
        llm = LLM(mtp_target("llama*2").folder, speculative_config=given)
        own = drafted.setdefault(run, [])
        llm.engine.on_observe = lambda seen, own=own: own.extend(
            tuple(one.proposal.token_ids) for one in seen
        )
        assert texts(llm) == texts_without("llama*2")
        assert llm.engine.stats().num_draft_failures == 0
    assert sorted(drafted[1]) == sorted(drafted[2])
    assert sum(map(len, drafted[1])) > 100

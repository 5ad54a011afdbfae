"""Other readings of a head's checkpoint. A wrong one loads without an error and shows in the acceptance alone."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft.base import Drafter
from slipstream.draft.heads.checkpoints import outline_checkpoint
from slipstream.draft.heads.dflash_files import dflash_config
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.heads.dflash_layouts import ZLAB, written_config
from slipstream.draft.heads.eagle_head import default_feature_layers
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.heads.mtp_head import MtpForm
from slipstream.draft.methods import DFLASH, EAGLE3, MTP, PEAGLE
from slipstream.errors import ModelError
from slipstream.models.causal_lm import CausalLM

READ_LAYERS = (EAGLE3.name, PEAGLE.name)
"""Kinds whose configuration names the target's layers as EAGLE-3's does."""


@dataclass(frozen=True)
class Variation:
    """A draft that is read otherwise."""

    sentence: str
    """What is other, and what it is instead of."""
    kind: str
    options: Mapping[str, Any]
    """Keys of `speculative_config`."""
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    """What stands in the place of the `config.json` of the folder `options["model"]`; None leaves it."""

    @contextlib.contextmanager
    def speculative(self) -> Iterator[SpeculativeConfig]:
        """The configuration that runs it."""
        if self.config is None:
            yield SpeculativeConfig(self.kind, options=dict(self.options))
            return
        folder = Path(self.options["model"])
        with tempfile.TemporaryDirectory() as other:
            for file in folder.iterdir():
                if file.name != "config.json":
                    (Path(other) / file.name).symlink_to(file.resolve())
            (Path(other) / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
            yield SpeculativeConfig(self.kind, options={**self.options, "model": other})


def variations(kind: str, draft: str, drafter: Drafter, target: CausalLM) -> Iterator[Variation]:
    """Other readings of a head of this kind that has been loaded as `drafter`, one change each.

    `draft` is its folder or hub id; empty for a layer in the target's own checkpoint. There are none of drafts on the
    hub, and of kinds that are read in one way only.
    """
    if isinstance(drafter, MtpDrafter):
        yield from _of_mtp(draft, drafter.head.form)
    elif Path(draft).is_dir() and kind in READ_LAYERS:
        yield from _of_eagle3(kind, Path(draft), target.num_layers)
    elif Path(draft).is_dir() and kind == DFLASH.name:
        yield from _of_dflash(draft, target)


def _of_eagle3(kind: str, folder: Path, num_layers: int) -> Iterator[Variation]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def changed(sentence: str, **changes: Any) -> Variation:
        return Variation(sentence, kind, {"model": str(folder)}, {**config, **changes})

    before = bool(config.get("norm_before_residual", False))
    yield changed(
        f"norm_before_residual {str(not before).lower()} instead of {str(before).lower()}",
        norm_before_residual=not before,
    )
    nested = config.get("eagle_config") or {}
    layers = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    layers = layers or list(default_feature_layers(num_layers))
    for moved in _shifted(layers, 0, num_layers):
        changes: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": moved}
        if nested:
            changes["eagle_config"] = {**nested, **changes}
        yield changed(f"hidden states {moved} instead of {layers}", **changes)


def _of_dflash(draft: str, target: CausalLM) -> Iterator[Variation]:
    config = dflash_config(*outline_checkpoint(draft), target, draft)
    for sentence, other in _other_blocks(config, target.num_layers):
        with contextlib.suppress(ModelError):  # not every mixture of layers can be written down
            raw = written_config(other, ZLAB, draft)
            yield Variation(sentence, DFLASH.name, {"model": draft}, raw)


def _other_blocks(config: DFlashConfig, num_layers: int) -> Iterator[tuple[str, DFlashConfig]]:
    rows = ["its own position", "the position behind it"]
    mine, other = (rows[from_anchor] for from_anchor in (config.from_anchor, not config.from_anchor))
    yield f"rows that predict {other} instead of {mine}", replace(config, from_anchor=not config.from_anchor)
    for moved in _shifted(config.feature_layers, 1, num_layers):
        sentence = f"hidden states {moved} instead of {list(config.feature_layers)}"
        yield sentence, replace(config, feature_layers=tuple(moved))
    sees = ["all rows of their block", "the rows before them alone"]
    now = all(config.causal)
    sentence = f"rows that see {sees[not now]} instead of {sees[now]}"
    yield sentence, replace(config, causal=(not now,) * config.num_layers)


def _shifted(layers: Any, first: int, last: int) -> Iterator[list[int]]:
    for shift in (1, -1):
        moved = [layer + shift for layer in layers]
        if min(moved) >= first and max(moved) <= last:
            yield moved


def _of_mtp(draft: str, form: MtpForm) -> Iterator[Variation]:
    states = ["before the target's final norm", "behind it"]
    outputs = ["the layer's output before its norm", "the output behind its norm"]
    orders = ["the embedding first", "the hidden state first"]
    model = {"model": draft} if draft else {}
    for sentence, options in (
        (
            f"the hidden state {states[not form.hidden_is_normed]} instead of {states[form.hidden_is_normed]}",
            {"hidden": "pre" if form.hidden_is_normed else "post"},
        ),
        (
            f"{orders[not form.hidden_first]} instead of {orders[form.hidden_first]}",
            {"order": "eh" if form.hidden_first else "he"},
        ),
        (
            f"{outputs[not form.recycles_normed]} recycled instead of {outputs[form.recycles_normed]}",
            {"recycled": "y" if form.recycles_normed else "z"},
        ),
    ):
        yield Variation(sentence, MTP.name, {**model, **options})

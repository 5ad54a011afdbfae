"""Measures a draft's acceptance on a few prompts.

A head with wrong layer numbers or norm flags loads without an error and has a low acceptance. So the canary is also run
with variations of the configuration, and a much better variation indicates the error.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.assets import sample_prompts
from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.request import RequestMetrics
from slipstream.draft.heads.eagle_head import default_feature_layers
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_conversation

NUM_PROMPTS, MAX_TOKENS = 14, 32
POOR = 0.15
"""Conditional acceptance at the first position below which a draft is reported as a fault."""
BETTER = 1.1
"""Ratio by which a variation's acceptance must be higher to be reported."""


@dataclass(frozen=True)
class Canary:
    """A draft's acceptance."""

    first: float
    """Conditional acceptance at the first position."""
    length: float
    """τ"""
    num_failures: int


def run_canary(target: Engine, speculative: SpeculativeConfig) -> Canary:
    """Greedy answers to a few bundled prompts with this draft, on the target's weights."""
    engine = create_engine(target.config, speculative, like=target)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for number, row in enumerate(sample_prompts()[:NUM_PROMPTS]):
        try:
            prompt = encode_conversation(engine.tokenizer, row["messages"])
        except RequestError:  # the template refuses it
            prompt = encode_conversation(engine.tokenizer, row["messages"], raw=True)
        with contextlib.suppress(RequestError):  # longer than the model's context
            engine.add_request(str(number), prompt, params)
    outputs = []
    while engine.has_unfinished:
        outputs += [update.output for update in engine.step() if update.output is not None]
    merged = RequestMetrics.merged([output.metrics for output in outputs])
    conditional = merged.conditional_acceptance
    return Canary(
        conditional[0] if conditional else 0.0, merged.acceptance_length, engine.stats().num_draft_failures
    )


def variations(folder: Path, num_layers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variations of an EAGLE-3 checkpoint's configuration: (description, changed configuration)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    before = bool(config.get("norm_before_residual", False))
    yield (
        f"norm_before_residual {str(not before).lower()} instead of {str(before).lower()}",
        {**config, "norm_before_residual": not before},
    )
    nested = config.get("eagle_config") or {}
    taps = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    taps = taps or list(default_feature_layers(num_layers))
    for shift in (1, -1):
        moved = [layer + shift for layer in taps]
        if min(moved) >= 0 and max(moved) <= num_layers:
            changed = {**config, "eagle_aux_hidden_state_layer_ids": moved}
            if nested:
                changed["eagle_config"] = {**nested, "eagle_aux_hidden_state_layer_ids": moved}
            yield f"hidden states {moved} instead of {taps}", changed


def mtp_variations(drafter: MtpDrafter) -> Iterator[tuple[str, str, str]]:
    """Other ways to feed a layer for multi-token prediction: (option, what it is now, another value).

    A wrong one raises no error anywhere, since a norm hides the scale of what it is given.
    """
    form = drafter.head.form
    yield "hidden", *(("post", "pre") if form.hidden_is_normed else ("pre", "post"))
    yield "order", *(("he", "eh") if form.hidden_first else ("eh", "he"))
    if drafter.shape.depth > 1:
        yield "recycled", *(("z", "y") if form.recycles_normed else ("y", "z"))


@contextlib.contextmanager
def with_config(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """A temporary folder with the same weights and another configuration."""
    with tempfile.TemporaryDirectory() as other:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(other) / file.name).symlink_to(file.resolve())
        (Path(other) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        yield other

"""Checks of a loaded model before any request depends on it.

Four checks: every layer attends through our hook (`probe_layers`); the mask that Transformers would have made is the
one that we make (`check_masks`); a dozen tokens, packed beside another sequence and in a tree, give the logits of the
model's own attention (`check_logits`), and nearly the same where keys and values are held as requests will have them
(`check_cache`). A model that fails one of them would run and give wrong text without an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.errors import UnsupportedModelError
from slipstream.kv.pool import LayerShape
from slipstream.models.attention.base import ATTENTION_NAME, AttentionBackend, Variant
from slipstream.models.attention.hook import slipstream_attention
from slipstream.models.attention.probe import LayerProbe
from slipstream.models.causal_lm import NUM_TRIAL_ROWS, CausalLM
from slipstream.models.rows import RowGroup
from slipstream.models.support import context_length, text_config, unsupported

log = logging.getLogger(__name__)

PROBE_NAME = f"{ATTENTION_NAME}_probe"
"""The hook under a name for which Transformers builds masks: those of `_visibility`."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest error of a row's logits, relative to their spread. A wrong attention is off by some tenths or more."""

CACHE_TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.1, torch.int8: 0.25}
"""Largest error that a type of cache may make in three quarters of the rows, relative to their spread.

Some four times the largest that was seen in tiny models of random weights, 64 experts among them; ten times that of
those without experts. Keys that do not fit a type are off by some tenths, or are no numbers."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a pass over two rows tells of a model."""

    shapes: list[LayerShape]
    """What each layer stores for a token."""
    variants: list[Variant]
    """How each layer attends; empty for a model that does not attend through the hook."""
    vocab_size: int


def probe_layers(model: Any, backend: AttentionBackend) -> Probed:
    """Try the model out on two rows; every layer must go through the backend."""
    num_layers = text_config(model.config).num_hidden_layers
    probe = LayerProbe()
    logits = _run_probe(model, backend, probe)
    if sorted(probe.shapes) != list(range(num_layers)):
        raise unsupported(
            model.config,
            f"{len(probe.shapes)} of its {num_layers} layers attend through the attention interface; the "
            "others have an attention of their own or keep state that cannot be rolled back",
        )
    if logits.shape[1] != 1:
        raise unsupported(model.config, "it ignores logits_to_keep")
    variants = [probe.masks[layer][0] for layer in range(num_layers) if layer in probe.masks]
    return Probed([probe.shapes[layer] for layer in range(num_layers)], variants, int(logits.shape[-1]))


def check_masks(lm: CausalLM) -> None:
    """Compare each layer's mask, as Transformers would make it, with causality and the sliding window."""
    if lm.backend.attn_implementation != ATTENTION_NAME:
        return  # the other backends hand over a mask of their own
    with attention_implementation(lm.model, PROBE_NAME) as switched:
        if not switched:
            log.warning("%s: its masks were not checked, it cannot switch its attention", lm.family)
            return
        probe = LayerProbe()
        _run_probe(lm.model, lm.backend, probe)
    positions = boundary_positions(lm.config)
    distance = positions[:, None] - positions[None, :]
    for layer, (variant, intended) in sorted(probe.masks.items()):
        if intended is None:
            continue
        ours = distance >= 0
        if variant.sliding_window is not None:
            ours &= distance < variant.sliding_window
        if intended.shape[-2:] != ours.shape or not bool((intended.cpu() == ours).all()):
            raise unsupported(lm.config, f"the mask of layer {layer} is neither causal nor a sliding window")


def stock_logits(lm: CausalLM) -> Tensor | None:
    """Logits [rows, vocab] of a dozen rows under the model's own attention; None where it cannot be had."""
    ids = torch.tensor(lm.trial_tokens(), device=lm.device)
    hooked = lm.backend.attn_implementation == ATTENTION_NAME
    with attention_implementation(lm.model, "eager") as switched, _refusing(lm.config):
        if hooked and not switched:
            log.warning("%s: its logits were not checked, it cannot switch its attention", lm.family)
            return None
        with torch.inference_mode():
            logits: Tensor = lm.model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits


def check_logits(lm: CausalLM, expected: Tensor) -> None:
    """Compare the rows of `packed_logits` with `expected` [tokens, vocab], as Transformers computes them."""
    with _refusing(lm.config):
        ours, places = packed_logits(lm)
    errors = _errors(ours, expected[places])
    # In half precision a near-tie in a router may send a row to another expert. That is no fault of the attention.
    rounding = lm.logit_error
    error = errors.max() if lm.dtype == torch.float32 and rounding is None else errors.median()
    tolerance = TOLERANCE.get(lm.dtype, TOLERANCE[torch.bfloat16]) if rounding is None else rounding
    if not error <= tolerance:  # NaN is refused too
        where = "its attention is not what the hook computes"
        if rounding is not None:
            where = f"its {lm.weight_type} weights are not its own"
        raise unsupported(
            lm.config,
            f"{where}: over a dozen rows the logits differ from its own by {float(error):.2g} of their spread",
        )


def check_cache(lm: CausalLM) -> None:
    """Compare the logits over the model's own cache (`cache_dtype`) with those over one in the type of its arithmetic.

    Raises `UnsupportedModelError` that names a type which holds this model's keys and values.
    """
    if lm.cache_dtype == lm.dtype:
        return
    with _refusing(lm.config):
        expected, _ = packed_logits(lm, lm.dtype)
        error = _cache_error(lm, lm.cache_dtype, expected)
        if _is_held(lm, lm.cache_dtype, error):
            return
        wider = [dtype for dtype in (torch.float16, torch.bfloat16) if dtype != lm.cache_dtype]
        cure = next(
            (dtype for dtype in wider if _is_held(lm, dtype, _cache_error(lm, dtype, expected))), lm.dtype
        )
    size = f"differ by {error:.2g} of their spread" if math.isfinite(error) else "are no numbers"
    raise UnsupportedModelError(
        f"{_name(lm.cache_dtype)} does not hold the keys and values of this {lm.family} model: over a dozen rows the "
        f"logits {size}; set kv_cache_dtype to {_name(cure)}"
    )


def packed_logits(lm: CausalLM, cache_dtype: torch.dtype | None = None) -> tuple[Tensor, list[int]]:
    """The trial tokens' logits by three passes as an engine makes them, [rows, vocab], and which token each row is.

    `cache_dtype` is how keys and values are held; None: as the model's caches do.

    Two sequences of this text are beside each other in every pass. One is a chain. The other one goes on as a tree, and
    then as a tree below entries of that one; each has tokens of another text too, so the two hold different entries.
    """
    ids = lm.trial_tokens()
    wrong = (ids[0] + 1) % lm.vocab_size
    room = -(-2 * NUM_TRIAL_ROWS // lm.kv_unit) * lm.kv_unit
    pool, slots = lm.trial_cache(2 * room, cache_dtype)
    beside = [
        RowGroup(slots[room:], begin, ids[begin:end], range(end - begin))
        for begin, end in ((0, 6), (6, 9), (9, 12))
    ]
    tree = RowGroup(
        slots,
        6,
        [ids[6], wrong, wrong, ids[7]],
        [0, 3],
        positions=[6, 6, 7, 7],
        tail_seen=[[0], [1], [0, 2], [0, 3]],
    )
    below = RowGroup(
        slots,
        6,
        [wrong, *ids[8:]],
        [1, 2, 3, 4],
        positions=[8, 8, 9, 10, 11],
        stored_positions=[6, 6, 7, 7],
        tail_seen=[[0, 3, 4], [0, 3, 5], [0, 3, 5, 6], [0, 3, 5, 6, 7], [0, 3, 5, 6, 7, 8]],
    )
    passes = [
        lm.forward([mine, other], pool).logits
        for mine, other in zip([RowGroup(slots, 0, ids[:6], range(6)), tree, below], beside, strict=True)
    ]
    places = [*range(6), *range(6), 6, 7, 6, 7, 8, 8, 9, 10, 11, 9, 10, 11]
    return torch.cat(passes).float(), places


@contextlib.contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[bool]:
    """Run the body under another attention; yields False where a model cannot switch."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model.config._attn_implementation == name
    finally:
        model.set_attn_implementation(before)


def boundary_positions(config: Any) -> Tensor:
    """Positions around every length in the configuration: where a window or a chunk would begin or end."""
    values = text_config(config).to_dict().values()
    lists = [value if isinstance(value, list) else [value] for value in values]
    numbers = {number for numbers in lists for number in numbers if type(number) is int}
    edges = {edge + shift for number in numbers for edge in (number, 2 * number) for shift in (-1, 0, 1)}
    return torch.tensor(sorted(edge for edge in edges | {0} if 0 <= edge < context_length(config)))


def _cache_error(lm: CausalLM, cache_dtype: torch.dtype, expected: Tensor) -> float:
    """How far a quarter of the rows are off at least over a cache of this type; NaN where any is no number.

    Not the worst row: after a rounding a near-tie in a router may send one to another expert.
    """
    ours, _ = packed_logits(lm, cache_dtype)
    return float(_errors(ours, expected).quantile(0.75))


def _is_held(lm: CausalLM, cache_dtype: torch.dtype, error: float) -> bool:
    """Whether an error is one of rounding. Rounded weights, of rounded activations, make small ones larger."""
    return error <= max(CACHE_TOLERANCE.get(cache_dtype, 0.0), lm.logit_error or 0.0)


def _errors(ours: Tensor, expected: Tensor) -> Tensor:
    """[rows]: the error of each row of logits [rows, vocab], relative to its spread."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors: Tensor = (ours - expected).norm(dim=-1) / spread.clamp_min(1e-6)
    return errors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run_probe(model: Any, backend: AttentionBackend, probe: LayerProbe) -> Tensor:
    """Logits of the second of two rows."""
    with _refusing(model.config), torch.inference_mode():
        output = model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.ones(1, dtype=torch.long, device=model.device),
            **backend.probe_arguments(probe),
        )
    logits: Tensor = output.logits
    return logits


@contextlib.contextmanager
def _refusing(config: Any) -> Iterator[None]:
    """Turn any exception of a model's own code into an `UnsupportedModelError`."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise unsupported(config, lines[0] if lines else type(error).__name__) from None


def _visibility(*, mask_function: Any, config: Any, **_: Any) -> Tensor:
    """Our mask maker for the probe: which of the boundary positions see each other, bool [1, 1, P, P]."""
    positions = boundary_positions(config)
    zero = torch.zeros((), dtype=torch.long)
    visible: Tensor = mask_function(zero, zero, positions[:, None], positions[None, :])
    return visible.expand(len(positions), len(positions))[None, None]


AttentionInterface.register(PROBE_NAME, slipstream_attention)
AttentionMaskInterface.register(PROBE_NAME, _visibility)

"""Checks of a loaded model before any request depends on it.

Every layer attends through our hook (`probe_layers`), and the mask that Transformers would have made is the one that we
make (`check_masks`). A dozen tokens, at the beginning of a text and at the end of the context, packed next to another
sequence and in a tree, give what the model's own attention gives: each layer of the fused decoder is compared by itself
(`LayerCheck`), of other models the logits (`check_logits`), always with weights and rows that are not rounded. Packed
weights are compared with the checkpoint's (`WeightCheck`), and the cache in its own type with one that rounds nothing
(`check_cache`). A model that fails one of them would run and give wrong text without an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedModelError
from slipstream.kv.pool import NO_ENTRIES, LayerShape
from slipstream.models.attention.base import (
    ATTENTION_NAME,
    AttentionBackend,
    LayerProbe,
    Probed,
    Variant,
    first_seen,
)
from slipstream.models.attention.counted import LengthProbe, needs_positions
from slipstream.models.attention.hook import leading_to, slipstream_attention
from slipstream.models.batch import ForwardBatch
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu.layer_trial import LayerTrial
from slipstream.models.encoder_decoder import EncoderDecoder
from slipstream.models.executor.base import Executor
from slipstream.models.huggingface import AttentionInterface, AttentionMaskInterface
from slipstream.models.layer_check import LayerCheck
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.matrices import unread
from slipstream.models.mixers.base import Mixers
from slipstream.models.refusing import refusing
from slipstream.models.rows import RowGroup
from slipstream.models.support import context_length, layers_without_state, text_config, unsupported
from slipstream.models.trial import NUM_TRIAL_ROWS, far_positions, num_trial_slots, trial_passes
from slipstream.models.weight_check import WeightCheck

log = logging.getLogger(__name__)

PROBE_NAME = f"{ATTENTION_NAME}_probe"
"""The hook under a name for which Transformers builds masks: those of `_visibility`."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest error of a row's logits, relative to their spread. A wrong attention is off by some tenths or more."""

CACHE_TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.1, torch.int8: 0.25}
"""Largest error that a type of cache may make in three quarters of the rows, relative to their spread.

Some four times the largest that was seen in tiny models of random weights, 64 experts among them; ten times that of
those without experts. Keys that do not fit a type are off by some tenths, or are no numbers."""

_ROUNDED_ROWS = 0.3
"""Error of logits whose rows are rounded in every layer: a row that rounds the other way moves later ones."""


def probe_layers(model: Any, backend: AttentionBackend, mixers: Mixers | None = None) -> Probed:
    """Try the model out on two rows; every layer must go through the backend, or be one of the `mixers`."""
    num_layers = text_config(model.config).num_hidden_layers
    probe = LayerProbe()
    with unread(model) as used, contextlib.nullcontext() if mixers is None else mixers.probing():
        logits = _run_probe(model, backend, probe)
        encoded = _probe_encoder(model)
    if not probe.shapes.keys() <= set(range(num_layers)):
        raise unsupported(model.config, "one attention serves several of its layers and is not told which")
    recurrent = set() if mixers is None else mixers.layers
    known = {*probe.shapes, *recurrent, *layers_without_state(model.config)}
    if known != set(range(num_layers)):
        other = next((layer for layer in range(num_layers) if layer not in known), num_layers)
        raise unsupported(
            model.config,
            f"{len(known)} of its {num_layers} layers attend through the attention interface or are recurrences that "
            f"are known; layer {other} has an attention of its own or keeps state that cannot be rolled back",
        )
    if logits.shape[1] != 1:
        raise unsupported(model.config, "it ignores logits_to_keep")
    if backend.attn_implementation == ATTENTION_NAME:
        _check_counting(model, backend)
    variants = [probe.masks[layer][0] for layer in range(num_layers) if layer in probe.masks]
    shapes = [probe.shapes.get(layer, NO_ENTRIES) for layer in range(num_layers)]
    for module, dim in probe.indexers.items():
        module.index_entries = len(shapes)
        shapes.append(LayerShape(1, dim, 0, values_in_keys=True))
    states = [] if mixers is None else mixers.shapes
    return Probed(shapes, variants, int(logits.shape[-1]), used.only_called, states, encoded)


def _check_counting(model: Any, backend: AttentionBackend) -> None:
    """Raise `UnsupportedModelError` for layers that read a cache's length, unless they are given positions instead."""
    cache = LengthProbe()
    probe = LayerProbe()
    with contextlib.suppress(Exception), unread(model), leading_to(probe), torch.inference_mode():
        # One that takes no cache reads no length.
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            past_key_values=cache,
            **backend.probe_arguments(probe),
        )
    if cache.was_read and not needs_positions(model):
        raise unsupported(
            model.config,
            "its layers count the tokens before them by the length of a cache, and not by the positions that they are "
            "given, so that sequences cannot share a pass",
        )


def check_masks(lm: CausalLM) -> None:
    """Compare each layer's mask, as Transformers would make it, with causality and the sliding window or chunk."""
    if lm.backend.attn_implementation != ATTENTION_NAME:
        return  # the other backends hand over a mask of their own
    with attention_implementation(lm.model, PROBE_NAME) as switched:
        if not switched:
            log.warning("%s: its masks were not checked, it cannot switch its attention", lm.family)
            return
        probe = LayerProbe()
        with unread(lm.model):
            _run_probe(lm.model, lm.backend, probe, "a pass whose masks it does not make")
            _probe_encoder(lm.model)
    positions = boundary_positions(lm.config)
    distance = positions[:, None] - positions[None, :]
    for layer, (variant, intended) in sorted(probe.masks.items()):
        if intended is None:
            continue
        ours = distance >= 0
        ours &= positions[None, :] >= first_seen(positions[:, None], variant.reach)
        if intended.shape[-2:] != ours.shape or not bool((intended.cpu() == ours).all()):
            raise unsupported(
                lm.config,
                f"the mask of layer {layer} is neither causal nor a sliding window, nor a chunk",
            )


class StockPass:
    """The Transformers model with its own attention over the trial text, before its weights are packed."""

    def __init__(self, lm: CausalLM, trial: LayerTrial | None, variants: Sequence[Variant]) -> None:
        """`trial` tries the layers out one by one; None: whole passes are compared. `variants` are the layers'."""
        self._lm = lm
        counts = any(variant.bias is not None and variant.bias.counts_tokens for variant in variants)
        reaches = {variant.reach for variant in variants}
        self._far = far_positions(lm.context_length, _numbers(lm.config), reaches, counts)
        self.weights = WeightCheck(lm.config, lm.weight_format)
        self.layers: LayerCheck | None = None
        if trial is not None:
            tokens = lm.trial_tokens()
            self.layers = LayerCheck(lm.config, trial, lm.shapes, self.weights, tokens, self._far)
        self._head = lm.model.get_output_embeddings()

    def run(self) -> bool:
        """Raises `UnsupportedModelError` where our attention, or the decoder, computes something else.

        False for a model that cannot switch its attention, which is not compared.
        """
        lm = self._lm
        hooked = lm.backend.attn_implementation == ATTENTION_NAME
        positions = [list(range(NUM_TRIAL_ROWS)), *([self._far] if self._far else [])]
        ids = torch.tensor([lm.trial_tokens()] * len(positions), device=lm.device)
        places = torch.tensor(positions, device=lm.device)
        with (
            attention_implementation(lm.model, "eager") as switched,
            refusing(lm.model, "a pass with its own attention"),
        ):
            if hooked and not switched:
                log.warning("%s: its logits were not checked, it cannot switch its attention", lm.family)
                return False
            following = contextlib.nullcontext() if self.layers is None else self.layers.following()
            watched = self.weights.watching(self._watched(), self._format_of)
            apart = len(ids) if self.layers is None else 1  # a layer visits its states once
            batches = list(zip(ids.chunk(apart), places.chunk(apart), strict=True))
            with torch.inference_mode(), following, watched:
                made = [_stock_logits(lm.model, *batch) for batch in batches]
        logits = torch.cat(made).flatten(0, 1).float()
        if self.layers is not None:
            self.weights.take_head(self._head_name)
            self.weights.add_table(lm.model.get_input_embeddings(), self._head)
            with torch.inference_mode():
                self.layers.check_logits(logits)
        else:
            check_logits(lm, logits, self._far)
        return True

    def check_packed(self) -> None:
        """Raise `UnsupportedModelError` where the weights that were packed since are not those of the pass."""
        with torch.inference_mode():
            self._lm.executor.check_packed(self)

    @property
    def _head_name(self) -> str:
        return next((name for name, part in self._lm.model.named_modules() if part is self._head), "")

    def _watched(self) -> dict[str, nn.Module]:
        """The linear layers whose products are collected as the pass calls them: of the fused decoder the last one."""
        if self.layers is not None:
            return {self._head_name: self._head}
        if self._lm.device.type != "cpu":
            return {}
        return {
            name: part
            for name, part in self._lm.model.named_modules()
            if type(part) is nn.Linear or isinstance(part, GroupedLinear)
        }

    def _format_of(self, module: nn.Module) -> WeightFormat:
        fmt = self._lm.weight_format
        return fmt.of_head() if module is self._head else fmt

    def check_embedding(self, executor: Executor, is_packed: bool) -> None:
        """Compare the embeddings, as a pass reads them, with those of the Transformers model, each token by itself."""
        assert self.layers is not None
        lm, count, expected = self._lm, NUM_TRIAL_ROWS, self.layers.states[0]  # [tokens, hidden]
        pool, slots = lm.trial_cache(count)
        rows = ForwardBatch([RowGroup(slots, 0, lm.trial_tokens(), [])])
        wanted = [0] if self.layers.given[0] is None else [0, -1]
        hidden = executor.forward(rows, pool, wanted, []).hidden
        if -1 in hidden:
            self.layers.check_packed_inputs(hidden[-1])
        fitted = lm.weight_format.of_head().weight_error or 0.0
        rounded = 0.02 if lm.stored_bits else 0.0  # zeros of groups, see `WeightCheck`
        bound = TOLERANCE[torch.float32]
        if is_packed:
            bound = max(bound, rounded, 4 * fitted)
        size = expected[:count].norm(dim=-1).clamp_min(1e-6)
        error = float(((hidden[0] - expected[:count]).norm(dim=-1) / size).max())
        if not error <= bound:
            raise unsupported(
                lm.config,
                f"the packed embeddings are not the checkpoint's: they are off by {error:.2g} of their size",
            )


def _stock_logits(model: Any, ids: Tensor, places: Tensor) -> Tensor:
    # Without a mask, positions that do not follow each other are those of several texts.
    seen = torch.ones_like(ids)
    logits: Tensor = model(input_ids=ids, attention_mask=seen, position_ids=places, use_cache=False).logits
    return logits


def check_logits(lm: CausalLM, expected: Tensor, far: Sequence[int] = ()) -> None:
    """Compare the rows of `packed_logits` with `expected` [tokens, vocab], as Transformers computes them."""
    with refusing(lm.model, "packed rows of several sequences"):
        ours, places = packed_logits(lm, far=far)
    errors = _errors(ours, expected[places])
    # In half precision a near-tie in a router may send a row to another expert. That is no fault of the attention. Far
    # rows are few, and are a fault of their own.
    parts = [errors] if lm.dtype == torch.float32 else torch.split(errors, _num_near_rows(errors, far))
    error = (
        errors.max() if lm.dtype == torch.float32 else torch.stack([part.median() for part in parts]).max()
    )
    tolerance = TOLERANCE.get(lm.dtype, TOLERANCE[torch.bfloat16])
    if not error <= tolerance:  # NaN is refused too
        decodes = lm.executor.decodes
        fault = (
            "the fused decoder computes something else"
            if decodes
            else "its attention would be computed wrongly"
        )
        raise unsupported(
            lm.config,
            f"{fault}: over a dozen rows the logits differ from Transformers' by {float(error):.2g} of their spread"
            f"{'' if decodes else _first_wrong(lm)}",
        )


def _first_wrong(lm: CausalLM) -> str:
    """Which layer is the first that differs over the trial text as a chain, and what it would need, for a message."""
    ids, num_layers = lm.trial_tokens(), text_config(lm.config).num_hidden_layers
    found = None
    with contextlib.suppress(Exception), torch.inference_mode():  # many families record no layers
        with attention_implementation(lm.model, "eager"):
            row = torch.tensor([ids], device=lm.device)
            stock = lm.model(
                input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, output_hidden_states=True
            ).hidden_states
        pool, slots = lm.trial_cache(len(ids))
        rows = RowGroup(slots, 0, ids, [], owner=0)
        ours = lm.forward([rows], pool, range(1, num_layers + 1)).hidden
        tolerance = TOLERANCE.get(lm.dtype, TOLERANCE[torch.bfloat16])
        wrong = (
            layer for layer in ours if not float(_errors(ours[layer], stock[layer][0]).max()) <= tolerance
        )
        found = next(wrong, 0)
    if found is None:
        return ""
    if len(lm.shapes) > num_layers:
        place = f"; layer {found - 1} is the first" if found else "; in one of its layers"
        return (
            f"{place}, where scores of an indexer may tie: Transformers leaves open which of equal ones it takes, and "
            "would have to take the earlier token's"
        )
    if not found:
        return (
            ", though not in one pass over a chain of tokens; a layer seems to keep more of a text than keys and "
            "values of each token, which would need a recurrence that is known"
        )
    return (
        f"; layer {found - 1} is the first, and would have to take positions as they are given and to leave all that "
        "depends on other tokens to Transformers' attention interface"
    )


def _num_near_rows(errors: Tensor, far: Sequence[int]) -> int:
    return len(errors) - len(far)


def check_cache(lm: CausalLM) -> None:
    """Compare the logits over the model's own cache (`cache_dtype`) with those over one in the type of its arithmetic.

    Raises `UnsupportedModelError` that names a type which holds this model's keys and values.
    """
    if lm.cache_dtype == lm.dtype:
        return
    with refusing(lm.model, "packed rows of several sequences"):
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


def packed_logits(
    lm: CausalLM, cache_dtype: torch.dtype | None = None, far: Sequence[int] = ()
) -> tuple[Tensor, list[int]]:
    """The trial text's logits by passes as an engine makes them, [rows, vocab], and which token each row is.

    `cache_dtype` is how keys and values are held; None: as the model's caches do. See `trial_passes` for `far`.
    """
    ids = lm.trial_tokens()
    pool, slots = lm.trial_cache(num_trial_slots(lm.kv_unit), cache_dtype)
    wrong = (ids[0] + 1) % lm.vocab_size
    passes = trial_passes([*ids, *ids], wrong, slots, far, lm.kv_unit)
    logits = [lm.forward(each.groups, pool).logits for each in passes]
    return torch.cat(logits).float(), [place for each in passes for place in each.places]


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
    numbers = _numbers(config)
    edges = {edge + shift for number in numbers for edge in (number, 2 * number) for shift in (-1, 0, 1)}
    return torch.tensor(sorted(edge for edge in edges | {0} if 0 <= edge < context_length(config)))


def _numbers(config: Any) -> set[int]:
    """Every whole number of the language model's configuration, those in its lists and its parts among them."""

    def found(value: Any) -> Iterator[int]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        yield from (number for part in parts for number in found(part))
        if type(value) is int or (isinstance(value, float) and value.is_integer()):
            yield int(value)

    return set(found(text_config(config).to_dict()))


def _cache_error(lm: CausalLM, cache_dtype: torch.dtype, expected: Tensor) -> float:
    """How far a quarter of the rows are off at least over a cache of this type; NaN where any is no number.

    Not the worst row: after a rounding a near-tie in a router may send one to another expert.
    """
    ours, _ = packed_logits(lm, cache_dtype)
    return float(_errors(ours, expected).quantile(0.75))


def _is_held(lm: CausalLM, cache_dtype: torch.dtype, error: float) -> bool:
    """Whether an error is one of rounding. Kernels that round rows make small ones larger."""
    return error <= max(CACHE_TOLERANCE.get(cache_dtype, 0.0), _ROUNDED_ROWS if lm.rounds_rows else 0.0)


def _errors(ours: Tensor, expected: Tensor) -> Tensor:
    """[rows]: the error of each row of logits [rows, vocab], relative to its spread."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors: Tensor = (ours - expected).norm(dim=-1) / spread.clamp_min(1e-6)
    return errors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run_probe(
    model: Any, backend: AttentionBackend, probe: LayerProbe, passes: str = "a pass without a cache"
) -> Tensor:
    """Logits of the second of two rows."""
    with refusing(model, passes), leading_to(probe), torch.inference_mode():
        output = model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
            position_ids=torch.arange(2, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.ones(1, dtype=torch.long, device=model.device),
            **backend.probe_arguments(probe),
        )
    logits: Tensor = output.logits
    return logits


def _probe_encoder(model: Any) -> tuple[LayerShape, ...]:
    """What a decoder's layers keep of an encoder's output; none for a model without an encoder."""
    if not isinstance(model, EncoderDecoder):
        return ()
    with refusing(model, "a pass of its encoder"), torch.inference_mode():
        return model.encoded_shapes()


def _visibility(*, mask_function: Any, config: Any, **_: Any) -> Tensor:
    """Our mask maker for the probe: which of the boundary positions see each other, bool [1, 1, P, P]."""
    positions = boundary_positions(config)
    zero = torch.zeros((), dtype=torch.long)
    visible: Tensor = mask_function(zero, zero, positions[:, None], positions[None, :])
    return visible.expand(len(positions), len(positions))[None, None]


AttentionInterface.register(PROBE_NAME, slipstream_attention)
AttentionMaskInterface.register(PROBE_NAME, _visibility)

"""Plans deployments of one model with one drafter, at any batch and context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig, check_at_least
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError
from slipstream.kv.state import SPARE_ROWS, StateRoom
from slipstream.models.linear.sixteen_bits import WIDENED_BYTES
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import ModelOutline, outline_model
from slipstream.models.resolve import plannable_device
from slipstream.plan.deployment import DeploymentPlan, LoadingStage, PartKind, PlannedPart
from slipstream.plan.passes import PassLimits, PassSizes, activation_bytes, recorded_bytes
from slipstream.plan.process import ProcessMemory
from slipstream.reasoning.config import ReasoningConfig
from slipstream.verify.registry import VERIFIERS

HEAP_SHARE = 0.015
"""Share of all that is held that the C library keeps in freed pieces: the middle of what was measured."""
TEXT_TOKEN_BYTES = 250
"""What the engine keeps of a token of a running text on the host: its id in a few lists, and the index of prefixes."""


class Planner:
    """Reads the configurations once; `at` is then a sum."""

    def __init__(
        self,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        process: ProcessMemory,
        tokenizer: Any = None,
    ) -> None:
        """`tokenizer` is the target's, where it is loaded: a draft's is compared with it.

        Raises `ConfigError`, `ModelError` or `UnsupportedModelError` where the engine would not start either."""
        self.config = config
        self.speculative = speculative or SpeculativeConfig()
        self.process = process
        verifier = VERIFIERS.load(self.speculative.verifier).traits()
        self._drafter, self._options = validate(self.speculative, verifier)
        self.target = outline_model(config.model, LoadOptions.of(config))
        elsewhere = self.speculative.draft_device
        self.context = DraftContext(
            engine_config=config,
            tokenizer=tokenizer,
            vocab_size=self.target.vocab_size,
            max_model_len=config.max_model_len or self.target.context_length,
            device=self.target.device if elsewhere is None else plannable_device(elsewhere),
            dtype=self.target.dtype,
            verifier=verifier,
            target_outline=self.target,
        )
        """What drafters are given of the target."""
        self.draft = self._drafter.footprint(self._options, self.context)
        if self.speculative.reasoning is not None:
            self.draft = self._with_step_drafter(self.speculative.reasoning)

    def _with_step_drafter(self, reasoning: Mapping[str, Any]) -> Footprint:
        """The drafter with the one that writes whole steps, whose model is loaded once where it is the same."""
        cls, options = validate(ReasoningConfig.from_mapping(reasoning).step_drafter(self.speculative))
        step_drafter = cls.footprint(options, self.context)
        loaded = {_loaded_as(model) for model in self.draft.models}
        own = tuple(model for model in step_drafter.models if _loaded_as(model) not in loaded)
        drafts = self.draft.traits
        per_token = drafts.kv_bytes_per_token + step_drafter.traits.kv_bytes_per_token
        joined = Footprint.joined([self.draft, replace(step_drafter, models=own)], drafts)
        return joined.with_traits(kv_bytes_per_token=per_token)

    @property
    def draft_model(self) -> ModelOutline | None:
        """The model that the drafter would load and draft with; None for lookups, heads and groups."""
        return self.draft.models[0] if self._drafter.traits.has_own_model else None

    @property
    def max_context(self) -> int:
        """The longest text that the model can read."""
        return self.target.context_length

    @cached_property
    def feature_bytes_per_token(self) -> int:
        """Hidden states of the target that are kept for the drafter."""
        return self.draft.feature_bytes_per_token(self.target)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes a token of target and drafter together, features included."""
        draft = self.draft.traits.kv_bytes_per_token + self.feature_bytes_per_token
        return self.target.kv_bytes_per_token + draft

    @property
    def encoded_bytes(self) -> int:
        """What is kept of encoders' outputs for a request."""
        return sum(model.encoded_bytes for model in (self.target, *self.draft.models))

    def at(self, batch: int, context: int) -> DeploymentPlan:
        """The plan for `batch` requests at once of `context` tokens each, prompt and answer together.

        Raises `ConfigError` for a batch or context that is not positive, or beyond the model's context.
        """
        check_at_least("plan", 1, batch=batch, context=context)
        if context > self.max_context:
            raise ConfigError(
                f"a context of {context} is beyond the model's {self.max_context}; plan for {self.max_context} or less"
            )
        num_slots = batch * (context + self.draft.traits.max_nodes + self.target.kv_unit)
        return DeploymentPlan(
            batch=batch,
            context=context,
            num_slots=num_slots,
            kv_bytes_per_token=self.kv_bytes_per_token,
            encoded_bytes=batch * self.encoded_bytes,
            parts=tuple(self._with_heap(list(self._parts(batch, context, num_slots)))),
            stages=tuple(self._stages()),
            notes=(self.draft.note,) if self.draft.note else (),
        )

    # --- while requests run -----------------------------------------------------------------------------------

    def _parts(self, batch: int, context: int, num_slots: int) -> Iterator[PlannedPart]:
        yield from self._weights()
        yield from self._cache(num_slots)
        yield from self._states(batch)
        yield from self._encoded(batch)
        yield from self._passes(batch, context)
        yield PlannedPart(
            "texts",
            PartKind.PROCESS,
            TEXT_TOKEN_BYTES * batch * context,
            "token ids of the running requests and the index of prefixes",
        )
        yield PlannedPart(
            "process",
            PartKind.PROCESS,
            self.process.running_bytes,
            "Python, PyTorch, libraries, kernels, threads",
        )

    def _with_heap(self, parts: list[PlannedPart]) -> Iterator[PlannedPart]:
        """The parts, and what lies between them."""
        yield from parts
        held = sum(part.num_bytes for part in parts)
        yield PlannedPart(
            "heap", PartKind.PROCESS, round(HEAP_SHARE * held), "freed pieces that are kept for reuse"
        )

    def _weights(self) -> Iterator[PlannedPart]:
        held, kind = self.target.held, self.target.weight_type
        count = f"{self.target.num_parameters / 1e6:,.1f} M parameters"
        yield PlannedPart(f"weights, {kind}", PartKind.TARGET, held.linear_bytes, count)
        yield PlannedPart("scales", PartKind.TARGET, held.scale_bytes, f"of {kind}")
        plain, table = (
            str(kind).removeprefix("torch.") for kind in (self.target.dtype, self.target.matrix_dtype)
        )
        yield PlannedPart("embedding", PartKind.TARGET, held.embedding_bytes, f"a table in {table}")
        yield PlannedPart(
            "other weights", PartKind.TARGET, held.other_bytes, f"in {plain}: what is not packed"
        )
        yield PlannedPart(
            "adapter", PartKind.TARGET, held.adapter_bytes, "in float32, kept apart from quantised weights"
        )
        for model in self.draft.models:
            count = f"{model.num_parameters / 1e6:,.1f} M parameters"
            yield PlannedPart(
                f"draft weights, {model.weight_type}", PartKind.DRAFTER, model.held.total_bytes, count
            )
        yield PlannedPart("heads", PartKind.DRAFTER, self.draft.head_bytes, "of the drafter")

    def _cache(self, num_slots: int) -> Iterator[PlannedPart]:
        for name, per_token in (
            ("keys and values", self.target.kv_bytes_per_token),
            ("draft keys and values", self.draft.traits.kv_bytes_per_token),
            ("features", self.feature_bytes_per_token),
        ):
            detail = f"{num_slots:,} tokens of {per_token:,} bytes"
            yield PlannedPart(name, PartKind.CACHE, num_slots * per_token, detail)

    def _states(self, batch: int) -> Iterator[PlannedPart]:
        copies = batch if self.config.enable_prefix_caching else 0
        num_logged = self.draft.traits.max_nodes + SPARE_ROWS
        for name, models, most in (
            ("states", [self.target], 2 * copies),
            ("draft states", self.draft.models, copies),
        ):
            room = StateRoom(batch, most, num_logged)
            held = sum(room.num_bytes(model.states) for model in models)
            detail = f"of recurrent layers: {batch:,} requests and {most:,} copies for prefixes"
            yield PlannedPart(name, PartKind.CACHE, held, detail)

    def _encoded(self, batch: int) -> Iterator[PlannedPart]:
        if self.encoded_bytes:
            detail = f"{batch} inputs of up to {self.target.encoder_length:,} positions"
            yield PlannedPart("encoders' output", PartKind.CACHE, batch * self.encoded_bytes, detail)

    def _passes(self, batch: int, context: int) -> Iterator[PlannedPart]:
        limits = PassLimits.of(self.config, batch, context, self.draft.traits.max_nodes).over(self.target)
        sizes = PassSizes.of(self.target)
        features = 2 * self.feature_bytes_per_token
        yield PlannedPart(
            "activations",
            PartKind.PASS,
            activation_bytes(sizes, limits) + limits.num_rows * features,
            f"passes of {limits.num_rows:,} rows",
        )
        yield PlannedPart(
            "logits",
            PartKind.PASS,
            sizes.logit_bytes(limits.num_logit_rows, batch),
            f"{limits.num_logit_rows:,} checked rows of {sizes.vocab:,} tokens",
        )
        own = sum(activation_bytes(PassSizes.of(model), limits) for model in self.draft.models)
        own += limits.num_rows * self.draft.head_bytes_per_row
        rows = batch * self.draft.logit_rows
        own += sizes.draft_logit_bytes(self.draft.logit_rows, batch)
        yield PlannedPart("draft activations", PartKind.PASS, own, f"passes and {rows:,} rows of logits")
        detail = f"an estimate: graphs of up to {limits.num_rows:,} rows and what these compute with"
        recorded = recorded_bytes(self.target, limits, self.feature_bytes_per_token)
        yield PlannedPart("recorded passes", PartKind.PASS, recorded, detail)
        recorded = sum(
            recorded_bytes(model, limits) for model in self.draft.models if model.device == self.target.device
        )
        yield PlannedPart("recorded draft passes", PartKind.PASS, recorded, detail)
        tables = self.draft.traits.table_bytes(batch, batch * context)
        yield PlannedPart("drafter's tables", PartKind.DRAFTER, tables, "at their bounds")

    # --- while it starts --------------------------------------------------------------------------------------

    def _stages(self) -> Iterator[LoadingStage]:
        """Models are loaded one after another, each while the earlier ones are held."""
        held = self.process.loading_bytes
        for number, model in enumerate((self.target, *self.draft.models)):
            what = "target" if number == 0 else "draft"
            yield LoadingStage(f"{what} read", held + read_bytes(model))
            yield LoadingStage(f"{what} packed", held + packing_bytes(model))
            held += model.held.total_bytes
        if self.draft.head_bytes:
            yield LoadingStage("heads read", held + 2 * self.draft.head_stored_bytes + self.draft.head_bytes)


def _loaded_as(model: ModelOutline) -> tuple[object, ...]:
    """What two outlines of one loaded model have in common."""
    return model.path, model.dtype, model.weight_type, model.device


def read_bytes(model: ModelOutline) -> int:
    """Return the bytes that are held when all weights have been read.

    Those that are read as they are stored stay in their file, but for one that a pass reads; else they are copies
    in addition to the mapped file.
    """
    if model.maps_weights:
        return model.widest_bytes + WIDENED_BYTES
    same = model.stored_bytes_per_weight == model.matrix_dtype.itemsize
    return model.unpacked_bytes + (0 if same else model.stored_bytes)


def packing_bytes(model: ModelOutline) -> int:
    """The most while layers are packed, one after another."""
    held = model.held.total_bytes
    return (held if model.maps_weights else max(model.unpacked_bytes, held)) + model.packing_extra_bytes()

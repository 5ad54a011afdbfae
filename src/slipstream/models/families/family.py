"""What a family of models is: the names by which a Transformers class has what our kernels compute with.

The kernels compute layers of rotary grouped-query attention and an MLP, then a final norm and the output layer. Norms
lie before the two, behind them, or both; they are root mean square norms or layer norms. The MLP has a gate or none.
Scales and caps are numbers of the model or its configuration. Layers may differ in the widths of their heads and MLPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from torch import nn

from slipstream.models.attention.base import Variant
from slipstream.models.families.activations import ACTIVATIONS, CLAMPED_SILU, number_of
from slipstream.models.families.experts import BesideNames, Clamp, ExpertParts
from slipstream.models.families.frequencies import Rotation, rotations
from slipstream.models.families.inputs import InputNames, InputParts
from slipstream.models.families.parts import BesideParts, LayerInputs, LayerParts, NormParts
from slipstream.models.linear.grouped import GroupedLinear


class Family:
    """The names, dotted, by which a Transformers class has what the kernels compute with; Llama's unless overridden.

    Numbers of heads are read from the configuration (`num_attention_heads`, `num_key_value_heads`), and so is
    `hidden_size`.
    """

    package: ClassVar[str] = "transformers.models."
    """The models' classes come from this package; code of another may compute something else under the same type."""

    # Of the model.
    embedding: ClassVar[str] = "model.embed_tokens"
    layers: ClassVar[str] = "model.layers"
    rotary: ClassVar[str] = "model.rotary_emb"
    final_norm: ClassVar[str] = "model.norm"
    head: ClassVar[str] = "lm_head"

    # Numbers of the model; None: there is none.
    embedding_scale: ClassVar[str | None] = None
    """What the embedding itself multiplies its rows with."""
    input_scale: ClassVar[str | None] = None
    """What the model multiplies them with besides."""
    residual_scale: ClassVar[str | None] = None
    """Scale of what attention and MLP add to the states."""
    parallel: ClassVar[str | None] = None
    """Whether the MLP reads the states that attention read."""
    logit_divisor: ClassVar[str | None] = None
    logit_cap: ClassVar[str | None] = None
    inputs: ClassVar[InputNames | None] = None
    """What its layers are given of a token besides the states; None: nothing."""

    # Of its configuration.
    activation: ClassVar[str] = "hidden_act"

    activation_module: ClassVar[str | None] = "mlp.act_fn"
    """Module that a layer calls. Where a layer has it, it must be what the configuration says; None: unknown."""

    # Of a norm.
    norm_epsilon: ClassVar[str] = "variance_epsilon"
    norm_offset: ClassVar[float] = 0.0
    """What a norm adds to its weight."""

    # Of a layer.
    attention_norm: ClassVar[str | None] = "input_layernorm"
    query: ClassVar[str] = "self_attn.q_proj"
    key: ClassVar[str] = "self_attn.k_proj"
    value: ClassVar[str] = "self_attn.v_proj"
    qkv: ClassVar[str | None] = None
    """One linear layer in place of the three."""
    has_interleaved_heads: ClassVar[bool] = False
    """Whether it has query, key and value head by head, and not one behind the other."""
    query_norm: ClassVar[str | None] = None
    """Norm of each head, or of all at once: its width says which."""
    key_norm: ClassVar[str | None] = None
    value_norm: ClassVar[str | None] = None
    """Norm of each head's values, without a weight."""
    head_dim: ClassVar[str | None] = None
    """Width of a layer's heads; None: as its linear layers have it, the same in all layers."""
    key_groups: ClassVar[str | None] = None
    """How many of a layer's heads share a key head; None: as the configuration says, the same in all layers."""
    reads_another: ClassVar[str | None] = None
    """Whether a layer has no keys and values, and reads the entries of an earlier one; None: none does. One that has
    keys and whose `value` is None has the same numbers for both."""
    sinks: ClassVar[str | None] = None
    """A score for each head that takes part in attention and carries no value."""
    output: ClassVar[str] = "self_attn.o_proj"
    attended_norm: ClassVar[str | None] = None
    """Norm of what attention adds to the states."""
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    gate: ClassVar[str | None] = "mlp.gate_proj"
    """None: there is no gate."""
    up: ClassVar[str] = "mlp.up_proj"
    gate_up: ClassVar[str | None] = None
    """One linear layer in place of the two."""
    down: ClassVar[str] = "mlp.down_proj"
    experts: ClassVar[str | None] = None
    """What holds the weights of experts, stacked; None: there are none. They are in the place of gate, up and down,
    which are not looked for unless `beside` says so."""
    beside: ClassVar[BesideNames | None] = None
    """What a layer has besides where experts stand beside its MLP."""
    router: ClassVar[str] = "mlp.gate"
    """What chooses among them: the largest of its outputs, whose softmax are the shares."""
    num_chosen: ClassVar[str] = "mlp.gate.top_k"
    """How many experts a row is sent to."""
    has_whole_shares: ClassVar[str | None] = None
    """Whether shares add up to 1, or are of a softmax over all experts; None: they add up to 1."""
    gate_limit: ClassVar[str | None] = None
    """Limit at which experts cut off gate and up before they are made one, as GPT-OSS does; None: they do not."""
    gate_slope: ClassVar[str | None] = None
    """What such a gate is multiplied with inside the sigmoid."""
    mlp_out_norm: ClassVar[str | None] = None
    """Norm of what the MLP adds to the states."""
    layer_scale: ClassVar[str | None] = None
    """What the states behind a layer are multiplied with."""
    rotates: ClassVar[str | None] = None
    """Whether positions count in this layer; None: in all."""
    rotary_kind: ClassVar[str | None] = None
    """Which of several rotary embeddings it has; None: there is one."""

    @classmethod
    def of(cls, config: Any) -> Family:
        """The family of a model with this configuration: of those that have one `model_type`."""
        return cls()

    @classmethod
    def is_of_cpu_kernels(cls) -> bool:
        """Whether it names parts that only the CPU kernels compute."""
        own = (cls.inputs, cls.value_norm, cls.head_dim, cls.key_groups)
        return any(name is not None for name in (*own, cls.reads_another, cls.beside, cls.layer_scale))

    def part(self, module: Any, name: str) -> Any:
        """What `module` has under a dotted name of this description."""
        return attrgetter(name)(module)

    def number(self, model: Any, name: str | None, otherwise: float) -> float:
        """A number of the model by its dotted name; `otherwise` where there is none."""
        found = None if name is None else self.part(model, name)
        return otherwise if found is None else float(found)

    def layer_parts(self, layer: nn.Module) -> LayerParts:
        """The weights of one layer; raises `AttributeError` for a name that it does not have."""

        def norm(name: str | None) -> NormParts | None:
            return None if name is None else NormParts.of(self.part(layer, name), self.norm_offset)

        def found(name: str | None) -> Any:
            return None if name is None else self.part(layer, name)

        def linears(*names: str | None) -> tuple[nn.Linear, ...]:
            return tuple(self.part(layer, name) for name in names if name is not None)

        has_mlp = self.experts is None or self.beside is not None
        reads_another = bool(found(self.reads_another))
        has_values = not reads_another and (self.qkv is not None or self.part(layer, self.value) is not None)
        own = (self.query, *(() if reads_another else (self.key,)), *((self.value,) if has_values else ()))
        gate_up = (self.gate, self.up) if self.gate_up is None else (self.gate_up,)
        attention = self.part(layer, self.output.rpartition(".")[0]) if self.has_interleaved_heads else None
        return LayerParts(
            attention_norm=norm(self.attention_norm),
            mlp_norm=norm(self.mlp_norm),
            attended_norm=norm(self.attended_norm),
            mlp_out_norm=norm(self.mlp_out_norm),
            query_norm=norm(self.query_norm),
            key_norm=None if reads_another else norm(self.key_norm),
            qkv=linears(*(own if self.qkv is None else (self.qkv,))),
            output=linears(self.output)[0],
            gate_up=linears(*gate_up) if has_mlp else (),
            down=linears(self.down)[0] if has_mlp else None,
            is_gated=not has_mlp or self.gate_up is not None or self.gate is not None,
            interleaved_heads=0 if attention is None else attention.config.num_attention_heads,
            experts=self._expert_parts(layer),
            beside=self._beside_parts(layer),
            sinks=found(self.sinks),
            projected=0 if reads_another else 1 + has_values,
            has_value_norm=not reads_another and self._has_value_norm(layer),
            head_dim=found(self.head_dim),
            key_groups=found(self.key_groups),
            inputs=self._layer_inputs(layer),
            scale=found(self.layer_scale),
        )

    def _has_value_norm(self, layer: nn.Module) -> bool:
        if self.value_norm is None:
            return False
        norm = self.part(layer, self.value_norm)
        if getattr(norm, "weight", None) is not None:
            raise AttributeError(f"{type(norm).__name__} of values has a weight")
        return True

    def _layer_inputs(self, layer: nn.Module) -> LayerInputs | None:
        if self.inputs is None:
            return None
        gate, last, norm = (
            self.part(layer, name) for name in (self.inputs.gate, self.inputs.last, self.inputs.norm)
        )
        return LayerInputs(gate, last, NormParts.of(norm, self.norm_offset))

    def input_parts(self, model: Any) -> InputParts | None:
        """What makes the inputs of all layers; None where there are none."""
        if self.inputs is None:
            return None
        num_layers = len(self.part(model, self.layers))
        return InputParts.of(self.inputs, partial(self.part, model), self.norm_offset, num_layers)

    def heads(self, model: Any, parts: LayerParts) -> tuple[int, int]:
        """How many key heads a layer has, and how wide each of its heads is."""
        num_heads = model.config.num_attention_heads
        if parts.key_groups is None:
            num_kv_heads = getattr(model.config, "num_key_value_heads", None) or num_heads
        else:
            num_kv_heads = num_heads // parts.key_groups
        outputs = sum(linear.out_features for linear in parts.qkv)
        return num_kv_heads, parts.head_dim or outputs // (num_heads + parts.projected * num_kv_heads)

    def _beside_parts(self, layer: nn.Module) -> BesideParts | None:
        names = self.beside
        if names is None:
            return None

        def norm(name: str) -> NormParts:
            return NormParts.of(self.part(layer, name), self.norm_offset)

        scale, factor = (self.part(layer, name) for name in (names.router_scale, names.router_factor))
        return BesideParts(
            router_norm=NormParts(scale, factor=float(factor)),
            input_norm=norm(names.input_norm),
            mlp_out_norm=norm(names.mlp_out_norm),
            output_norm=norm(names.output_norm),
            scales=self.part(layer, names.scales),
        )

    def _expert_parts(self, layer: nn.Module) -> ExpertParts | None:
        if self.experts is None:
            return None
        return ExpertParts.of(
            self.part(layer, self.router),
            self.part(layer, self.experts),
            int(self.part(layer, self.num_chosen)),
            bool(self.number(layer, self.has_whole_shares, 1.0)),
            None
            if self.gate_limit is None
            else Clamp(self.number(layer, self.gate_limit, 0.0), self.number(layer, self.gate_slope, 1.0)),
        )

    def activation_number(self, model: Any) -> int:
        """The kernels' `Activation` of a model that is no misfit."""
        return (
            CLAMPED_SILU
            if self.gate_limit is not None
            else ACTIVATIONS[getattr(model.config, self.activation)]
        )

    def rotations(self, model: Any) -> list[Rotation | None]:
        """How each layer rotates queries and keys: the same object for the same way, None for not at all."""
        layers = self.part(model, self.layers)
        kinds = [None if self.rotary_kind is None else self.part(layer, self.rotary_kind) for layer in layers]
        known = rotations(self.part(model, self.rotary), kinds)
        rotates = [self.rotates is None or bool(self.part(layer, self.rotates)) for layer in layers]
        return [known[kind] if does else None for kind, does in zip(kinds, rotates, strict=True)]

    def misfits(self, model: Any, variants: Sequence[Variant]) -> Iterator[str]:
        """Why the kernels do not compute `model`, whose layers attend as `variants` say; nothing where they do."""
        if not type(model).__module__.startswith(self.package):
            yield f"its code is not that of {self.package.rstrip('.')}"
            return
        activation = getattr(model.config, self.activation, None)
        if activation not in ACTIVATIONS:
            yield f"its activation is {activation}"
        try:
            rotated = [way for way in self.rotations(model) if way is not None]
            parts = [self.layer_parts(layer) for layer in self.part(model, self.layers)]
            head = self.part(model, self.head)
            self.part(model, self.embedding)
            NormParts.of(self.part(model, self.final_norm), self.norm_offset)
            self.input_parts(model)
            for name in (self.embedding_scale, self.input_scale, self.residual_scale, self.parallel):
                self.number(model, name, 1.0)
            for name in (self.logit_divisor, self.logit_cap):
                self.number(model, name, 1.0)
        except AttributeError as error:
            yield f"it lacks a part of its family: {error}"
            return
        for way in rotated:
            if not way.is_static:
                yield f"its rotary embedding is {way.rope_type}"
                return
        linears = [head, *(linear for layer in parts for linear in layer.linears)]
        if not all(type(linear) is nn.Linear or isinstance(linear, GroupedLinear) for linear in linears):
            yield "its linear layers are not plain ones"  # a subclass may compute something else
            return
        for layer, known in zip(self.part(model, self.layers), parts, strict=True):
            ids = {id(parameter) for parameter in known.parameters}
            unknown = [name for name, parameter in layer.named_parameters() if id(parameter) not in ids]
            if unknown:
                yield f"its layers have {unknown[0]}, which its family does not name"
                return
        if len({layer.experts and layer.experts.shape for layer in parts}) > 1:
            yield "its layers' experts differ in width"
        if self.experts is not None and self.number(model, self.parallel, 0.0):
            yield "its experts read the states that attention reads"
        yield from self._wrong_activations(model)
        yield from self._wrong_heads(model, parts)
        yield from self._wrong_widths(model, parts)
        yield from self._wrong_attention(parts, variants)

    def _wrong_attention(self, parts: Sequence[LayerParts], variants: Sequence[Variant]) -> Iterator[str]:
        """Return what of the layers' attention the kernels do not compute."""
        of_heads = [
            norm for layer in parts for norm in (layer.query_norm, layer.key_norm) if norm is not None
        ]
        if any(norm.is_centred or norm.bias is not None for norm in of_heads):
            yield "its queries and keys have layer norms"
        if any(variant.sinks is not None for variant in variants) != (self.sinks is not None):
            yield "its attention has sinks" if self.sinks is None else "its attention has no sinks"
        if len({(variant.scaling, variant.softcap) for variant in variants}) > 1:
            yield "its layers scale their attention differently"

    def _wrong_activations(self, model: Any) -> Iterator[str]:
        """Layers that call another activation than the configuration's."""
        configured, name = getattr(model.config, self.activation, None), self.activation_module
        if name is None:
            return
        for layer in self.part(model, self.layers):
            try:
                called = self.part(layer, name)
            except AttributeError:
                continue
            if number_of(called) != ACTIVATIONS.get(str(configured)):
                yield f"its activation is {type(called).__name__}, and its configuration says {configured}"
                return

    def _wrong_heads(self, model: Any, parts: Sequence[LayerParts]) -> Iterator[str]:
        """Heads that are wider or narrower than what the kernels have them read."""
        num_heads, rotated = model.config.num_attention_heads, self.rotations(model)
        sizes = [self.heads(model, layer) for layer in parts]
        for layer, (num_kv_heads, head_dim), way in zip(parts, sizes, rotated, strict=True):
            outputs = sum(linear.out_features for linear in layer.qkv)
            if (
                outputs != (num_heads + layer.projected * num_kv_heads) * head_dim
                or num_heads % num_kv_heads
                or (way is not None and way.width > head_dim)
            ):
                yield "its heads have other widths than its configuration says"
                return
        if not _norms_fit_heads(parts, num_heads, sizes):
            yield "its norms of queries and keys are neither all of each head nor all of all heads at once"
        attended = [num_heads * head_dim for _, head_dim in sizes]
        if any(layer.output.in_features != width for layer, width in zip(parts, attended, strict=True)):
            yield "its attention's output has another width than its heads"
        if any(layer.sinks is not None and layer.sinks.numel() != num_heads for layer in parts):
            yield "its attention's sinks are not one a head"

    def _wrong_widths(self, model: Any, parts: Sequence[LayerParts]) -> Iterator[str]:
        """Weights that are wider or narrower than what the kernels have them read or multiply."""
        hidden, embedding = model.config.hidden_size, self.part(model, self.embedding)
        final_norm = NormParts.of(self.part(model, self.final_norm), self.norm_offset)
        norms = [final_norm, *(norm for layer in parts for norm in layer.norms_of_states)]
        if any(
            tensor.numel() != hidden
            for norm in norms
            for tensor in (norm.weight, norm.bias)
            if tensor is not None
        ):
            yield "its norms have other widths than its states"
        table, given = getattr(embedding, "linear", None), self.input_parts(model)
        of_inputs = [layer.inputs for layer in parts if layer.inputs is not None]
        inputs = [
            self.part(model, self.head).in_features,
            embedding.weight.shape[1] if table is None else table.in_features,
            *(linear.in_features for layer in parts for linear in (*layer.qkv, *layer.gate_up)),
            *(layer.output.out_features for layer in parts),
            *(layer.down.out_features for layer in parts if layer.down is not None),
            *(width for own in of_inputs for width in (own.gate.in_features, own.last.out_features)),
        ]
        if any(width != hidden for width in inputs):
            yield "its linear layers or its embedding have other widths than its states"
        if given is not None:
            yield from given.misfits(hidden, len(parts))
            if any({own.gate.out_features, own.last.in_features} != {given.width} for own in of_inputs):
                yield "its layers read inputs of other widths than they are given"
        if any(
            sum(linear.out_features for linear in layer.gate_up) != (1 + layer.is_gated) * layer.intermediate
            for layer in parts
            if layer.gate_up
        ):
            yield "its MLP's linear layers do not fit together"
        of_experts = [layer.experts.misfits(hidden) for layer in parts if layer.experts is not None]
        yield from (reason for reason in of_experts if reason is not None)
        if any(
            layer.beside.scales.numel() != layer.experts.num_experts
            for layer in parts
            if layer.beside is not None and layer.experts is not None
        ):
            yield "its experts' scales are not one an expert"


def _norms_fit_heads(parts: Sequence[LayerParts], num_heads: int, sizes: Sequence[tuple[int, int]]) -> bool:
    """True where all layers norm queries and keys head by head, or all of them over all heads at once.

    `sizes` are the numbers of key heads and the widths of heads. A layer that reads another's entries has no keys.
    """
    kinds = set()
    for layer, (num_kv_heads, head_dim) in zip(parts, sizes, strict=True):
        norms = (layer.query_norm, *((layer.key_norm,) if layer.projected else ()))
        widths = tuple(None if norm is None else norm.weight.numel() for norm in norms)
        whole = (num_heads * head_dim, num_kv_heads * head_dim)[: len(widths)]
        kinds.add("each" if set(widths) <= {None, head_dim} else "whole" if widths == whole else "other")
    return len(kinds) <= 1 and "other" not in kinds

"""Families of models whose whole passes the CPU kernels compute: where a Transformers class keeps its weights.

The kernels' decoder (`kernels/decoder.h`) computes pre-norm layers: RMS norm, rotary grouped-query attention, RMS norm,
and a gated SiLU MLP, with residuals around both, then a final RMS norm and the output layer. Queries and keys may have
RMS norms of their own per head, and the attention's linear layers biases. A family is a subclass of `Family` that says
by what names its layers have these parts. A package adds one with one line of its own `pyproject.toml`, under the
`model_type` of the configuration:

    [project.entry-points."slipstream.families"]
    my_model_type = "my_package.module:MyFamily"

or a script calls `FAMILIES.register`. Whatever a description says, the model is compared with Transformers' own logits
when it is loaded, and refused where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from slipstream.registry import Registry

if TYPE_CHECKING:
    from slipstream.models.attention.base import Variant

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not change with the length of the text."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's weights, as the kernels read them."""

    attention_norm: Tensor | None
    """None where the attention reads its rows as they are."""
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    output: nn.Linear
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.qkv, self.output, *self.gate_up, self.down)

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter of the layer."""
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        of_linears = [tensor for linear in self.linears for tensor in (linear.weight, linear.bias)]
        return [tensor for tensor in (*norms, *of_linears) if tensor is not None]


class Family:
    """The names, dotted, by which a Transformers class has what the kernels compute with; Llama's unless overridden.

    Sizes are read from the configuration (`hidden_size`, `intermediate_size`, `num_attention_heads`,
    `num_key_value_heads`).
    """

    package: ClassVar[str] = "transformers.models."
    """The models' classes come from this package; code of another may compute something else under the same type."""

    # Of the model.
    embedding: ClassVar[str] = "model.embed_tokens"
    layers: ClassVar[str] = "model.layers"
    rotary: ClassVar[str] = "model.rotary_emb"
    final_norm: ClassVar[str] = "model.norm"
    head: ClassVar[str] = "lm_head"

    # Of its configuration.
    activation: ClassVar[str] = "hidden_act"

    # Of a norm.
    norm_epsilon: ClassVar[str] = "variance_epsilon"

    # Of a layer.
    attention_norm: ClassVar[str] = "input_layernorm"
    query: ClassVar[str] = "self_attn.q_proj"
    key: ClassVar[str] = "self_attn.k_proj"
    value: ClassVar[str] = "self_attn.v_proj"
    query_norm: ClassVar[str | None] = None
    key_norm: ClassVar[str | None] = None
    output: ClassVar[str] = "self_attn.o_proj"
    mlp_norm: ClassVar[str] = "post_attention_layernorm"
    gate: ClassVar[str] = "mlp.gate_proj"
    up: ClassVar[str] = "mlp.up_proj"
    down: ClassVar[str] = "mlp.down_proj"

    def part(self, module: Any, name: str) -> Any:
        """What `module` has under a dotted name of this description."""
        return attrgetter(name)(module)

    def layer_parts(self, layer: nn.Module) -> LayerParts:
        """The weights of one layer; raises `AttributeError` for a name that it does not have."""

        def linear(name: str) -> nn.Linear:
            found: nn.Linear = self.part(layer, name)
            return found

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.part(layer, name).weight

        return LayerParts(
            attention_norm=self.part(layer, self.attention_norm).weight,
            mlp_norm=self.part(layer, self.mlp_norm).weight,
            query_norm=norm(self.query_norm),
            key_norm=norm(self.key_norm),
            qkv=(linear(self.query), linear(self.key), linear(self.value)),
            output=linear(self.output),
            gate_up=(linear(self.gate), linear(self.up)),
            down=linear(self.down),
        )

    def misfits(self, model: Any, variants: Sequence[Variant]) -> Iterator[str]:
        """Why the kernels do not compute `model`, whose layers attend as `variants` say; nothing where they do."""
        if not type(model).__module__.startswith(self.package):
            yield f"its code is not that of {self.package.rstrip('.')}"
            return
        activation = getattr(model.config, self.activation, None)
        if activation not in ("silu", "swish"):
            yield f"its activation is {activation}"
        try:
            rope_type = self.part(model, self.rotary).rope_type
            parts = [self.layer_parts(layer) for layer in self.part(model, self.layers)]
            head = self.part(model, self.head)
            self.part(model, self.embedding)
            self.part(model, self.final_norm)
        except AttributeError as error:
            yield f"it lacks a part of its family: {error}"
            return
        if rope_type not in STATIC_ROTARY:
            yield f"its rotary embedding is {rope_type}"
        linears = [head, *(linear for layer in parts for linear in layer.linears)]
        if any(type(linear) is not nn.Linear for linear in linears):
            yield "its linear layers are not plain ones"  # a subclass may compute something else
            return
        for layer, known in zip(self.part(model, self.layers), parts, strict=True):
            ids = {id(parameter) for parameter in known.parameters}
            unknown = [name for name, parameter in layer.named_parameters() if id(parameter) not in ids]
            if unknown:
                yield f"its layers have {unknown[0]}, which its family does not name"
                return
        if any(linear.bias is not None for layer in parts for linear in (*layer.gate_up, layer.down)):
            yield "its MLP has biases"
        if any(variant.softcap or variant.sinks is not None for variant in variants):
            yield "its attention has capped logits or sinks"
        if len({variant.scaling for variant in variants}) > 1:
            yield "its layers scale their attention differently"


class Llama(Family):
    """Llama, Mistral and Qwen 2, whose modules have the same names."""


class Qwen3(Family):
    """Llama with norms of queries and keys."""

    query_norm = "self_attn.q_norm"
    key_norm = "self_attn.k_norm"


FAMILIES = Registry(
    "family",
    Family,
    "slipstream.families",
    {
        "llama": f"{__name__}:Llama",
        "mistral": f"{__name__}:Llama",
        "qwen2": f"{__name__}:Llama",
        "qwen3": f"{__name__}:Qwen3",
    },
)
"""By the configuration's `model_type`. `FAMILIES.register(model_type, cls)` adds one for this process."""


def find_family(model: Any) -> Family | None:
    """The family of a Transformers model; None where none has its `model_type`."""
    model_type = model.config.model_type
    return FAMILIES.load(model_type)() if model_type in FAMILIES.names() else None

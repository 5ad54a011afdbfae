"""What an executor is: it computes the passes of one model, and holds the weights that it computes with.

An executor is one class in one file. It is found by name (`slipstream.models.executor.registry`) and chosen when a
model is loaded. The engine, the drafters and `CausalLM` call it and never know which it is: what an executor can do
in one call, others do in several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from slipstream.core.metrics.passes import PassCounts
from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionBackend, Probed
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import threads
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.layer_trial import LayerTrial
from slipstream.models.cpu.packed_weight import packed_adapter_bytes
from slipstream.models.encoder_decoder import EncoderDecoder
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.families.parts import LayerParts
from slipstream.models.files.stored import StoredEmbedding, quantised_layers
from slipstream.models.layer_check import LayerCheck
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.packing import shared_weights
from slipstream.models.mixers.base import Mixers
from slipstream.models.mixers.latent import latent_projections
from slipstream.models.weight_check import WeightCheck
from slipstream.text.encoder_input import EncoderInput


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What was computed in one pass."""

    logits: Tensor
    """[wanted rows, vocab]"""
    hidden: dict[int, Tensor]
    """Layer index (0 is the embedding) to [all rows, width]; only the layers that are wanted."""
    verdicts: Tensor | None = None
    """int64 [5, wanted rows], see `PassVerdicts`; None where the pass chose no tokens. The next pass may overwrite
    them."""
    best: Sequence[int] | None = None
    """The token with the highest logit of each wanted row, the first of several, where they alone were asked for: then
    the logits have no columns."""


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """The weights that a pass of one row reads. An embedding is left out, since one row of it is read; of a mixture of
    experts those count that a row is sent to."""

    number: int
    """Weights that are multiplied with: matrices, not norms and biases."""
    num_bytes: int
    """Bytes of everything that is read, norms and biases included."""


@dataclass(frozen=True, slots=True)
class LargestPass:
    """The sizes from which an executor says what it will hold of passes that it records."""

    num_rows: int
    """The most rows of a pass."""
    context: int
    """Tokens of the longest text."""
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of a number between the operations, and of a logit."""
    is_int8: bool
    """Whether the cache is."""
    row_bytes: int
    """What a pass computes with, for one row."""
    tap_bytes: int = 0
    """Hidden states that are wanted of a row."""


def kernels_label(executor: type[Executor], is_native: bool) -> str:
    """`decoder` for whole passes in our kernels, `native` for linear layers in them, `recorded` for recorded passes of
    Transformers' code, `torch` for none of these."""
    if executor.is_fused or executor.decodes:
        return "decoder"
    return "native" if is_native else "recorded" if executor.records else "torch"


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A Transformers model that was tried out, and how it is to be run."""

    model: Any
    """In evaluation mode, on its device, with its weights as they were read."""
    backend: AttentionBackend
    probed: Probed
    weight_format: WeightFormat
    dtype: torch.dtype
    """Type that rows are computed in."""
    native: bool
    """Whether the native CPU kernels may compute."""
    reproducible: bool = True
    """See `EngineConfig.reproducible`."""
    mixers: Mixers | None = None
    """Its recurrent layers."""
    rounds_head: bool = False
    """See `LoadOptions`."""

    @property
    def widens(self) -> bool:
        """Whether its matrices may be narrower than the rows that they are multiplied with."""
        return self.dtype == torch.float32


class PackedChecks(Protocol):
    """What the weights of an executor are compared with, once it has taken a model over."""

    weights: WeightCheck
    layers: LayerCheck | None
    """Check of a model whose layers were tried out one by one (`Executor.layer_trial`)."""

    def check_embedding(self, executor: Executor, is_packed: bool) -> None:
        """Compare the embeddings of a pass; `is_packed` says whether they are read out of packed weights."""


class Executor(ABC):
    """Computes the passes of one model. Engines in several threads may share it."""

    name: ClassVar[str]
    """The name that it is found by. Of the heads that run with a model, those of this name are tried first."""
    widens_entries: ClassVar[bool] = False
    """Whether a pass reads a cache that is narrower than its rows without a widened copy of it."""
    computes_fast_rows: ClassVar[bool] = False
    """Whether it can compute rows as `fast_prompts` says."""
    is_fused: ClassVar[bool] = False
    """Whether it computes whole passes in the CPU kernels."""
    decodes: ClassVar[bool] = False
    """Whether it computes whole passes in the kernels of a GPU."""
    otherwise: ClassVar[str | None] = None
    """The name of the executor that `auto` takes in its place for a model that it refuses."""
    chooses: ClassVar[bool] = False
    """Whether a pass does what `TokenChoices` says where it is given some; else they are ignored."""
    finds_best: ClassVar[bool] = False
    """Whether `forward` takes `best`: True for `PassOutput.best` in the place of logits."""
    records: ClassVar[bool] = False
    """Whether it records passes and replays them."""
    warms_up: ClassVar[bool] = False
    """Whether passes are recorded before the first request."""
    num_scratch_slots: ClassVar[int] = 0
    """Slots of a cache that its passes write to beside those of sequences."""
    has_experts: bool = False
    """Whether its layers send rows to experts that it knows of."""

    def __init__(self, given: ProbedModel) -> None:
        """Takes the model over, once it has passed its checks: the model's weights may be freed or changed."""
        self.model = given.model
        self.num_threads = threads.available()
        """What its passes may use on a CPU."""

    @classmethod
    def misfit(cls, backend: AttentionBackend) -> str | None:
        """As `refusal`, of what the attention alone tells, before any weights are read."""
        return None

    @classmethod
    def refusal(cls, given: ProbedModel) -> str | None:
        """Why this executor cannot compute such a model, in one line that continues "because"; None where it can.

        Unless overridden, one that computes in calls of its own refuses recurrent layers: their steps are made by the
        host.
        """
        if given.probed.states and (cls.is_fused or cls.records):
            return "it has recurrent layers, which run layer by layer"
        return None

    @classmethod
    def layer_trial(cls, given: ProbedModel) -> LayerTrial | None:
        """What tries single layers out as this executor will compute them; None: whole passes are compared instead."""
        return None

    @classmethod
    def unpacked(cls, given: ProbedModel) -> Executor | None:
        """This executor over weights as they were read, which the model keeps: whole passes of it are compared before
        any are packed. None: those of Transformers' code are, with our attention."""
        return None

    @classmethod
    def layer_parts(cls, model: Any) -> list[LayerParts]:
        """The parts of all layers of a model, loaded or not, where it packs whole layers; none where it does not."""
        return []

    @classmethod
    def packed_groups(cls, model: Any) -> list[list[nn.Linear | GroupedLinear]]:
        """The linear layers of a model, loaded or not, that it packs, together where it packs them as one. Of layers
        that share their weights it is the first."""
        own = {id(part) for part in latent_projections(model)}
        own |= {id(part) for part in _attention_to_nothing(model)}
        linears: dict[object, nn.Linear | GroupedLinear] = {}
        for part in model.modules():
            if type(part) is nn.Linear and id(part) not in own:
                linears.setdefault(shared_weights(part, model.get_output_embeddings()), part)
            elif isinstance(part, GroupedLinear) and id(part) not in own:
                linears[part] = part
        return [[part] for part in linears.values()]

    @classmethod
    def rounded_head_bytes(cls, model: Any, kernel: Kernel) -> int:
        """What it holds of an output layer besides its weights, to find best tokens with: by default nothing."""
        return 0

    @classmethod
    def adapter_bytes(cls, model: Any, is_native: bool) -> int:
        """What an adapter takes that is kept apart from quantised layers of a model, loaded or not: packed with these
        where the CPU kernels compute them (`is_native`), else as it is read."""
        merged = {id(part) for part in latent_projections(model)}  # it is added to their weights
        if not is_native:
            changes = [layer.change for layer in quantised_layers(model) if id(layer) not in merged]
            return sum(change.nbytes for change in changes if change is not None)
        table = model.get_input_embeddings()
        # A tied table's rows are read out of the layer as it was before it was packed.
        change = table.linear.change if isinstance(table, StoredEmbedding) else None
        grouped = [part for part in model.modules() if isinstance(part, GroupedLinear)]
        packed = sum(packed_adapter_bytes([layer]) for layer in grouped if id(layer) not in merged)
        return packed + (0 if change is None else change.nbytes)

    @classmethod
    def recorded_bytes(cls, largest: LargestPass) -> int:
        """What it will come to hold of recorded passes, but for the `num_scratch_slots` of its caches."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether a pass is only launched when `forward` returns, so that the host can work while it runs."""
        return False

    @property
    def is_native(self) -> bool:
        """Whether the CPU kernels compute its linear layers, if not whole passes."""
        return self.is_fused

    @property
    def kernels(self) -> str:
        """What computes, in a word for people."""
        return kernels_label(type(self), self.is_native)

    @property
    def num_operator_threads(self) -> int:
        """How many threads of PyTorch's its passes use."""
        return self.num_threads

    @property
    @abstractmethod
    def reads(self) -> ReadWeights:
        """What every pass must read."""

    @abstractmethod
    def footprint(self) -> int:
        """Bytes of the weights as they are held."""

    @abstractmethod
    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        choices: TokenChoices | None = None,
    ) -> PassOutput:
        """One pass over all rows; writes their keys and values to `pool`. See `CausalLM.forward`."""

    def encode(self, given: EncoderInput) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values that each layer makes of an encoder's output, [heads, positions, dim] each. By default there
        is no encoder."""
        raise ValueError(f"{self.name} runs no encoder")

    def draft(
        self, rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, layers: Sequence[int] | None = None,
        at_once: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """What the levels of `drafts` have drawn behind the rows whose logits are wanted, all of them in one call that
        reads nothing from the device; None where it is not made for that. By default it never is.

        With `at_once` there is one pass, and a draft's levels are drawn from as many wanted rows.
        """
        return None

    def draft_chain(
        self, rows: ForwardBatch, pool: KVPool, chains: Chains, layers: Sequence[int] | None = None
    ) -> Sequence[Sequence[int]]:
        """The tokens of whole chains, behind the rows whose logits are wanted; see `Chains`.

        Their entries but the last tokens' are in `pool`, behind those rows'. Raises `ValueError` where a sequence has
        no slots for them. By default a pass a level.
        """
        return chains.draw(rows, lambda level, _: self.forward(level, pool, layers=layers).logits)

    def warm_up(
        self, pool: KVPool, max_rows: int, hidden_layers: Sequence[int] = (), chooses: bool = False
    ) -> None:
        """Prepare for passes of up to `max_rows` over this cache, before the first request; `chooses` is whether they
        will be given `TokenChoices`. By default nothing is done."""
        return

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]; see `CausalLM.embed`."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]; see `CausalLM.project`."""

    @property
    def pass_counts(self) -> PassCounts | None:
        """How many passes were replays of recorded ones; None for an executor that records none."""
        return None

    def check_layers(self, trial: ForwardBatch, pool: KVPool) -> None:
        """Raise `ConfigError` where some layers cannot run without the others. `trial` is a pass to try it on."""
        return

    def check_packed(self, checks: PackedChecks) -> None:
        """Raise `UnsupportedModelError` where the weights that it holds are not those that were checked."""
        return


def _attention_to_nothing(model: Any) -> list[nn.Module]:
    """What attends to an encoder's output in a decoder that runs without an encoder: no pass calls it."""
    if isinstance(model, EncoderDecoder):
        return []
    return [part for name, part in model.named_modules() if "encoder_attn" in name.split(".")]

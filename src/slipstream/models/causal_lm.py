"""A Transformers model whose decoder runs packed rows over Slipstream's cache."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.core.sequence import Sequence
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.kv.encoded import TRIAL, EncodedEntries, encoded_slots
from slipstream.kv.pool import KVPool, runnable
from slipstream.kv.slots import SlotMap
from slipstream.kv.state import StatePool, StateRoom
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu.exact_rows import are_exact
from slipstream.models.executor.base import Executor, ProbedModel
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.families.experts import file_stacks
from slipstream.models.files.stored import KeptWeights, quantised_layers
from slipstream.models.identity import ModelIdentity
from slipstream.models.rows import RowGroup
from slipstream.models.trial import NUM_TRIAL_ROWS
from slipstream.text.encoder_input import EncoderInput

TRIAL_ROOM = StateRoom(num_owners=3, num_copies=0, num_logged=NUM_TRIAL_ROWS)
"""For the sequences of passes that belong to no request."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass yields for the rows that are wanted, group after group."""

    logits: Tensor
    """[wanted rows, vocab]"""
    hidden: dict[int, Tensor]
    """Layer index (0 is the embedding) to [all rows, width]; only the layers that are wanted."""
    rows: ForwardBatch
    """The rows that were computed."""
    verdicts: Tensor | None = None
    """As in `PassOutput`: what the pass made of the trees of `TokenChoices`; None where it was given none, or its
    executor takes none."""
    best: Seq[int] | None = None
    """As in `PassOutput`."""


class CausalLM(ModelIdentity):
    """A loaded model: what it is, its shapes and limits. Its executor computes.

    Make one with `slipstream.models.load_model`.
    """

    def __init__(
        self, given: ProbedModel, executor: Executor, path: str, context_length: int, stored_as: str = ""
    ) -> None:
        self.model = given.model
        self.executor = executor
        self.path = path
        self.backend = given.backend
        self.config = given.model.config
        self.shapes = tuple(given.probed.shapes)
        self.states = tuple(given.probed.states)
        self.encoded_shapes = given.probed.encoded_shapes
        self.has_biases = given.probed.has_biases
        self.num_encoded = 1
        """Of how many sequences its caches hold what an encoder has made of their inputs."""
        self.vocab_size = given.probed.vocab_size
        self.context_length = context_length
        self.dtype = given.dtype
        self.cache_dtype = self.dtype
        self.fast_prompts = False
        """Where true, `RowGroup.num_fast` says of each pass for which rows."""
        self.exact_rows = are_exact()
        self.rounds_head = given.rounds_head
        self.device: torch.device = given.model.device
        quantised = quantised_layers(self.model)
        self.kept = KeptWeights.of(quantised)
        """Those that are held as a file had them."""
        self._num_parameters: int = (
            sum(parameter.numel() for parameter in self.model.parameters())
            + self.kept.num_weights
            + sum(stack.numel() for stack in file_stacks(self.model) if not stack.is_kept)
        )
        self.unpacked_bytes = sum(int(parameter.nbytes) for parameter in self.model.parameters())
        """Bytes of the weights as they were read, but for those that files hold quantised."""
        self.stored_bits = frozenset(part.bits for part in quantised)
        """Bits of the codes of weights that are held as a file had them, quantised; empty where there are none."""
        self.stored_as = stored_as
        self.weight_format = given.weight_format
        self.unused_tensors: Mapping[str, Tensor] = {}
        """Those of its checkpoint that it does not read; see `Checkpoint.unused_tensors`."""
        self.final_scale = _final_scale(self.model)
        """[hidden], what its final norm multiplies with; None where that is no norm of this kind."""
        self.was_compared = False
        """Whether its layers or logits were compared with Transformers' when it was loaded."""
        self.fell_back = False
        """Whether they differed for the executor that was to compute them first, and another does."""
        self.num_threads = executor.num_threads
        self._runs_layers = False

    @property
    def executor_type(self) -> type[Executor]:
        return type(self.executor)

    @property
    def kernels(self) -> str:
        return self.executor.kernels

    @property
    def is_fused(self) -> bool:
        return self.executor.is_fused

    @property
    def is_native(self) -> bool:
        return self.executor.is_native

    @property
    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def weight_bytes(self) -> int:
        return self.executor.footprint()

    def num_fast_tokens(self, num_prompt_tokens: int) -> int:
        """How many leading tokens of a text with such a prompt are computed in the arithmetic of `fast_prompts`."""
        return max(num_prompt_tokens - 1, 0) if self.fast_prompts else 0

    def new_cache(
        self,
        num_slots: int,
        *,
        prefix_caching: bool = True,
        feature_width: int = 0,
        cache_dtype: torch.dtype | None = None,
        states: StateRoom = TRIAL_ROOM,
        num_encoded: int | None = None,
    ) -> KVCache:
        """A cache for this model's keys and values, in the layout that its attention reads.

        `feature_width` numbers are kept of each token with them. Keys and values are held in `cache_dtype`, None: in
        the model's own. `states` is the room for those of recurrent layers, where it has some. What encoders make of
        inputs is held of `num_encoded` sequences, None: as planned.
        """
        held = self.cache_dtype if cache_dtype is None else cache_dtype
        scratch = self.executor.num_scratch_slots
        pool = KVPool(self.shapes, num_slots, self.dtype, self.device, feature_width, held, scratch)
        if self.states:
            pool.states = StatePool(self.states, states, self.device)
        encoded = None
        if self.encoded_shapes:
            number = self.num_encoded if num_encoded is None else num_encoded
            size = number * encoded_slots(self.encoder_length)
            encoded = EncodedEntries(
                KVPool(self.encoded_shapes, size, self.dtype, self.device, cache_dtype=held)
            )
        return KVCache(pool, prefix_caching, self.backend.layout, encoded)

    def reads(self, sequence: Sequence) -> bool:
        """Whether its encoder can read a sequence's input."""
        given = sequence.encoder_input
        return given is not None and self.model.num_positions(given) <= self.encoder_length

    @torch.inference_mode()
    def encode(self, cache: KVCache, sequence: Sequence) -> None:
        """Have what the encoder makes of a sequence's input in `cache`, where it is not yet."""
        assert sequence.encoder_input is not None, "an encoder-decoder reads an input"
        self._encode(cache, sequence.id, sequence.encoder_input, sequence.prefix_account)

    def _encode(self, cache: KVCache, owner: int, given: EncoderInput, account: str) -> None:
        encoded = cache.encoded
        assert encoded is not None, "the cache is not this model's"
        if owner not in encoded and not encoded.open(owner, self.model.num_positions(given), account):
            try:
                encoded.write(owner, self.executor.encode(given))
            except BaseException:
                encoded.close(owner)
                raise

    def trial_cache(self, num_tokens: int, cache_dtype: torch.dtype | None = None) -> tuple[KVPool, SlotMap]:
        """A cache that holds one sequence of `num_tokens`, and its slots: for passes that belong to no request."""
        num_slots = -(-(num_tokens + 1) // self.kv_unit) * self.kv_unit
        cache = self.new_cache(
            num_slots, prefix_caching=False, cache_dtype=cache_dtype, num_encoded=1 + TRIAL_ROOM.num_owners
        )
        cache.accounting.open(0, [0] * num_tokens)
        if cache.encoded is not None:
            with torch.inference_mode():
                for owner in (TRIAL, *range(TRIAL_ROOM.num_owners)):
                    self._encode(cache, owner, self.model.trial_input(), "")
        return cache.pool, cache.accounting.slots(0)

    def trial_tokens(self) -> list[int]:
        """`NUM_TRIAL_ROWS` token ids, spread over the vocabulary: the text of such passes."""
        return [row * 7919 % self.vocab_size for row in range(1, NUM_TRIAL_ROWS + 1)]

    @torch.inference_mode()
    def forward(
        self,
        groups: Seq[RowGroup],
        pool: KVPool,
        hidden_layers: Seq[int] = (),
        layers: Seq[int] | None = None,
        added: Tensor | None = None,
        choices: TokenChoices | None = None,
        best: bool = False,
    ) -> ForwardOutput:
        """One pass over all rows of all groups; writes their keys and values to `pool`.

        `layers`, ascending and none twice, are the layers that run, in their own places of the cache; None is all of
        them. Hidden states are those of whole passes only. `added` [rows, hidden] is added to the embeddings. With
        `choices` an executor that `chooses` yields verdicts and keeps the hidden states itself; with `best` one that
        `finds_best` yields the best tokens and no logits. Raises as `check_layers` does.
        """
        rows = self._rows(groups, layers, hidden_layers)
        rows.added = added
        asked: dict[str, Any] = {} if choices is None else {"choices": choices}  # others take none
        if best and self.executor.finds_best:
            asked["best"] = True
        done = self.executor.forward(rows, pool, hidden_layers, layers, **asked)
        return ForwardOutput(done.logits, done.hidden, rows, done.verdicts, done.best)

    @torch.inference_mode()
    def draft_chain(
        self, groups: Seq[RowGroup], pool: KVPool, chains: Chains, layers: Seq[int] | None = None
    ) -> Seq[Seq[int]]:
        """The tokens of whole draft chains, one behind each row whose logits are wanted; see `Executor.draft_chain`."""
        return self.executor.draft_chain(self._rows(groups, layers), pool, chains, layers)

    def _rows(
        self,
        groups: Seq[RowGroup],
        layers: Seq[int] | None,
        hidden_layers: Seq[int] = (),
    ) -> ForwardBatch:
        """The rows of a pass over these layers, which are checked."""
        if layers is not None:
            in_order = all(a < b for a, b in pairwise([-1, *layers, self.num_layers]))
            if not in_order or not layers or hidden_layers:
                raise ValueError(
                    f"layers {list(layers)} of {self.num_layers} with taps {list(hidden_layers)}"
                )
            self.check_layers(layers)
        return ForwardBatch(groups)

    def check_layers(self, layers: Seq[int] = ()) -> None:
        """Raise `ConfigError` where this model cannot run some of its layers alone, or not just `layers`."""
        if not self._runs_layers:
            token_ids = self.trial_tokens()
            pool, slots = self.trial_cache(len(token_ids))
            trial = ForwardBatch([RowGroup(slots, 0, token_ids, range(len(token_ids)))])
            self.executor.check_layers(trial, pool)
            self._runs_layers = True
        for layer in set(layers).difference(runnable(self.shapes, layers)):
            raise ConfigError(
                f"layer {layer} of this {self.family} model reads the keys and values of layer "
                f"{self.shapes[layer].source}: run both, or leave out layer {layer} too"
            )

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]: the embeddings, as the model itself reads them."""
        return self.executor.embed(token_ids)

    def project(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]: the model's output layer, for states behind the final norm.

        What a family does to its logits afterwards (scaling, a softcap) is not done.
        """
        return self.executor.project(hidden)


@torch.no_grad()
def _final_scale(model: Any) -> Tensor | None:
    """The final norm's output for a row of ones, which an RMS norm leaves as they are before it scales them."""
    norm = getattr(model.get_decoder(), "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.ndim != 1:
        return None
    scale: Tensor = norm(torch.ones_like(weight))
    return scale.detach().clone()

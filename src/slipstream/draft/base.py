"""The contract of a drafter: anything that proposes the target's next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.core.proposal import Proposal, VerifierTraits
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.footprint import Footprint
from slipstream.draft.traits import DrafterTraits

if TYPE_CHECKING:
    import torch

    from slipstream.config import EngineConfig
    from slipstream.core.metrics.worker import WorkerStats
    from slipstream.draft.methods import MethodSpec
    from slipstream.kv.cache import KVCache
    from slipstream.models.causal_lm import CausalLM
    from slipstream.models.identity import ModelIdentity
    from slipstream.models.outline import ModelOutline


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know when it is made."""

    engine_config: EngineConfig
    tokenizer: Any
    """The target's tokenizer (Transformers, fast)."""
    vocab_size: int
    """Width of the target's logits; a proposed token id is below it."""
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    verifier: VerifierTraits
    """What the verifier that will judge the proposals can do: `accepts_coupled`, `kinds` and so on."""
    target: CausalLM | None = None
    """The target itself, for drafters that read its weights or run parts of it; None where nothing is loaded."""
    unused_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the target's checkpoint that the target does not read, each read from its file when it is first used.
    Empty for drafters whose `spec` does not say that it reads them."""
    target_layers: tuple[int, ...] | None = None
    """The layers that `target` runs: those of whose tokens it keeps keys and values. None is all."""
    target_outline: ModelOutline | None = None
    """What is known of a target that is not loaded, for `Drafter.footprint`."""
    draft_timeout_s: float = 30.0
    """How long a call of a drafter may take. One that takes longer is not called for a while, in the end never."""
    loaded_drafter: Drafter | None = None
    """One that is loaded already, whose draft model may be used again where the options are the same: see
    `reusable_model`."""
    is_priced: bool = False
    """True where a policy measures what the drafter's calls cost, and drops a drafter that costs more than it saves, as
    `auto` does. Then the drafter must do its full work also where a proposal cannot be used: a call that returns
    early would look cheap, and the policy would keep the drafter."""

    @property
    def known_target(self) -> ModelIdentity | None:
        """The target, loaded or not."""
        return self.target or self.target_outline


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step made of one sequence; its `token_ids` already hold what was committed."""

    sequence: Sequence
    proposal: Proposal
    """All draft tokens that were checked."""
    num_accepted: int
    """Draft tokens among the committed ones; the last committed token is the target's own, unless `was_cut`."""
    logits: torch.Tensor
    """[1 + n, vocab], the target's raw logits: row 0 follows the text as it was when `propose` was called, row i + 1
    follows node i, accepted or not. Valid during the call only."""
    num_before: int | None = None
    """Tokens that the text had when `propose` was called; None where that follows from `num_accepted`."""
    was_cut: bool = False
    """True where the answer ended before the target's own token was committed."""

    @classmethod
    def of(cls, item: StepItem) -> Observation:
        """What a step made of one sequence, once its tokens have been committed."""
        return cls(
            item.sequence, item.proposal, item.num_accepted, item.logits, item.length_before, item.was_cut
        )

    @property
    def length_before(self) -> int:
        """Tokens that the text had when `propose` was called.

        What was committed since need not be the `num_accepted` draft tokens and the target's own: a member of an
        ensemble sees others' draft tokens accepted, a grammar's forced tokens are added to any proposal, and a stop
        rule may have cut what was accepted.
        """
        if self.num_before is not None:
            return self.num_before
        return len(self.sequence.token_ids) - self.num_accepted - 1


class Drafter(ABC):
    """Drafts for many sequences at once.

    In a step the engine calls `propose` for the sequences that decode, then `observe` when their verdicts have
    been committed to `sequence.token_ids`, and `release` once for each sequence that has finished, was aborted or
    was preempted (it may come back later under the same id). A drafter keeps whatever state it needs by
    `sequence.id`; a sequence that it has not seen before may already be long. Nothing that a drafter proposes can
    change the text, only how fast it comes.

    What is not abstract has a default that suits a drafter without memory, weights or draft model. What a drafter is,
    its `traits` say.
    """

    summary: ClassVar[str] = ""
    """What it does, in a few words for users; `slipstream info` shows it. Empty: the first line of the docstring."""
    Options: ClassVar[type]
    """Frozen dataclass of the keys that `speculative_config` may hold for this drafter. The one that bounds a path is
    called `num_speculative_tokens`; see `configured_depth`."""
    spec: ClassVar[MethodSpec | None] = None
    """What is known of the method of a package; a built-in one's is in `slipstream.draft.methods`."""
    traits: DrafterTraits = DrafterTraits(reads_logits=False)
    """On the class: what holds whatever the options are; `kinds`, `reads_text_only` and `has_own_model` are read before
    a drafter is made. On a drafter, from its constructor on: what holds with its configuration."""

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """The traits with these options, as far as they are known without loading anything.

        Where the class does not say `max_nodes`, it is what `configured_depth` says.
        """
        return replace(cls.traits, max_nodes=cls.traits.max_nodes or cls.configured_depth(options) or 0)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """What it will hold, for `slipstream plan` and `info`. Loads nothing; the context has the target's outline.

        Raises `ConfigError` where it cannot run with this target, and `ModelError` where a configuration that it needs
        cannot be read. By default it holds no weights.
        """
        return Footprint(traits=cls.configured(options, context))

    @classmethod
    def configured_depth(cls, options: Any) -> int | None:
        """The most draft tokens on a path that `options` allow: their `num_speculative_tokens`, None without one."""
        depth: int | None = getattr(options, "num_speculative_tokens", None)
        return depth

    @classmethod
    def made(cls, options: Any, context: DraftContext) -> Drafter:
        """The drafter with these options. A class whose options may name weights of another kind, which another class
        runs, makes that one, and its `footprint` does the same; what both classes declare is equal."""
        return cls(options, context)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises `TypeError` for a class that declares a trait, or what it holds, in a way that nothing reads."""
        super().__init_subclass__(**kwargs)
        if "observe" in vars(cls) and "traits" not in vars(cls):
            # It may read them, whatever the `observe` does that it overrides.
            cls.traits = replace(cls.traits, reads_logits=True)
        if retired := [name for name in vars(cls) if name in _TRAITS]:
            raise TypeError(
                f"drafter {cls.__name__} declares {', '.join(retired)}, which nothing reads. What a drafter is, and "
                "what its tables come to hold, its traits say: traits = DrafterTraits(...) of the class for what holds "
                "with any options, and the class method configured(options, context) for the rest. In the place of "
                "fit and outline there is one class method, footprint. docs/extend/drafter.md shows all of them"
            )

    def __init__(self, options: Any, context: DraftContext) -> None:
        self.options = options
        self.context = context
        self.traits = self.configured(options, context)
        self.__tables: list[dict[int, Any]] = []

    def by_sequence(self) -> dict[int, Any]:
        """A new table of state by sequence id. `release` drops a sequence's entry, and `num_held` counts entries."""
        self.__tables.append({})
        return self.__tables[-1]

    @property
    def parts(self) -> Seq[Drafter]:
        """The drafters inside this one. They get memory and are reset with it, and what they hold is its own."""
        return ()

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence, each of at most its budget in nodes and in depth; the empty one is always allowed.

        A budget of 0 announces a sequence whose prompt the target is still computing: a drafter that must compute
        the prompt too should begin.

        Must not change the sequences (drafters that are not Slipstream's own get copies of them), and may be called
        several times in a step: if it raises for a batch, the engine calls it for each sequence alone, and retires it
        for those for which it raises again; `auto` calls for some of the sequences at a time; and a `cascade` calls its
        inner drafter before each of its passes. What is proposed need not be checked: other tokens may be.
        """

    def runs_ahead(self, sequence: Sequence) -> bool:
        """Whether it can draft behind what the step in flight makes of its last draft, before the host has read it: see
        `Sequence.tail`. Then `propose` is called once more before `observe`."""
        return False

    def observe(self, observations: Seq[Observation]) -> None:
        """Learn the verdicts of a step; sequences for which nothing was proposed are among them."""
        return

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        for table in self.__tables:
            table.pop(sequence.id, None)

    def rewind(self, sequence: Sequence) -> None:
        """Forget what is known of tokens that were taken back: `token_ids` ends earlier than at the last call.

        An engine never takes anything back. A drafter inside a `cascade` is given the draft model's tokens as if they
        were committed, and rewound when the target rejects them. By default the sequence is released.
        """
        self.release(sequence)

    def reset(self) -> None:
        """Forget all that was kept from finished sequences, as a new drafter would be."""
        for part in self.parts:
            part.reset()

    def version_of(self, sequence: Sequence) -> str:
        """The version of its weights that drafts for a sequence; empty where there is but one."""
        return ""

    @property
    def num_failures(self) -> int:
        """How often drafters inside this one have been retired for a sequence that they failed."""
        return 0

    def worker_stats(self) -> Seq[WorkerStats]:
        """The state of every draft worker that it gets drafts from; none for drafters of this process."""
        return [stats for part in self.parts for stats in part.worker_stats()]

    def reusable_model(self, loaded_as: tuple[object, ...]) -> CausalLM | None:
        """The draft model that was loaded as this says, for another drafter to compute with too; None without one.
        `DraftModelDrafter` says what the tuple holds."""
        reused = (part.reusable_model(loaded_as) for part in self.parts)
        return next((model for model in reused if model is not None), None)

    def drafting_model(self) -> CausalLM | None:
        """The language model that drafts; None for lookups, heads and all others without one."""
        return None

    def drafting_models(self) -> Seq[CausalLM]:
        """Every language model that drafts, those of its `parts` included."""
        own = [] if (model := self.drafting_model()) is None else [model]
        return own + [each for part in self.parts for each in part.drafting_models() if each not in own]

    def attach(self, cache: KVCache) -> None:
        """Get the target's cache; called once, after `allocate`.

        Slipstream's own drafters may write the entries behind a sequence's computed tokens: the target's next pass
        overwrites them. All others get a `ReadOnlyCache`.
        """
        return

    def let_pend(self, device: torch.device) -> None:
        """From now on whole drafts may be pending (`core.pending`), where they can be brought to this device without a
        wait: each goes to a pass that checks it there, by a verifier that compares tokens alone. By default none is."""
        return

    def allocate(self, num_tokens: int) -> None:
        """Make room for the keys and values of `num_tokens` tokens in all; called once, before any proposal."""
        for part in self.parts:
            part.allocate(num_tokens)

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds now: weights, keys and values, tables."""
        return sum(part.memory_bytes() for part in self.parts)

    def num_held(self) -> int:
        """Sequences for which state is kept; 0 once all have been released."""
        return max([self._num_in_tables, *(part.num_held() for part in self.parts)])

    @property
    def _num_in_tables(self) -> int:
        """The most sequences in one of its own tables, `by_sequence`."""
        return max(map(len, self.__tables), default=0)

    def integrity(self) -> list[str]:
        """Violated invariants of the drafter's own state, a sentence each; tests call it after every scenario."""
        return [fault for part in self.parts for fault in part.integrity()]


_TRAITS = frozenset(
    {each.name for each in fields(DrafterTraits)} | {"kinds_made", "fit", "outline", "table_bytes"}
)
"""What a drafter once said in attributes and methods of these names."""

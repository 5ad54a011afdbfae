"""Options of training runs. The command line makes its flags of these classes, so no torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.draft.methods import EAGLE, EAGLE3, PARD, PEAGLE
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

OPTIMIZERS = ("adamw", "muon")
DTYPES = ("float32", "bfloat16")
EAGLE_LAYOUTS = (EAGLE.name, EAGLE3.name, "speculators")
OVERLAPS = ("refuse", "drop_training", "drop_evaluation", "report")
LOSSES = ("forward_kl", "reverse_kl", "total_variation", "hard")


@dataclass(frozen=True)
class RegenerateOptions:
    """Which prompts are answered, and with which sampling parameters."""

    num_prompts: int | None = None
    """The most conversations to answer; all by default."""
    mix: str = ""
    """Weights of the tasks, as in code=2,chat=1; tasks that are not named are excluded. By default all weigh the same.
    Conversations are drawn without replacement; the share of an exhausted task goes to the others."""
    temperature: str = "0"
    """0 is greedy. Several, as in 0,0.8, alternate from conversation to conversation."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose total probability reaches it."""
    max_tokens: int = 256
    """The most tokens in an answer."""
    seed: int = 0
    """Seed of the choice and order of prompts, and of each conversation's own seed."""
    key: str | None = None
    """The key of a line under which the prompt is: text, a list of turns, or messages. By default `prompt`, `text`,
    `question`, `instruction` (with its `input`), `turns` or `messages`, whichever a line has."""

    def __post_init__(self) -> None:
        check_types(self, "regenerate")
        check_at_least("regenerate", 1, max_tokens=self.max_tokens)
        check_at_least("regenerate", 0, seed=self.seed)
        if self.num_prompts is not None:
            check_at_least("regenerate", 1, num_prompts=self.num_prompts)
        parse_weights(self.mix, "--mix")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, top_p=self.top_p)

    @property
    def temperatures(self) -> list[float]:
        """The temperatures as numbers; raises `ConfigError`."""
        return parse_numbers(self.temperature, "--temperature")


@dataclass(frozen=True)
class TrainOptions:
    """A run's budget, data, optimizer and evaluations. With two budgets the one that is closer to its end applies."""

    max_tokens: int | None = None
    """Budget in tokens, including prompts but not padding."""
    time_limit_minutes: float | None = None
    """Budget in minutes of training, over all runs into the same output. Evaluations and the computation of a feature
    cache are not counted."""
    batch_rows: int = 8
    """Rows in a forward pass of each process."""
    row_length: int = 512
    """Tokens in a row. Conversations share rows; longer ones are split."""
    accumulation: int = 1
    """Forward passes per optimizer step."""
    optimizer: str = "adamw"
    """adamw, or muon for the matrices of the layers and adamw for the rest."""
    learning_rate: float = 1e-3
    """AdamW's peak learning rate."""
    muon_learning_rate: float = 0.01
    """Muon's peak learning rate."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    warmup_fraction: float = 0.02
    """Fraction of the budget over which the learning rate rises."""
    hold_fraction: float = 0.1
    """Fraction of the budget after which the learning rate falls linearly to zero."""
    dtype: str = "float32"
    """Type of matrix products, the target's included: float32 or bfloat16. Weights and losses are float32."""
    cache_features: bool = False
    """Compute the target's hidden states once and keep them on disk, in float16: faster from the second epoch on, for
    two bytes a token, layer and unit of width."""
    feature_cache_bytes: int | None = None
    """With --cache-features: the most bytes that they take. What does not fit is computed anew each time."""
    seed: int = 0
    """Seed of fresh weights, the order of the data and the draft's samples."""
    log_every_s: float = 15.0
    """Seconds between two lines of the log."""
    checkpoint_every_s: float = 180.0
    """Seconds between two checkpoints."""
    evaluate_every_minutes: float | None = None
    """Evaluate with the engine this often, besides at the start and the end; in minutes of training."""
    evaluate_every_steps: int | None = None
    """The same in steps."""
    patience: int = 0
    """Stop after this many evaluations without a better greedy τ; 0 does not stop early."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        check_at_least(
            "train", 1, batch_rows=self.batch_rows, row_length=self.row_length, accumulation=self.accumulation
        )
        check_at_least("train", 0, seed=self.seed, patience=self.patience)
        if self.max_tokens is None and self.time_limit_minutes is None:
            raise ConfigError("a run needs a budget: give --max-tokens, --time-limit-minutes or both")
        for name in ("max_tokens", "time_limit_minutes", "evaluate_every_minutes", "evaluate_every_steps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"train {name} must be above 0, got {value}")
        for name in ("learning_rate", "muon_learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"train {name} must be above 0, got {getattr(self, name)}")
        for name in ("warmup_fraction", "hold_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train {name} must be in [0, 1), got {getattr(self, name)}")
        if self.feature_cache_bytes is not None and not self.cache_features:
            raise ConfigError("--feature-cache-bytes bounds what --cache-features keeps; give that too")
        if self.row_length < 2:
            raise ConfigError(f"train row_length must be at least 2, got {self.row_length}")
        reject_unknown([self.optimizer], OPTIMIZERS, "optimizer")
        reject_unknown([self.dtype], DTYPES, "dtype")


@dataclass(frozen=True)
class EvaluationOptions:
    """The held-out prompts of evaluations."""

    eval_workload: str = "sample"
    """Prompts of evaluations, as in `slipstream bench`: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."""
    eval_prompts_per_task: int = 4
    """Number of prompts of each task, the first ones."""
    eval_max_tokens: int = 64
    """The most tokens in an answer."""
    overlap: str = "refuse"
    """What to do when evaluation prompts, or near copies, are in the training data: refuse, drop_training (exclude the
    conversations that contain them), drop_evaluation (use other prompts of the workload) or report."""

    def __post_init__(self) -> None:
        check_types(self, "evaluation")
        reject_unknown([self.overlap], OVERLAPS, "overlap")
        check_at_least(
            "evaluation",
            1,
            eval_prompts_per_task=self.eval_prompts_per_task,
            eval_max_tokens=self.eval_max_tokens,
        )


@dataclass(frozen=True)
class DistillOptions:
    """The draft model to train, and its loss."""

    init: str | None = None
    """Initial checkpoint, a folder or hub id; `embedded` is the embedded draft."""
    shape: str | None = None
    """Fresh weights in the target's family, LAYERSxWIDTH, as in 2x128."""
    keep_layers: str | None = None
    """Initialise with these layers of the target, as in 0,3,5, and with its embedding and output layer."""
    loss: str = "forward_kl"
    """forward_kl, reverse_kl, total_variation (one minus the acceptance rate of rejection sampling), hard
    (cross-entropy on the text), or a weighted sum as in forward_kl=1,total_variation=0.5."""
    on_policy: float = 0.0
    """Fraction of steps on the draft's own texts, scored by the target (GKD, Agarwal et al. 2024)."""
    on_policy_tokens: int = 128
    """The most tokens that the draft generates for a prompt in these steps."""

    def __post_init__(self) -> None:
        check_types(self, "draft")
        ways = {"--init": self.init, "--shape": self.shape, "--keep-layers": self.keep_layers}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a draft needs exactly one of {', '.join(ways)}; got {' and '.join(given) or 'none'}"
            )
        reject_unknown(self.losses, LOSSES, "loss")
        if self.on_policy and "hard" in self.losses:
            raise ConfigError("--loss hard learns from the target's text; it cannot be used with --on-policy")
        check_at_least("draft", 1, on_policy_tokens=self.on_policy_tokens)
        if not 0 <= self.on_policy <= 1:
            raise ConfigError(f"--on-policy is a fraction, 0 to 1, got {self.on_policy}")

    @property
    def losses(self) -> dict[str, float]:
        """Loss to weight."""
        if "=" not in self.loss:
            return {self.loss: 1.0}
        return parse_weights(self.loss, "--loss")


@dataclass(frozen=True)
class EagleTrainOptions:
    """The head's shape and its training."""

    init: str | None = None
    """Folder or hub id of a head of this kind and target to continue from; the shape is that head's. `embedded` is the
    embedded target's head."""
    num_steps: int = 4
    """EAGLE-3: steps of the training-time test, each of which reads the head's output of the step before."""
    step_decay: float = 0.8
    """EAGLE-3: ratio of each step's loss weight to the step's before."""
    feature_weight: float = 10.0
    """EAGLE-1: weight of the loss on features relative to that on tokens."""
    feature_layers: str | None = None
    """EAGLE-3: the three hidden states that the head reads, as in 2,16,29 (0 is the embedding, i the output of layer
    i). By default a low, a middle and a high one."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    draft_vocab_size: int | None = None
    """EAGLE-3: size of the draft vocabulary, the most frequent tokens of the data's answers. All by default."""
    freeze_lm_head: bool = False
    """EAGLE-3: keep the output layer as it begins, for a fresh head the target's own: quicker steps, and no worse heads
    of few tokens."""
    layout: str | None = None
    """eagle3 or speculators for EAGLE-3; eagle for EAGLE-1."""
    num_speculative_tokens: int = 4
    """Draft depth in evaluations, and the depth that the checkpoint recommends to other engines."""

    def __post_init__(self) -> None:
        check_types(self, EAGLE.name)
        check_at_least(
            EAGLE.name, 1, num_steps=self.num_steps, num_speculative_tokens=self.num_speculative_tokens
        )
        for name in ("intermediate_size", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_at_least(EAGLE.name, 1, **{name: getattr(self, name)})
        _check_shape_is_kept(self)
        if self.layout is not None:
            reject_unknown([self.layout], EAGLE_LAYOUTS, "layout")
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"--step-decay must be in (0, 1], got {self.step_decay}")


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """How a drafter learns to read mask tokens."""

    num_depths: int = 8
    """Draft tokens of a pass: the first reads the text alone, each further one a mask more."""
    depth_share: float = 0.7
    """Share of a depth's rows that the next one keeps."""
    least_share: float = 0.2
    """Share of the rows that every depth keeps."""
    max_anchors: int | None = None
    """The most places a row of text behind which masks are read; all by default."""
    mask_token: str | None = None
    """Text or id of the token that stands for a mask; by default the tokenizer's own mask token, or else one that the
    data do not use."""

    def check_masks(self, what: str) -> None:
        """Raise `ConfigError` for an invalid value."""
        check_at_least(what, 1, num_depths=self.num_depths)
        if self.max_anchors is not None:
            check_at_least(what, 1, max_anchors=self.max_anchors)
        for name in ("depth_share", "least_share"):
            if not 0 < getattr(self, name) <= 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be in (0, 1], got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class PardTrainOptions(MaskOptions, DistillOptions):
    """The draft model that learns to read masks, and its loss."""

    feature_layers: str | None = None
    """PARD-2: the hidden states of the target that the draft model reads too, as in -1,-8,-16,-24 (0 is the embedding,
    i the output of layer i, -1 the last one). A PARD-2 model to begin with keeps its own."""
    loss: str = ""
    """hard (cross-entropy on the text) by default, for PARD-2 hard=0.1,forward_kl=1; or forward_kl, reverse_kl,
    total_variation, or another weighted sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_masks(PARD.name)
        if self.feature_layers is not None:
            parse_layers(self.feature_layers)

    @property
    def losses(self) -> dict[str, float]:
        """Loss to weight; empty where the kind of model decides."""
        return super().losses if self.loss else {}


@dataclass(frozen=True, kw_only=True)
class PEagleTrainOptions(MaskOptions):
    """The head's shape and its training."""

    init: str | None = None
    """Folder or hub id of an EAGLE-3 or P-EAGLE head of this target to begin with; layers that it lacks begin as ones
    that change nothing. `embedded` is the embedded target's EAGLE-3 head."""
    num_layers: int | None = None
    """Layers of the head: 2 by default, or those of the head to begin with."""
    feature_layers: str | None = None
    """The three hidden states that the head reads, as in 2,16,29 (0 is the embedding, i the output of layer i). By
    default a low, a middle and a high one."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    draft_vocab_size: int | None = None
    """Size of the draft vocabulary, the most frequent tokens of the data's answers. All by default."""
    layout: str | None = None
    """speculators (the default) or eagle3."""

    def __post_init__(self) -> None:
        check_types(self, PEAGLE.name)
        self.check_masks(PEAGLE.name)
        for name in ("num_layers", "intermediate_size", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_at_least(PEAGLE.name, 1, **{name: getattr(self, name)})
        _check_shape_is_kept(self)
        if self.layout is not None:
            reject_unknown([self.layout], EAGLE_LAYOUTS[1:], "layout")


@dataclass(frozen=True)
class HeadTrainOptions:
    """The heads' number and shape, and their training."""

    init: str | None = None
    """Folder or hub id of heads of this kind and target to continue from; they determine number and shape."""
    num_heads: int = 4
    """Number of heads: draft tokens after the target's own next token."""
    num_layers: int = 1
    """Residual blocks in each head."""
    shares_lm_head: bool = False
    """Use the target's frozen output layer instead of one for each head: far fewer weights."""
    step_decay: float = 0.8
    """Ratio of each head's loss weight to the head's before."""
    joint: bool = False
    """Medusa-2: fine-tune a copy of the target with the heads. The result is another target, OUTPUT/medusa/target, with
    texts of its own."""
    joint_weight: float = 0.2
    """With --joint: weight of the heads' loss relative to the copy's own."""

    def __post_init__(self) -> None:
        check_types(self, "heads")
        if self.joint and self.shares_lm_head:
            raise ConfigError("--joint trains the output layer; it cannot be used with --shares-lm-head")
        if self.joint_weight <= 0:
            raise ConfigError(f"--joint-weight must be above 0, got {self.joint_weight}")
        check_at_least("heads", 1, num_heads=self.num_heads, num_layers=self.num_layers)
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"--step-decay must be in (0, 1], got {self.step_decay}")


def _check_shape_is_kept(options: EagleTrainOptions | PEagleTrainOptions) -> None:
    """Raise `ConfigError` where the shape of a head to begin with is given too."""
    for name in (
        ("feature_layers", "intermediate_size", "draft_vocab_size") if options.init is not None else ()
    ):
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"with --init the head keeps its shape; omit {flag}")


def parse_weights(text: str, flag: str) -> dict[str, float]:
    """`code=2,chat=1` to a mapping; raises `ConfigError` for anything else."""
    weights: dict[str, float] = {}
    for part in text.split(",") if text else []:
        name, _, weight = part.partition("=")
        try:
            weights[name.strip()] = float(weight)
        except ValueError:
            raise ConfigError(f"{flag} is NAME=WEIGHT,NAME=WEIGHT,…, got {part!r}") from None
    if not all(0 <= weight < float("inf") for weight in weights.values()) or (
        weights and not any(weights.values())
    ):
        raise ConfigError(f"{flag} needs weights of at least 0, one of them above 0, got {text!r}")
    return weights


def parse_layers(text: str) -> tuple[int, ...]:
    """`-1,-8` to the numbers of hidden states; raises `ConfigError` for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--feature-layers takes numbers separated by commas, got {text!r}") from None


def parse_numbers(text: str, flag: str) -> list[float]:
    """`0,0.8` to numbers; raises `ConfigError` for anything else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} takes numbers separated by commas, got {text!r}") from None

"""What a training run is asked for. No tensors here: the command line reads these classes for its flags."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

OPTIMIZERS = ("adamw", "muon")
DTYPES = ("float32", "bfloat16")
EAGLE_LAYOUTS = ("eagle", "eagle3", "speculators")
OVERLAPS = ("refuse", "drop_training", "drop_evaluation", "report")
LOSSES = ("forward_kl", "reverse_kl", "total_variation", "hard")


@dataclass(frozen=True)
class RegenerateOptions:
    """Which prompts are answered, and how."""

    num_prompts: int | None = None
    """The most conversations to answer; all unless given."""
    mix: str = ""
    """Weights of the tasks, as in code=2,chat=1; tasks that are not named are left out. All weigh the same unless
    given. Conversations are drawn without replacement; a task that runs short leaves its share to the others."""
    temperature: str = "0"
    """0 is greedy. Several, as in 0,0.8, take turns from conversation to conversation."""
    top_p: float = 1.0
    """Draw from the most probable tokens whose mass reaches it."""
    max_tokens: int = 256
    """The most tokens in an answer."""
    seed: int = 0
    """Of the choice and order of prompts, and of each conversation's own seed."""

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
        """As numbers; `ConfigError` where they are none."""
        return parse_numbers(self.temperature, "--temperature")


@dataclass(frozen=True)
class TrainOptions:
    """A run's budget, data, optimizer and measurements. Of two budgets the nearer to spent sets the schedule."""

    max_tokens: int | None = None
    """Budget in tokens, prompts included and padding not."""
    time_limit_minutes: float | None = None
    """Budget in minutes of training, over all runs into the same output. Evaluations and the making of a feature cache
    come on top."""
    batch_rows: int = 8
    """Rows in a forward pass of each process."""
    row_length: int = 512
    """Tokens in a row; conversations share rows, and longer ones are cut."""
    accumulation: int = 1
    """Forward passes a step."""
    optimizer: str = "adamw"
    """adamw, or muon for the matrices of the layers beside adamw for the rest."""
    learning_rate: float = 1e-3
    """AdamW's, at its highest."""
    muon_learning_rate: float = 0.01
    """Muon's, at its highest."""
    weight_decay: float = 0.0
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Longer gradients are shortened to it."""
    warmup_fraction: float = 0.02
    """Of the budget; the learning rate rises over it."""
    hold_fraction: float = 0.1
    """Of the budget; behind it the learning rate falls linearly to zero."""
    dtype: str = "float32"
    """Of matrix products, the target's too: float32 or bfloat16. Weights and losses stay float32."""
    cache_features: bool = False
    """Compute the target's hidden states once and keep them in the output folder, in float16: faster from the second
    epoch on, two bytes a token, layer and unit of width."""
    seed: int = 0
    """Of fresh weights, the order of the data and what the draft samples."""
    log_every_s: float = 15.0
    """Seconds between two lines of the log."""
    checkpoint_every_s: float = 180.0
    """Seconds between two checkpoints."""
    evaluate_every_minutes: float | None = None
    """Measure with the engine this often, beside the beginning and the end; in minutes of training."""
    evaluate_every_steps: int | None = None
    """The same, by steps."""
    patience: int = 0
    """Stop after so many evaluations without a better greedy τ; 0 goes on."""

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
        if self.row_length < 2:
            raise ConfigError(f"train row_length must be at least 2, got {self.row_length}")
        reject_unknown([self.optimizer], OPTIMIZERS, "optimizer")
        reject_unknown([self.dtype], DTYPES, "dtype")


@dataclass(frozen=True)
class EvaluationOptions:
    """The held-out prompts on which the engine measures what is trained."""

    eval_workload: str = "sample"
    """What is asked, as in `slipstream bench`: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."""
    eval_prompts_per_task: int = 4
    """The first so many prompts of each task."""
    eval_max_tokens: int = 64
    """The most tokens in an answer."""
    overlap: str = "refuse"
    """Where evaluation prompts are in the training data, word for word or nearly so: refuse, drop_training
    (conversations that hold them are left out), drop_evaluation (others of the workload are asked) or report."""

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
    """Which draft model learns, and from what."""

    init: str | None = None
    """Checkpoint folder or hub id to begin with; `embedded` is the embedded draft."""
    shape: str | None = None
    """Begin with fresh weights of so many layers and so much width, as in 2x128; the family is the target's."""
    keep_layers: str | None = None
    """Begin with these layers of the target, as in 0,3,5, and its embedding and output layer."""
    loss: str = "forward_kl"
    """forward_kl, reverse_kl, total_variation (one minus the acceptance rate of rejection sampling), hard
    (cross-entropy on the text), or a weighted sum as in forward_kl=1,total_variation=0.5."""
    on_policy: float = 0.0
    """Fraction of steps on texts that the draft writes itself, scored by the target (GKD, Agarwal et al. 2024)."""
    on_policy_tokens: int = 128
    """The most tokens that the draft writes for a prompt."""

    def __post_init__(self) -> None:
        check_types(self, "draft")
        ways = {"--init": self.init, "--shape": self.shape, "--keep-layers": self.keep_layers}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a draft begins with one of {', '.join(ways)}; got {' and '.join(given) or 'none'}"
            )
        reject_unknown(self.losses, LOSSES, "loss")
        if self.on_policy and "hard" in self.losses:
            raise ConfigError("--loss hard learns from the target's text; it cannot go with --on-policy")
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
    """What the head looks like, and how it learns."""

    init: str | None = None
    """Folder or hub id of a head of this kind for this target to go on from; its shape is then that head's.
    `embedded` is the embedded target's own."""
    num_steps: int = 4
    """EAGLE-3: steps of the training-time test, each on the head's own output of the step before."""
    step_decay: float = 0.8
    """EAGLE-3: weight of each step's loss over that of the step before."""
    feature_weight: float = 10.0
    """EAGLE-1: weight of the loss on the features beside that on the tokens."""
    feature_layers: str | None = None
    """EAGLE-3: the three hidden states that the head reads, as in 2,16,29 (0 is the embedding, i what layer i puts
    out). A low, a middle and a high one unless given."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's unless given."""
    draft_vocab_size: int | None = None
    """EAGLE-3: draft only this many tokens, those that the data's answers use most. All unless given."""
    layout: str | None = None
    """eagle3 or speculators for EAGLE-3; eagle for EAGLE-1."""
    num_speculative_tokens: int = 4
    """Depth at which drafts are measured, and the depth that the checkpoint recommends."""

    def __post_init__(self) -> None:
        check_types(self, "eagle")
        check_at_least(
            "eagle", 1, num_steps=self.num_steps, num_speculative_tokens=self.num_speculative_tokens
        )
        for name in ("intermediate_size", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_at_least("eagle", 1, **{name: getattr(self, name)})
        if self.init is not None:
            for name in ("feature_layers", "intermediate_size", "draft_vocab_size"):
                if getattr(self, name) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(f"a head that goes on from --init keeps its shape; omit {flag}")
        if self.layout is not None:
            reject_unknown([self.layout], EAGLE_LAYOUTS, "layout")
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"--step-decay must be in (0, 1], got {self.step_decay}")


@dataclass(frozen=True)
class HeadTrainOptions:
    """How many heads, of what form, and how they learn."""

    init: str | None = None
    """Folder or hub id of heads of this kind for this target to go on from; their number and form are then those."""
    num_heads: int = 4
    """Draft tokens beyond the target's own next token."""
    num_layers: int = 1
    """Residual blocks a head."""
    shares_lm_head: bool = False
    """Draft with the target's own output layer, frozen, instead of one a head: far fewer weights."""
    step_decay: float = 0.8
    """Weight of each head's loss over that of the head before."""
    joint: bool = False
    """Medusa-2: fine-tune a copy of the target with the heads. The result is another target, OUTPUT/medusa/target;
    texts are its own, not the first one's."""
    joint_weight: float = 0.2
    """With --joint: weight of the heads' loss beside the copy's own."""

    def __post_init__(self) -> None:
        check_types(self, "heads")
        if self.joint and self.shares_lm_head:
            raise ConfigError("--joint trains the output layer; it cannot go with --shares-lm-head")
        if self.joint_weight <= 0:
            raise ConfigError(f"--joint-weight must be above 0, got {self.joint_weight}")
        check_at_least("heads", 1, num_heads=self.num_heads, num_layers=self.num_layers)
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"--step-decay must be in (0, 1], got {self.step_decay}")


def parse_weights(text: str, flag: str) -> dict[str, float]:
    """`code=2,chat=1` to weights; raises `ConfigError` for anything else."""
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
        raise ConfigError(f"{flag} needs weights of at least 0, and one above it, got {text!r}")
    return weights


def parse_numbers(text: str, flag: str) -> list[float]:
    """`0,0.8` to numbers; raises `ConfigError` for anything else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} takes numbers separated by commas, got {text!r}") from None

"""Configuration: frozen dataclasses, validated on construction, strict about names."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from slipstream.assets.embedded import EMBEDDED, EMBEDDED_TARGET, in_package, step_drafter_in_package
from slipstream.draft import methods
from slipstream.errors import ConfigError
from slipstream.vllm_names import own_engine_keys, own_speculation

T = TypeVar("T")
logger = logging.getLogger(__name__)

RENAMED = {
    "lanes": "versions",
    "num_lanes": "num_versions",
    "learn_lanes": "learn_versions",
    "anchors": "older_answers",
}
"""Names of keys and flags in the release before to those of now. The old ones work with a warning for one release."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
CPU_KERNELS = ("auto", "native", "torch")


def cache_folder() -> Path:
    """`SLIPSTREAM_CACHE`, else `slipstream` in `XDG_CACHE_HOME` or `~/.cache`; it may not exist yet."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():
        return Path(shared) / "slipstream"
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "slipstream"


def reject_unknown(names: Iterable[str], valid: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for the first invalid name, with the nearest valid one; `what` is what messages call it."""
    valid = sorted(valid)
    for name in names:
        if name not in valid:
            near = difflib.get_close_matches(str(name), valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid) or 'none'}"
            raise ConfigError(f"unknown {what} {name!r}; {hint}")


@cache
def warn_renamed(what: str, old: str, new: str) -> None:
    """Say once in a process what to write instead of an old name: configurations are read more than once."""
    logger.warning("%s %r is now called %r", what, old, new)


def renamed(values: Mapping[str, Any], valid: Iterable[str], what: str) -> dict[str, Any]:
    """The values under the `valid` names of this release; for each old name a warning says what to write instead.

    Raises `ConfigError` where both names of the same thing are given.
    """
    names, result = set(valid), dict(values)
    for old in result.keys() & RENAMED.keys() - names:
        new = RENAMED[old]
        if new not in names:
            continue
        if new in result:
            raise ConfigError(f"{what} {old!r} is the old name of {new!r}, which is given too; omit {old!r}")
        warn_renamed(what, old, new)
        result[new] = result.pop(old)
    return result


def options_from(cls: type[T], mapping: Mapping[str, Any], what: str) -> T:
    """Make the dataclass `cls` from `mapping`; an unknown key raises `ConfigError` with the nearest valid name."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    mapping = renamed(mapping, [f.name for f in fields], f"{what} key")
    reject_unknown(mapping, [f.name for f in fields], f"{what} key")
    missing = [
        f.name
        for f in fields
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in mapping
    ]
    if missing:
        raise ConfigError(f"{what} needs {missing[0]!r}")
    return cls(**mapping)


def check_types(options: Any, what: str) -> None:
    """Raise `ConfigError` for the first field of the dataclass `options` whose value is not of its type."""
    for name, hint in get_type_hints(type(options)).items():
        if get_origin(hint) is ClassVar:
            continue
        value = getattr(options, name)
        allowed = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
        if get_origin(hint) not in (None, Union, UnionType):
            allowed = [get_origin(hint)]
        accepted = type(value) in allowed or (float in allowed and type(value) is int)
        is_many = (isinstance(value, Mapping) and Mapping in allowed) or (
            isinstance(value, (list, tuple)) and Sequence in allowed
        )
        if not accepted and not is_many:
            names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
            raise ConfigError(f"{what} {name} must be {names}, got {value!r}")


def check_at_least(what: str, minimum: int, **values: Any) -> None:
    """Raise `ConfigError` unless each value is a whole number of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{what} {name} must be a whole number of at least {minimum}, got {value!r}")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which drafter runs, with which options, and which verifier judges it.

    `options` are the drafter's own (its `Options` dataclass says which); keys carry vLLM's names where they mean
    the same. `method="off"` is ordinary decoding on the same path.
    """

    method: str = "off"
    verifier: str = "coupled"
    options: Mapping[str, Any] = field(default_factory=dict)
    probe_share: float | None = None
    """Share of the engine's time for probes that measure the gain of speculation: short stretches without it, and with
    `auto` exploration of drafters that are not chosen. 0 is never; None is 0.005 with `auto` and in `slipstream serve`,
    otherwise 0."""
    draft_device: str | None = None
    """Device on which the draft model runs, such as `cuda:1` or `cpu`; None is the target's. For drafters that read
    nothing of the target but its text: draft_model, self, tli, slem."""
    draft_timeout_s: float = 30.0
    """Time limit of a drafter's call, in seconds. A drafter that exceeds it is paused, after repeated failures retired;
    requests continue without drafts."""
    reasoning: Mapping[str, Any] | None = None
    """Who drafts whole steps of thinking, and how steps are separated: `{"model": PATH, "separator": "\\n\\n"}`; see
    `ReasoningConfig`. For requests that choose it, whose text it may change; needs `allow_lossy`."""

    def __post_init__(self) -> None:
        check_types(
            self, "speculative_config"
        )  # names are checked by engine.speculation, which knows the registries
        plain = {
            key: os.fspath(value) if isinstance(value, os.PathLike) else value
            for key, value in self.options.items()
        }
        object.__setattr__(self, "options", in_package(plain, self.method))
        object.__setattr__(self, "reasoning", step_drafter_in_package(self.reasoning))
        if self.probe_share is not None and not 0 <= self.probe_share <= 0.5:
            raise ConfigError(f"probe_share must be between 0 and 0.5, got {self.probe_share}")
        if not self.draft_timeout_s > 0:
            raise ConfigError(f"draft_timeout_s must be above 0, got {self.draft_timeout_s}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SpeculativeConfig:
        """Make it from one flat mapping, as users write it: `{"method": "ngram", "num_speculative_tokens": 4}`.

        Without a `method` it is inferred from the `model`, as in vLLM. Raises `ConfigError`.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f'speculative_config must be a mapping such as {{"method": "ngram"}}, got {mapping!r}'
            )
        mapping = own_speculation(mapping)
        own = {each.name for each in dataclasses.fields(cls)} - {"options"}
        options = {key: value for key, value in mapping.items() if key not in own}
        return cls(**{key: mapping[key] for key in own & set(mapping)}, options=options)

    def as_mapping(self) -> dict[str, Any]:
        """Return it as one flat mapping that `from_mapping` takes."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        own |= own.pop("options")
        return {name: value for name, value in own.items() if value is not None}

    @classmethod
    def from_text(cls, text: str) -> SpeculativeConfig:
        """Make it from JSON, or from the path of a JSON file; raises `ConfigError`."""
        source = "speculative config"
        if not text.lstrip().startswith("{"):
            path = Path(text)
            if not path.is_file():
                raise ConfigError(f"speculative config {text!r} is neither a JSON object nor a file")
            text, source = path.read_text(), f"speculative config {path}"
        try:
            mapping = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not valid JSON: {error}") from None
        if not isinstance(mapping, dict):
            raise ConfigError(f"{source} must be a JSON object")
        return cls.from_mapping(mapping)

    @classmethod
    def from_short(cls, spec: str) -> SpeculativeConfig:
        """Read the short form: `off`, `ngram`, `draft:PATH`, `self:int8`, `remote:HOST:PORT`, or any `NAME:MODEL`."""
        name, _, value = spec.partition(":")
        known = methods.spec_of(name)
        key = "model" if known is None else known.short_value
        return cls(methods.full_name(name), options={key: value} if value else {})


@dataclass(frozen=True)
class EngineConfig:
    """How the target model is loaded and how many requests may run. Sizes are in bytes, lengths in tokens."""

    model: str
    """Checkpoint folder, hub id or GGUF file; `embedded` is the small target that ships with the package."""
    tokenizer: str | None = None
    lora: str | None = None
    """Folder of a LoRA adapter for the target; None uses one in the model's own folder, if any. It is merged into plain
    weights, and kept apart from those that a file holds quantised."""
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    """On a GPU the type that the model computes in; `auto` is the checkpoint's own. On a CPU the type that weights are
    kept in, with arithmetic in float32: `auto` keeps those of a 16-bit checkpoint as they are, with the logits of
    `float32`, but for the rounding of the cache; `bfloat16` and `float16` round other weights, once. Where the native
    kernels do not run, a CPU computes in the type itself, and `auto` is float32."""
    device: str = "auto"
    """`auto` is `cuda` where there is one, else `cpu`."""
    quantization: str | None = None
    """Weight format of the linear layers, on a CPU and in `cuda_kernels`. `int8`: 8-bit integers, one scale for 32
    inputs of an output. `int4`, `int4_g64`, `int4_g128`: 4-bit codes, a scale and a zero for 32, 64 or 128, the output
    layer in int8. On a CPU activations are rounded to 8 bits too. Each changes the model, more with fewer bits and
    larger groups, not the exactness of speculation. `float32`, `bfloat16`, `float16`: as `dtype` says."""
    kv_cache_dtype: str = "auto"
    """How keys and values of the target and of drafters are held; rounded once, when they are written. Where the
    native kernels run whole passes the text is the same with and without speculation with any type; elsewhere
    PyTorch's last bits depend on what else is in a pass. A smaller type changes the model a little. `int8` has one
    scale a head and token. `auto`: the checkpoint's own type, or `dtype`, if the native kernels run whole passes,
    else the type that is computed in."""
    fast_prompts: bool = False
    """Compute the rows of a prompt but its last in bfloat16, for processors with AMX; others compute the same bits,
    slower than without. It needs weights in 16 bits, and native kernels that run whole passes. It changes the text a
    little, the same with and without speculation and in any batch."""
    exact_rows: bool = False
    """On a CPU, multiply weights of 4 or 8 bits with activations as they are, in float32, not rounded to 8
    bits. Draft models round theirs all the same."""
    cpu_kernels: str = "auto"
    """`native`: our own, of the wheel or compiled once by the machine's C++ compiler. `torch`: PyTorch's operators,
    slower. `auto`: native where they can be had."""
    attention_backend: str = "auto"
    """How models attend over their caches: `native` (whole passes in the CPU kernels), `native_layers` (layer by layer
    in them), `triton` (GPU kernels), `packed` (PyTorch), `cache_adapter` (for models that call the methods of a cache),
    or one that a package brings. `auto`: the best built-in one that can run the model."""
    executor: str = "auto"
    """What computes the passes of target and draft models: `cpu_kernels` (whole passes in the native kernels),
    `cuda_kernels` (in a GPU's), `eager` (Transformers' code), `cuda_graph` (the same, recorded on a GPU),
    `compiled_graph` (compiled too), or one that a package brings. `auto`: the best that the attention backend names.
    `cuda_kernels`, `cuda_graph` and `compiled_graph` have not run on a GPU yet."""
    num_threads: int | None = None
    """CPU threads for the arithmetic; None is PyTorch's own number, a thread a core, but no more than a control group's
    CPU quota has use for (2 of 1.5 cores), unless `OMP_NUM_THREADS` says how many."""
    max_model_len: int | None = None
    """The most tokens of prompt and answer together; None is the model's context length. With LongRoPE (Phi 3) None is
    the length for the short frequencies; a larger value uses the long frequencies for every text."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    """The most rows in one target pass: prompt chunks, pending tokens and draft tokens together."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values of target and drafter together; None uses `kv_memory_fraction`."""
    kv_memory_fraction: float = 0.3
    """Share of the memory that is free at start, as an upper bound: no more is allocated than could be used."""
    gpu_memory_utilization: float | None = None
    """As in vLLM: share of the device's whole memory (on a CPU the machine's) for weights, keys and values together.
    Replaces `kv_memory_fraction`: keys and values get what the weights leave."""
    enable_prefix_caching: bool = True
    overlap_steps: bool = True
    """On a GPU launch a step before the tokens of the one before it are read, so that the host works while the device
    does (not run on a GPU yet). The text is the same."""
    reproducible: bool = True
    """On a GPU multiply in an order that a row's neighbours do not change, so that its bits are the same in any batch.
    False has cuBLAS multiply matrices of 16 bits, in `cuda_kernels`; other executors call it in any case."""
    allow_lossy: bool = False
    """Let requests choose what may change their text: step-level speculation (`reasoning`). Others stay exact."""
    seed: int | None = None
    """Seed for drawing the requests' own seeds; None draws them from the operating system."""
    generation_config: str = "auto"
    """Default sampling parameters of requests without their own: `auto` reads the checkpoint's generation_config.json,
    `vllm` uses none, and a folder is searched for another such file."""
    override_generation_config: Mapping[str, Any] | None = None
    """Sampling parameters that override those of `generation_config`."""

    @classmethod
    def from_options(cls, model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> EngineConfig:
        """Make it from what users write: fields of it, or vLLM's keys. A `model` of None is the small target that ships
        with the package. Raises `ConfigError`."""
        return options_from(
            cls, {"model": EMBEDDED if model is None else model, **own_engine_keys(options)}, "engine"
        )

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "lora"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check_types(self, "engine")
        if self.model == EMBEDDED:
            object.__setattr__(self, "model", EMBEDDED_TARGET)
        reject_unknown([self.dtype], DTYPES, "dtype")
        reject_unknown([self.kv_cache_dtype], KV_CACHE_DTYPES, "kv_cache_dtype")
        reject_unknown([self.cpu_kernels], CPU_KERNELS, "cpu_kernels")
        if not self.model:
            raise ConfigError("model must be the path of a checkpoint folder or a hub id")
        check_at_least(
            "engine", 1, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
        )
        for name in ("num_threads", "max_model_len", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                check_at_least("engine", 1, **{name: getattr(self, name)})
        if self.seed is not None:
            check_at_least("engine", 0, seed=self.seed)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(f"kv_memory_fraction must be in (0, 1], got {self.kv_memory_fraction}")

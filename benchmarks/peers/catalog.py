"""What runs: `catalog.toml` as data, checked."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.conditions import ALONE, Condition
from slipstream.config import options_from, reject_unknown
from slipstream.errors import ConfigError

CATALOG = Path(__file__).parent / "catalog.toml"
CONTEXTS = Path(__file__).parent / "contexts.toml"
"""What runs with prompts of given lengths."""
PEERS = ("slipstream", "transformers", "vllm", "openvino", "llamacpp")
KINDS = ("off", "draft", "lookup", "suffix", "tree", "self")
PRECISIONS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "int4_g128": "int4",
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_K_M": "int4",
}
"""Weight formats, and the one that each is compared with."""
NAMES = {
    "slipstream": "Slipstream",
    "transformers": "Transformers",
    "vllm": "vLLM (CPU)",
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
}
"""As pages and pictures call them."""
OURS = "slipstream"
CACHES = ("", "float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Model:
    """A target of the benchmark and how much of it runs. The draft is the embedded one, always."""

    name: str
    title: str
    prompts_per_task: int
    max_tokens: int
    rounds: int
    batch: bool
    expand: str | None = None
    """Parameters that the embedded target is cost-expanded to (`300M`); None is the embedded target itself."""
    stored: str = "float32"
    """Type of the expanded checkpoint's weights."""
    positions: int | None = None
    """Tokens that the copy's configuration allows, where they are more than the source's."""
    contexts: tuple[int, ...] = ()
    """Lengths of prompts in tokens, from the command line; without any, prompts are those of the seven tasks."""
    conditions: tuple[Condition, ...] = (ALONE,)

    @property
    def folder(self) -> str:
        """Name of its checkpoint's folder."""
        stored = "" if self.stored == "float32" else f"-{self.stored}"
        return self.name + stored + (f"-{self.positions}" if self.positions else "")

    def as_settings(self) -> dict[str, Any]:
        """What samples depend on beside their own cell."""
        settings = dataclasses.asdict(self)
        for name in ("contexts", "conditions"):
            del settings[name]
        return settings


@dataclass(frozen=True)
class Mode:
    """One way in which one peer runs."""

    peer: str
    name: str
    kind: str
    weights: str = "float32"
    cache: str = ""
    """Type of keys and values; empty for the peer's own choice."""
    longest: int | None = None
    """Prompts of more tokens are not asked."""
    batch: bool = False
    models: list[str] | None = None
    load: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reject_unknown([self.peer], PEERS, "peer")
        reject_unknown([self.kind], KINDS, "kind")
        reject_unknown([self.weights], PRECISIONS, "weights")
        reject_unknown([self.cache], CACHES, "cache")

    @property
    def key(self) -> str:
        """What samples and the command line call it: `slipstream/draft 4/int8`, `slipstream/off/int8, int8 cache`."""
        return f"{self.peer}/{self.name}/{self.weights}" + (f", {self.cache} cache" if self.cache else "")

    @property
    def precision(self) -> str:
        """The weight format that it is compared with."""
        return PRECISIONS[self.weights]


@dataclass(frozen=True)
class Catalog:
    models: list[Model]
    modes: list[Mode]

    def modes_of(self, model: Model) -> list[Mode]:
        return [mode for mode in self.modes if mode.models is None or model.name in mode.models]


def load_catalog(path: Path = CATALOG) -> Catalog:
    """Read and check the catalogue; raises `ConfigError` with what is wrong in it."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    reject_unknown(tables, ("model", "mode"), f"table in {path.name}")
    models = [options_from(Model, table, "model") for table in tables.get("model", [])]
    modes = [options_from(Mode, table, "mode") for table in tables.get("mode", [])]
    for what, names in (("model", [m.name for m in models]), ("mode", [m.key for m in modes])):
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"{path.name} has two {what}s {sorted(twice)[0]!r}; names must differ")
    for mode in modes:
        reject_unknown(mode.models or [], [model.name for model in models], "model")
    for alike in sorted({(mode.peer, mode.weights, mode.cache) for mode in modes}):
        kinds = [mode.kind for mode in modes if (mode.peer, mode.weights, mode.cache) == alike]
        if kinds.count("off") != 1:
            peer, weights, cache = alike
            what = weights + (f", {cache} cache" if cache else "")
            raise ConfigError(f"{path.name}: {peer} needs one {what} mode of kind off, to compare with")
    return Catalog(models, modes)


def fill_in(value: Any, draft: str) -> Any:
    """`value` with `{draft}` replaced in every string of it."""
    if isinstance(value, str):
        return value.replace("{draft}", draft)
    if isinstance(value, list):
        return [fill_in(item, draft) for item in value]
    if isinstance(value, dict):
        return {key: fill_in(item, draft) for key, item in value.items()}
    return value

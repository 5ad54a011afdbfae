"""What runs: `catalog.toml` as data, checked."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import options_from, reject_unknown
from slipstream.errors import ConfigError

CATALOG = Path(__file__).parent / "catalog.toml"
PEERS = ("slipstream", "transformers", "vllm", "openvino", "llamacpp")
KINDS = ("off", "draft", "lookup", "suffix", "tree", "self")
WEIGHTS = ("float32", "int8", "int4")


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


@dataclass(frozen=True)
class Mode:
    """One way in which one peer runs."""

    peer: str
    name: str
    kind: str
    weights: str = "float32"
    batch: bool = False
    models: list[str] | None = None
    load: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reject_unknown([self.peer], PEERS, "peer")
        reject_unknown([self.kind], KINDS, "kind")
        reject_unknown([self.weights], WEIGHTS, "weights")

    @property
    def key(self) -> str:
        """What samples and the command line call it: `slipstream/draft 4/int8`."""
        return f"{self.peer}/{self.name}/{self.weights}"


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
    for peer, weights in sorted({(mode.peer, mode.weights) for mode in modes}):
        kinds = [mode.kind for mode in modes if (mode.peer, mode.weights) == (peer, weights)]
        if kinds.count("off") != 1:
            raise ConfigError(f"{path.name}: {peer} needs one {weights} mode of kind off, to compare with")
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

"""What a deployment is made of: the model, its replicas, the router, the HTTP front."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from slipstream.assets import EMBEDDED, EMBEDDED_NAME
from slipstream.config import check_at_least, reject_unknown
from slipstream.core.pretrained import path_of
from slipstream.deploy.config import ROUTER_FIELDS, RouterConfig
from slipstream.errors import ConfigError

_DELAYS = ("upscale_delay_s", "downscale_delay_s")


@dataclass(frozen=True, kw_only=True)
class DeploySettings:
    """One application. Mappings hold the same keys as `EngineConfig`, `SpeculativeConfig`, `ServeConfig` and
    `RouterConfig`."""

    model: str
    """A path that all machines have, a hub id, or `embedded`."""
    speculative_config: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    num_replicas: int = 2
    """Where `max_replicas` is given, how many there are at first."""
    min_replicas: int | None = None
    max_replicas: int | None = None
    """Given, replicas come and go with the load."""
    target_load: float = 0.7
    """Share of the replicas' capacity, waiting requests included, that autoscaling aims at."""
    max_cache_usage: float = 0.9
    """Mean share of the caches that running answers hold, beyond which there is one replica more."""
    min_tokens_per_s: float = 0.0
    """Tokens a second of one answer, below which there is one replica more. 0 does not look at it."""
    upscale_delay_s: float = 30.0
    """How long more replicas must be wanted before they are started."""
    downscale_delay_s: float = 600.0
    """How long fewer must be wanted before some are stopped."""
    num_fronts: int = 1
    """Processes that speak HTTP. Each has a queue and an idempotency table of its own. An update renews them one after
    another: with one, what comes meanwhile waits for its successor."""
    num_cpus: float = 1.0
    """Cores that Ray reserves for a replica; the engine's `num_threads` is set to it unless it is given."""
    num_gpus: float = 0.0
    drain_s: float = 60.0
    """How long a replica that is stopped waits for others to take its requests."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"deploy model must be a path or a hub id, got {self.model!r}")
        check_at_least("deploy", 1, num_replicas=self.num_replicas)
        check_at_least("deploy", 1, num_fronts=self.num_fronts)
        if self.max_replicas is not None:
            least = 1 if self.min_replicas is None else self.min_replicas
            check_at_least("deploy", 1, min_replicas=least)
            if not least <= self.num_replicas <= self.max_replicas:
                raise ConfigError(
                    f"deploy needs min_replicas <= num_replicas <= max_replicas, got {least}, "
                    f"{self.num_replicas} and {self.max_replicas}"
                )
        elif self.min_replicas is not None:
            raise ConfigError("deploy min_replicas needs max_replicas; give both, or num_replicas alone")
        for name in ("num_cpus", "target_load", "max_cache_usage", "drain_s", *_DELAYS):
            if not getattr(self, name) > 0:
                raise ConfigError(f"deploy {name} must be above 0, got {getattr(self, name)}")
        self.router_config()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> DeploySettings:
        """Make it from decoded YAML or JSON; raises `ConfigError` for unknown keys and bad values, in one line."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"deploy settings must be an object of names and values, got {mapping!r}")
        reject_unknown(mapping, [each.name for each in fields(cls)], "deploy setting")
        if "model" not in mapping:
            raise ConfigError("deploy settings need a model: a path or a hub id")
        return cls(**mapping)

    def router_config(self) -> RouterConfig:
        """The router's part."""
        reject_unknown(self.router, ROUTER_FIELDS, "router setting")
        return RouterConfig(**self.router)

    @property
    def target(self) -> str | None:
        """The model as `AsyncEngine` takes it; one that is known by name is fetched here."""
        return None if self.model == EMBEDDED else path_of(self.model)

    @property
    def served_name(self) -> str:
        """The model's name for clients, as `slipstream serve` would have it."""
        given = self.serve.get("served_model_name")
        return str(given) if given else EMBEDDED_NAME if self.model == EMBEDDED else self.model

    @property
    def engine_options(self) -> dict[str, Any]:
        """`engine`, with a thread for each core that is reserved."""
        return {"num_threads": max(int(self.num_cpus), 1), **self.engine}

    @property
    def generation(self) -> str:
        """Return a digest of what replicas load: those of another generation may have other bounds and defaults."""
        loaded = [self.model, dict(self.speculative_config or {}), self.engine_options]
        words = json.dumps(loaded, sort_keys=True, default=str)
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The settings that are not the defaults, as `from_mapping` takes them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return {
            each.name: plain[each.name]
            for each in fields(self)
            if plain[each.name] not in (_default(each), {})
        }

    def as_serve_yaml(self, name: str, host: str, port: int) -> str:
        """The application as a config file of Ray Serve, for `serve deploy` and KubeRay."""
        import yaml

        application = {"name": name, "import_path": "slipstream.deploy.app:build", "route_prefix": "/"}
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": host, "port": port},
            "applications": [{**application, "args": self.as_json()}],
        }
        text: str = yaml.safe_dump(config, sort_keys=False)
        return text


def _default(each: Field[Any]) -> Any:
    return None if each.default is MISSING else each.default

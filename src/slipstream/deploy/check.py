"""Whether what a deployment names can be loaded, as far as configurations tell: before a running one is touched."""

from __future__ import annotations

from slipstream.config import EngineConfig, SpeculativeConfig, options_from
from slipstream.deploy.settings import DeploySettings
from slipstream.draft.methods import DRAFT_MODEL, OFF
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models import load_tokenizer
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import outline_model
from slipstream.serve.config import ServeConfig


def check_server(settings: DeploySettings) -> None:
    """Check the server's own settings, without reading anything; raises `ConfigError`."""
    server = options_from(ServeConfig, settings.serve, "serve")
    if server.learn is not None:
        raise ConfigError(
            "serve learn is not supported with replicas, whose drafters do not learn together; "
            "leave it out, or serve the model by one engine: slipstream serve --learn DIR"
        )


def check_settings(settings: DeploySettings) -> None:
    """Read the configurations of model, tokenizer and draft, and check all options; no weights are read.

    Raises what loading would raise: `ConfigError`, `ModelError`.
    """
    check_server(settings)
    config = EngineConfig.from_options(settings.target, settings.engine_options)
    speculative = SpeculativeConfig.from_mapping(settings.speculative_config or {"method": OFF.name})
    ParsedSpeculation.of(speculative, config.allow_lossy)
    outline_model(config.model, LoadOptions.of(config, fast_prompts=False))
    load_tokenizer(
        config.tokenizer or config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    draft = speculative.options.get("model")
    if isinstance(draft, str) and speculative.method == DRAFT_MODEL.name:
        outline_model(draft, LoadOptions(trust_remote_code=config.trust_remote_code))


def refusal(settings: DeploySettings) -> str:
    """What `check_settings` raises, in words; empty where it raises nothing. For another machine of a cluster."""
    try:
        check_settings(settings)
    except SlipstreamError as error:
        return str(error)
    return ""

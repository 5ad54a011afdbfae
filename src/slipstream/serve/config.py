"""What the server is told: where it listens, whom it serves, and how much at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.errors import ConfigError
from slipstream.serve.tools.formats import FORMAT_NAMES

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("json", "text")
METRICS_ALIASES = ("vllm",)
MIN_HEAD_BYTES = 1024
"""Below it browsers and clients with long keys are refused."""
MAX_STREAM_INTERVAL_S = 10.0
"""Beyond it a stream is none."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How the server behaves. Sizes are in bytes, lengths in tokens, times in seconds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of the machine."""
    port: int = 8000
    """0 takes a free one, which the log names."""
    served_model_name: str | None = None
    """The model's name for clients; MODEL as it was given unless set."""
    api_key: Seq[str] = field(default=(), repr=False)
    """A key that clients must send as `Authorization: Bearer KEY`; guards all but /health, /ready, /metrics,
    /version, /openapi.json and the dashboard's empty page. Without one everybody is served."""
    cors_origins: Seq[str] = ()
    """A web page's origin, as in https://example.org, whose scripts may call; * is any. None unless given."""
    max_body_bytes: int = 4 * 2**20
    """The largest request body."""
    body_timeout_s: float = 30.0
    """From a request's head to the end of its body."""
    max_head_bytes: int = 64 * 2**10
    """The largest head of a request: its first line and its headers."""
    head_timeout_s: float = 10.0
    """From a connection's opening to the first byte on it, and from a request's first byte to the end of its head."""
    idle_timeout_s: float = 75.0
    """How long a connection stays open between two requests: longer than clients and proxies keep theirs (mostly 60 s
    at most), so that they close first. A server that does so loses the request that is just then on its way."""
    max_connections: int | None = None
    """Connections at once; as many as the limit on open files allows unless set. Beyond it the one that was idle for
    longest is closed."""
    max_prompt_tokens: int | None = None
    """The longest prompt; the model's context is a limit anyway."""
    max_output_tokens: int | None = None
    """The most tokens an answer may be asked for, and its length where a chat asks for none."""
    max_waiting: int = 256
    """Answers that may wait for their turn; a request that would make it more is refused with 429."""
    max_logprobs: int = 20
    """The most alternatives a token that a request may ask for."""
    max_stored_responses: int = 256
    """Responses of /v1/responses that are kept in memory for each API key (without keys each user), to be continued
    and read again. 0 keeps none."""
    stored_responses_bytes: int = 64 * 2**20
    """The memory for them all; over it the key or user that holds the most loses the oldest."""
    strict_parameters: bool = False
    """Refuse names in a body that nobody knows, instead of ignoring them and naming them in the response's header
    X-Slipstream-Ignored."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools: hermes, llama3_json, mistral, mistral_tekken or mistral_args. Unless set it
    goes by the chat template, and is hermes where that shows none."""
    request_timeout_s: float = 600.0
    """From the end of a request's body to the end of its answer."""
    grace_period_s: float = 30.0
    """After SIGTERM, for answers under way to end; then they are broken off with an error."""
    stream_interval_s: float = 0.02
    """A stream gets what came within it as one event; its first and last tokens come at once. 0 is an event a step."""
    per_request_metrics: bool = False
    """Put a request's own acceptance and times into its response, as `metrics`."""
    metrics_alias: str | None = None
    """`vllm`: show the metrics that vLLM has too under its names as well."""
    task_labels: Seq[str] = ()
    """A task that gets metrics of its own; those that are not named share the label `other`. Unless given, the first
    tasks that clients name get them, but with an api_key none, since /metrics needs no key."""
    max_task_labels: int = 32
    """Tasks that get metrics of their own where none are named."""
    dashboard_texts: bool = False
    """Show the last answers' texts on the dashboard, to everybody who may read it. Off, it keeps no text."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "json"
    """json, one object a line, or text."""
    log_prompts: bool = False
    """Write what was asked into the log. Off, no text of a request or answer is ever logged."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry traces there, as in http://localhost:4318/v1/traces; needs slipstream-llm[otel]. The standard
    OTEL_* variables work as well."""

    def __post_init__(self) -> None:
        check_types(self, "serve")
        positive = ("max_body_bytes", "max_connections", "max_prompt_tokens", "max_output_tokens")
        for name in (*positive, "stored_responses_bytes"):
            if getattr(self, name) is not None:
                check_at_least("serve", 1, **{name: getattr(self, name)})
        for name in ("max_waiting", "max_logprobs", "max_stored_responses", "max_task_labels"):
            check_at_least("serve", 0, **{name: getattr(self, name)})
        check_at_least("serve", MIN_HEAD_BYTES, max_head_bytes=self.max_head_bytes)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"serve port must be 0 to 65535, got {self.port}")
        for name in ("body_timeout_s", "head_timeout_s", "idle_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"serve {name} must be above 0, got {getattr(self, name)}")
        if not self.grace_period_s >= 0:
            raise ConfigError(f"serve grace_period_s must be at least 0, got {self.grace_period_s}")
        if not 0 <= self.stream_interval_s <= MAX_STREAM_INTERVAL_S:
            most = f"{MAX_STREAM_INTERVAL_S:g} s"
            raise ConfigError(f"serve stream_interval_s must be 0 to {most}, got {self.stream_interval_s}")
        reject_unknown([self.log_level], LOG_LEVELS, "log_level")
        reject_unknown([self.log_format], LOG_FORMATS, "log_format")
        if self.tool_call_parser is not None:
            reject_unknown([self.tool_call_parser], FORMAT_NAMES, "tool_call_parser")
        if self.metrics_alias is not None:
            reject_unknown([self.metrics_alias], METRICS_ALIASES, "metrics_alias")
        for name in ("api_key", "cors_origins", "task_labels"):
            values = getattr(self, name)
            if not all(isinstance(value, str) and value.strip() == value != "" for value in values):
                raise ConfigError(
                    f"each serve {name} must be a text that is not empty, without spaces around it"
                )
            object.__setattr__(self, name, tuple(values))


SERVE_FIELDS = tuple(field.name for field in fields(ServeConfig))

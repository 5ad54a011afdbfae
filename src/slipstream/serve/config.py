"""The server's configuration: addresses, keys, limits, logs."""

from __future__ import annotations

import re
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.errors import ConfigError
from slipstream.learn.background.pace import BESIDE_SHARE
from slipstream.learn.learners.registry import LEARNERS
from slipstream.learn.versions.scope import LearnBy
from slipstream.serve.tools.formats import FORMAT_NAMES

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")
METRICS_ALIASES = ("vllm",)
MIN_HEAD_BYTES = 1024
"""With less, browsers and clients with long keys would be refused."""
MAX_STREAM_INTERVAL_S = 10.0
"""With more, a stream would not be one."""


_LEAST = {
    **dict.fromkeys(("max_body_bytes", "max_connections", "max_prompt_tokens", "max_output_tokens"), 1),
    **dict.fromkeys(("stored_responses_bytes", "learn_bytes", "learn_versions"), 1),
    **dict.fromkeys(("max_waiting", "max_logprobs", "max_stored_responses", "max_task_labels"), 0),
    "engine_restarts": 0,
    "max_head_bytes": MIN_HEAD_BYTES,
}
"""The least value of each whole number; None is allowed where the field allows it."""
_CHOICES: dict[str, Collection[str]] = {
    "learn_by": tuple(LearnBy),
    "learner": LEARNERS,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
    "tool_call_parser": FORMAT_NAMES,
    "metrics_alias": METRICS_ALIASES,
}
_LISTS = (
    *("api_key", "cors_origins", "task_labels"),
    *("learn_tenant", "learn_key", "no_learn_tenant", "no_learn_key"),
)
"""Fields that are lists of texts."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How the server behaves. Sizes are in bytes, lengths in tokens, times in seconds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of the machine."""
    port: int = 8000
    """0 takes a free port, which the log names."""
    served_model_name: str | None = None
    """The model's name for clients. By default that of MODEL's file or folder, as SmolLM2-135M-Instruct.Q4_1 for
    /models/SmolLM2-135M-Instruct.Q4_1.gguf; requests that name MODEL as it was given are then served too."""
    api_key: Seq[str] = field(default=(), repr=False)
    """A key that clients must send as `Authorization: Bearer KEY`; needed for all paths but /health, /ready,
    /metrics, /version, /openapi.json and the dashboard's empty page. Without keys every client is served."""
    cors_origins: Seq[str] = ()
    """A web page's origin whose scripts may send requests, as in https://example.org; * is any. None unless given."""
    max_body_bytes: int = 4 * 2**20
    """The largest request body."""
    body_timeout_s: float = 30.0
    """From a request's head to the end of its body."""
    max_head_bytes: int = 64 * 2**10
    """The largest head of a request: its first line and its headers."""
    head_timeout_s: float = 10.0
    """From a connection's opening to the first byte on it, and from a request's first byte to the end of its head."""
    idle_timeout_s: float = 75.0
    """How long a connection stays open between two requests: longer than clients and proxies keep theirs (mostly 60
    s at most), so that they close first. Where the server closes first, a request that is on its way is lost."""
    max_connections: int | None = None
    """Most open connections; by default as many as the limit on open files allows. Beyond it the connection that
    was idle for longest is closed."""
    max_prompt_tokens: int | None = None
    """The longest prompt; by default the model's context is the limit."""
    max_output_tokens: int | None = None
    """The most tokens of an answer, and the default length of a chat's answer."""
    max_waiting: int = 256
    """Most answers that wait, of each API key; a request with more is refused with 429."""
    max_logprobs: int = 20
    """The most alternatives for each token that a request may want."""
    max_stored_responses: int = 256
    """Responses of /v1/responses that are stored in memory for each API key (without keys each user), to be
    continued and read again. 0 stores none."""
    stored_responses_bytes: int = 64 * 2**20
    """The memory for all stored responses; beyond it the oldest of the key or user that holds the most are removed."""
    strict_parameters: bool = False
    """Refuse unknown names in a body, instead of ignoring them and naming them in the response's header
    X-Slipstream-Ignored."""
    tool_call_parser: str | None = None
    """The format of the model's tool calls: hermes, llama3_json, mistral, mistral_tekken or mistral_args. By
    default it is found from the chat template, and is hermes where that shows none."""
    request_timeout_s: float = 600.0
    """From the end of a request's body to the end of its answer."""
    grace_period_s: float = 30.0
    """After SIGTERM, time for answers under way to end; then they are aborted with an error."""
    stream_interval_s: float = 0.02
    """Tokens of a stream that come within this time are sent as one event; its first and last tokens are sent at
    once. 0 sends an event a step."""
    one_process: bool = False
    """Run the engine in the server's own process, where they share one interpreter: for debuggers and profilers, and
    to save memory. Off, it has a process of its own, which is started again where it dies."""
    engine_restarts: int = 3
    """How often within ten minutes the engine's process is started again where it died; answers under way go on behind
    the tokens that they have. 0 ends them with an error."""
    per_request_metrics: bool = False
    """Add a request's own acceptance and times to its response, as `metrics`."""
    metrics_alias: str | None = None
    """`vllm` also shows the metrics that vLLM has under vLLM's names."""
    task_labels: Seq[str] = ()
    """A task with metrics of its own; other tasks share the label `other`. Unless given, the first tasks that
    clients name have them; with an api_key none has, since /metrics needs no key."""
    max_task_labels: int = 32
    """Tasks with metrics of their own where no task_labels are given."""
    learn: str | None = None
    """Folder in which the drafter goes on learning from what is served: answers are kept there,
    versions of the draft are trained while the server runs, tried on a share of the requests and served where they are
    faster. The text does not change."""
    learn_by: str | None = None
    """everyone: versions learn from all answers and draft for all requests, so one client's timing tells what others'
    answers were like. tenant, task: each account, or each task, has versions that learn from its own answers and draft
    for its own requests alone. None is tenant where there is an api_key, everyone where there is none."""
    learner: str | None = None
    """What learns: whole (all weights of a draft model), low_rank (adapters of it), eagle (an EAGLE-3 head) or
    corrective (a light layer on the logits of any drafter with weights). None is whole for draft models of up to
    20 million parameters, low_rank for larger ones, eagle for EAGLE-3 heads, corrective for the others."""
    learn_versions: int = 3
    """Versions that are loaded at a time in addition to the draft itself, each with keys and values of its own."""
    learn_share: float = BESIDE_SHARE
    """Share of the time that requests run in which the learner runs too, 0 to 1, where the engine leaves it no core:
    more learns sooner and serves slower. While nothing runs it always does, with many requests never."""
    learn_bytes: int = 256 * 2**20
    """The most that is kept of served answers; the oldest are deleted."""
    learn_max_age: str | None = None
    """How old kept answers may become, in hours or days: 36h, 30d. Older ones are deleted, at most an hour late; None
    keeps them until there are too many bytes."""
    learn_tenant: Seq[str] = ()
    """A tenant (the `user` field of requests) that is learned from. With any learn_tenant or learn_key, nothing is kept
    of anybody else."""
    learn_key: Seq[str] = field(default=(), repr=False)
    """An API key whose requests are learned from, and no other key's; see learn_tenant."""
    no_learn_tenant: Seq[str] = ()
    """A tenant (the `user` field of requests) of which nothing is kept for learning."""
    no_learn_key: Seq[str] = field(default=(), repr=False)
    """An API key of whose requests nothing is kept for learning."""
    dashboard_texts: bool = False
    """Show the texts of the last answers on the dashboard, to everybody who may read it. Off, it stores no text."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "auto"
    """json, one object a line, or text; auto is text where the log goes to a terminal, and json elsewhere."""
    log_prompts: bool = False
    """Write prompts into the log. Off, no text of a request or answer is ever logged."""
    otlp_traces_endpoint: str | None = None
    """Endpoint for OpenTelemetry traces, as in http://localhost:4318/v1/traces; needs slipstream-llm[otel]. The
    standard OTEL_* variables work as well."""

    @property
    def learns_by(self) -> LearnBy:
        """Return whose versions are learned. API keys are tenants, of which none sees by timing what another does."""
        if self.learn_by is not None:
            return LearnBy(self.learn_by)
        return LearnBy.TENANT if self.api_key else LearnBy.EVERYONE

    def __post_init__(self) -> None:
        check_types(self, "serve")
        self._check_ranges()
        for name, known in _CHOICES.items():
            if getattr(self, name) is not None:
                reject_unknown([getattr(self, name)], known, name)
        for name in _LISTS:
            values = getattr(self, name)
            if not all(isinstance(value, str) and value.strip() == value != "" for value in values):
                raise ConfigError(
                    f"each serve {name} must be a text that is not empty, without spaces around it"
                )
            object.__setattr__(self, name, tuple(values))
        for name in ("learn_key", "no_learn_key"):
            if set(getattr(self, name)) - set(self.api_key):
                raise ConfigError(f"serve {name} has a key that is no api_key; give it as api_key too")
        for kind in ("tenant", "key"):
            if set(getattr(self, f"learn_{kind}")) & set(getattr(self, f"no_learn_{kind}")):
                raise ConfigError(
                    f"serve learn_{kind} and no_learn_{kind} name the same {kind}; give one of them"
                )
        if self.learn_max_age is not None:
            seconds_of_age(self.learn_max_age)

    def _check_ranges(self) -> None:
        """Raise `ConfigError` for a number that is out of its range."""
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                check_at_least("serve", least, **{name: getattr(self, name)})
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"serve port must be 0 to 65535, got {self.port}")
        if not 0 <= self.learn_share <= 1:
            raise ConfigError(f"serve learn_share must be 0 to 1, got {self.learn_share}")
        for name in ("body_timeout_s", "head_timeout_s", "idle_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"serve {name} must be above 0, got {getattr(self, name)}")
        if not self.grace_period_s >= 0:
            raise ConfigError(f"serve grace_period_s must be at least 0, got {self.grace_period_s}")
        if not 0 <= self.stream_interval_s <= MAX_STREAM_INTERVAL_S:
            most = f"{MAX_STREAM_INTERVAL_S:g} s"
            raise ConfigError(f"serve stream_interval_s must be 0 to {most}, got {self.stream_interval_s}")


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(h|hours?|d|days?)")


def seconds_of_age(age: str) -> float:
    """The seconds of an age such as `36h` or `30 days`; raises `ConfigError` for anything else."""
    found = _AGE.fullmatch(age.strip().lower())
    hours = float(found[1]) * (24 if found[2].startswith("d") else 1) if found else 0.0
    if hours <= 0:
        raise ConfigError(f"learn_max_age must be hours or days above 0, as in 36h or 30d, got {age!r}")
    return hours * 3600

"""Learning as the server sees it: begun with the engine, watched, shown, ended before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.control.monitor.alarms import LEARN_KINDS, AlarmKind, Alarms
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.server_status import CaptureStatus, ServerLearnStatus
from slipstream.learn.session import LearnSession, SessionSettings, begin_learning
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.retention import RetentionThread
from slipstream.serve.auth import digest
from slipstream.serve.config import ServeConfig, seconds_of_age
from slipstream.serve.process.remote import RemoteEngine

BASE_LABEL = "floor"
"""The base drafter in metrics and in the dashboard's JSON: what reads them since earlier releases asks for this."""


def privacy_rules(config: ServeConfig) -> PrivacyRules:
    """Return whose answers are not kept. With API keys a tenant is that user of every key, but no user is learned from
    through a key that is left out."""
    open_keys = [key for key in config.api_key if key not in config.no_learn_key]
    return PrivacyRules.of(
        allowed=[*_everywhere(config.learn_tenant, open_keys), *map(digest, config.learn_key)],
        denied=[*_everywhere(config.no_learn_tenant, config.api_key), *map(digest, config.no_learn_key)],
        by_default=not (config.learn_tenant or config.learn_key),
    )


def _everywhere(users: Seq[str], keys: Seq[str]) -> list[str]:
    return [*users, *(f"{digest(key)}/{user}" for key in keys for user in users)]


def session_settings(config: ServeConfig) -> SessionSettings | None:
    """How the drafter of a server learns; None where it does not."""
    if config.learn is None:
        return None
    return SessionSettings(
        Path(config.learn).resolve(),
        config.learn_bytes,
        privacy_rules(config),
        by=config.learns_by,
        learner=config.learner,
        max_age_s=None if config.learn_max_age is None else seconds_of_age(config.learn_max_age),
        beside_share=config.learn_share,
    )


def retention_thread(config: ServeConfig) -> RetentionThread | None:
    """What deletes old answers for a server whose drafter cannot learn; None where nothing is to be deleted."""
    settings = session_settings(config)
    if settings is None or settings.max_age_s is None:
        return None
    return RetentionThread(LearnFolder(settings.folder), settings.max_age_s)


class Learning(Collector):
    """The session of a server with `--learn`, or why there is none: then the server serves all the same."""

    def __init__(self, engine: object, config: ServeConfig) -> None:
        """Around the engine of an `AsyncEngine`, or for one that learns in another process and tells its
        `learn_status`.

        Raises `ConfigError` for any other.
        """
        self._session: LearnSession | RetentionThread | None = None
        self._shown: dict[AlarmKind, str] = {}
        self._status: Callable[[], ServerLearnStatus]
        settings = session_settings(config)
        assert settings is not None
        if isinstance(engine, AsyncEngine):
            self._session, self._status = begin_learning(engine, settings)
        elif isinstance(engine, RemoteEngine):
            self._status = engine.learn_status
        else:
            raise ConfigError("serve learn needs an engine of slipstream serve")

    def close(self) -> None:
        """End the learner; what was captured is kept."""
        if self._session is not None:
            self._session.close()

    @property
    def status(self) -> ServerLearnStatus:
        """What happened so far."""
        return self._status()

    @property
    def _captured(self) -> CaptureStatus:
        """What was kept of answers; nothing where none are kept."""
        return self.status.capture or CaptureStatus()

    def raise_alarms(self, alarms: Alarms) -> None:
        """Raise and clear what changed since the last call, so that an alarm that was acknowledged stays so."""
        faults = self.status.faults
        for kind in LEARN_KINDS:
            message = faults.get(kind, "")
            if message != self._shown.get(kind, ""):
                self._shown[kind] = message
                alarms.update(kind, None, None, message or None, 1.0, "learning goes on")

    def as_json(self) -> dict[str, Any]:
        """For the dashboard. Nothing of it is a text or a tenant's name."""
        status, captured = self.status, self._captured
        return {
            "serving": status.serving or BASE_LABEL,
            "canary": status.canary,
            "frozen": status.frozen,
            "own_scopes": status.own_scopes,
            "own_lanes": status.own_scopes,  # the name before, for one more release
            "versions": [
                {"version": version or BASE_LABEL, "num_requests": num, "tokens_a_pass": total / num}
                for version, (num, total) in status.by_version.items()
            ],
            "num_refused": status.num_refused,
            "num_promoted": status.num_promoted,
            "num_rolled_back": status.num_rolled_back,
            "num_records": captured.num_records,
            "learner_cpu_s": status.learner_cpu_s,
            "learner_rested_s": status.learner_rested_s,
            "rests": status.rests,
            "capture_s": captured.capture_s,
            "reduce_s": captured.reduce_s,
            "num_skipped": dict(captured.num_skipped),
            "events": [
                {key: event.get(key) for key in ("time_s", "event", "version", "why")}
                for event in status.events
            ],
            "faults": list(status.faults.values()),
        }

    def collect(self) -> Iterator[Metric]:
        """The metrics; names have no prefix."""
        status, captured = self.status, self._captured
        drafted = {version or BASE_LABEL: sums for version, sums in status.by_version.items()}
        requests = {version: num for version, (num, _) in drafted.items()}
        tokens = {version: total for version, (_, total) in drafted.items()}
        outcomes = {
            "refused": status.num_refused,
            "promoted": status.num_promoted,
            "rolled_back": status.num_rolled_back,
        }
        yield _counted(
            "requests", "Answers that ended well, by the version that drafted.", "version", requests
        )
        yield _counted("tokens_a_pass_sum", "Sum of these answers' tokens a target pass.", "version", tokens)
        serving = GaugeMetricFamily("learn_serving", "1 for the version that serves.", labels=["version"])
        serving.add_metric([status.serving or BASE_LABEL], 1)
        yield serving
        yield _counted("versions", "Versions by what became of them.", "outcome", outcomes)
        yield CounterMetricFamily("learn_records", "Answers that were kept.", captured.num_records)
        yield CounterMetricFamily(
            "learn_capture_seconds", "Time that keeping answers took the engine.", captured.capture_s
        )
        yield CounterMetricFamily(
            "learn_capture_thread_seconds",
            "Processor time of the thread that writes answers down.",
            captured.reduce_s,
        )
        skipped = captured.num_skipped
        yield _counted("answers_skipped", "Answers that were not kept, by reason.", "reason", skipped)
        yield GaugeMetricFamily(
            "learn_process_cpu_seconds", "Processor time of the learner's process.", status.learner_cpu_s
        )
        yield GaugeMetricFamily("learn_rests", "1 while the learner rests for requests.", float(status.rests))
        yield CounterMetricFamily(
            "learn_process_deaths", "How often the learner's process died.", status.learner_deaths
        )


def _counted(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """The counter `learn_` and `name`, with a sample for each value of its label."""
    family = CounterMetricFamily(f"learn_{name}", about, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family

"""What a deployment is made of, how many replicas it wants, where they find each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slipstream.deploy import autoscaling
from slipstream.deploy.autoscaling import ScalingPolicy, stats_of, wanted
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.directory import TTL_S, Directory
from slipstream.deploy.fleet import ReplicaReport
from slipstream.deploy.settings import DeploySettings
from slipstream.errors import ConfigError

RULES = {autoscaling.TARGET: 0.5, autoscaling.MOST_CACHE: 0.9, autoscaling.LEAST_RATE: 10.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "need a model"),
        ({"model": "m", "replicas": 2}, "unknown deploy setting 'replicas'; did you mean 'num_replicas'"),
        ({"model": "m", "num_replicas": 0}, "num_replicas must be a whole number of at least 1"),
        ({"model": "m", "min_replicas": 1}, "needs max_replicas"),
        ({"model": "m", "num_replicas": 5, "max_replicas": 3}, "min_replicas <= num_replicas"),
        ({"model": "m", "router": {"max_wait": 3}}, "unknown router setting 'max_wait'"),
        ({"model": "m", "router": {"unlike_replicas": "cross"}}, "unlike_replicas"),
        ({"model": "m", "router": {"hang_timeout_s": 0}}, "hang_timeout_s must be above 0"),
        ({"model": "m", "num_cpus": 0}, "num_cpus must be above 0"),
    ],
)
def test_bad_settings_are_a_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        DeploySettings.from_mapping(values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_file_of_serve_holds_the_settings() -> None:
    settings = DeploySettings(model="m", num_replicas=3, engine={"num_threads": 2}, router={"max_waiting": 9})
    [application] = yaml.safe_load(settings.as_serve_yaml("mine", "0.0.0.0", 80))["applications"]
    assert application["import_path"] == "slipstream.deploy.app:build"
    assert DeploySettings.from_mapping(application["args"]) == settings
    assert settings.router_config() == RouterConfig(max_waiting=9)


def stats(*reports: ReplicaReport, queue: float = 0.0) -> dict[str, dict[str, float]]:
    each = {str(n): stats_of(report, 8, queue / len(reports)) for n, report in enumerate(reports)}
    return {name: {replica: values[name] for replica, values in each.items()} for name in each["0"]}


def test_replicas_are_wanted_for_the_load_the_queue_full_caches_and_slow_answers() -> None:
    busy = ReplicaReport(num_running=4, tokens_per_s=100.0)
    assert wanted(2, stats(busy, busy), RULES) == 2
    assert wanted(2, stats(busy, busy, queue=8), RULES) == 4
    assert wanted(4, stats(*[ReplicaReport()] * 4), RULES) == 0, "Ray holds it to min_replicas"
    full = ReplicaReport(num_running=1, cache_usage=0.95, tokens_per_s=100.0)
    assert wanted(2, stats(full, full), RULES) == 3
    slow = ReplicaReport(num_running=4, tokens_per_s=20.0)
    assert wanted(2, stats(slow, slow), RULES) == 3
    assert wanted(2, {}, RULES) == 2, "nobody has reported"

    loaded = stats(busy, busy, queue=8)
    context = SimpleNamespace(aggregated_metrics=loaded, target_num_replicas=2, policy_state={"kept": 1})
    assert ScalingPolicy(**RULES)(context) == (4, {"kept": 1})


def test_the_directory_forgets_who_does_not_renew() -> None:
    now = [0.0]
    directory = Directory(lambda: now[0])
    directory.register("a", "h", 1)
    directory.register("b", "h", 2)
    now[0] = TTL_S
    directory.register("a", "h", 1)
    now[0] = TTL_S + 1
    assert directory.addresses() == [("h", 1)]
    directory.drop("a")
    assert directory.addresses() == []
    assert directory.secret() == directory.secret() != Directory().secret()

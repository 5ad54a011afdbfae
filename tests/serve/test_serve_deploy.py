"""What is in `deploy/` and the Dockerfile fits the code: metrics that exist, commands that parse, files that are there.

No image is built here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serve_cases import MESSAGES, MakeApp
from starlette.testclient import TestClient
from typer.main import get_command

from slipstream.cli.main import app
from slipstream.serve.config import ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVE = ROOT / "src/slipstream/serve"
DASHBOARD = json.loads((DEPLOY / "grafana/slipstream.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
ALERT_TESTS = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

SET_BY_PROMETHEUS = {"up"}
ADDED_BY_PROMETHEUS = {"instance", "job", "le"}
OF_THE_CONTROL = {
    f"slipstream_{name}"
    for name in (
        *("speculation_active", "probe_share", "estimated_speedup", "realised_speedup"),
        *("realised_speedup_low", "realised_speedup_high", "task_draft_depth", "task_estimated_speedup"),
        *("task_realised_speedup", "drafter_survival", "drafter_retired", "alarm", "alarm_raises_total"),
    )
}
"""Gauges of the control are absent while it has not found out; they must then be named in its source."""


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


EXPRESSIONS = [
    *((f"panel: {panel['title']}", t["expr"]) for panel in panels() for t in panel["targets"]),
    *((f"annotation: {a['name']}", a["expr"]) for a in DASHBOARD["annotations"]["list"]),
    *((f"alert: {rule['alert']}", rule["expr"]) for rule in rules()),
]


def selectors(expression: str) -> list[Any]:
    """The vector selectors of an expression; raises ValueError when it is not PromQL."""
    plain = expression.replace("$__rate_interval", "5m").replace("$model", "m").replace("$instance", ".*")
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(plain), visit)
    return found


@pytest.fixture(scope="module")
def exposed(shared: TestClient) -> dict[str, set[str]]:
    """Every name that an expression may use, with the labels that its samples have; none where there is no sample."""
    body = {"messages": MESSAGES, "max_tokens": 8, "task": "sql"}
    assert shared.post("/v1/chat/completions", json=body).status_code == 200
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(shared.get("/metrics").text):
        for suffix in suffixes[family.type]:
            found[family.name + suffix] = set()
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_metrics_and_labels_of_expressions_exist(
    exposed: dict[str, set[str]], where: str, expression: str
) -> None:
    used = selectors(expression)
    assert used
    for selector in used:
        name = selector.name
        if name in SET_BY_PROMETHEUS:
            continue
        if name not in exposed:
            assert name in OF_THE_CONTROL, f"{where}: the server has no {name}"
            if SERVE.joinpath("control_metrics.py").exists():
                stem = re.sub("^slipstream_(task_)?|(_low|_high|_total)$", "", name)
                assert any(f'"{stem}' in text or f"_{stem}" in text for text in sources()), name
            continue
        labels = {matcher.name for matcher in selector.matchers.matchers} - ADDED_BY_PROMETHEUS
        if exposed[name]:
            assert labels <= exposed[name], f"{where}: {name} has the labels {sorted(exposed[name])}"


def sources() -> list[str]:
    """Return the sources of the server."""
    return [file.read_text() for file in SERVE.glob("*.py")]


def test_what_is_not_promql_is_seen() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selectors("sum by (le (rate(x[5m]))")
    assert [s.name for s in selectors('sum(rate(a{b="c"}[5m])) / max_over_time(d[1h:1m])')] == ["a", "d"]


def test_labels_that_are_grouped_by_exist(exposed: dict[str, set[str]]) -> None:
    for where, expression in EXPRESSIONS:
        names = [selector.name for selector in selectors(expression)]
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            for label in {part.strip() for part in group.split(",")} - ADDED_BY_PROMETHEUS - {"model_name"}:
                assert all(label in exposed[name] for name in names), (where, label)


def test_alerts_are_rules() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 10
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))
    jobs = set(re.findall(r'job="(\w+)"', " ".join(rule["expr"] for rule in rules())))
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert jobs == {config["job_name"] for config in prometheus["scrape_configs"]}
    assert all((DEPLOY / "prometheus" / file).is_file() for file in prometheus["rule_files"])


def test_every_rule_is_tried() -> None:
    cases = [case for test in ALERT_TESTS["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    rests = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == rests == {rule["alert"] for rule in rules()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_rules_fire_when_they_should() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_series_whose_increase_is_asked_for_begin_at_0(make_app: MakeApp) -> None:
    """Series with labels that rules name begin at 0; one that begins at 1 has no increase."""
    wanted = {
        (name, label.name, label.value)
        for rule in rules()
        for expression in re.findall(r"(?:rate|increase)\(([^()]*)\[", rule["expr"])
        for selector in selectors(expression)
        for name in [selector.name]
        for label in selector.matchers.matchers
    }
    assert ("slipstream_alarm_raises_total", "kind", "token_mismatch") in wanted
    with TestClient(make_app()) as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
    for name, label, value in wanted:
        found = [s for s in samples if s.name == name and re.fullmatch(value, s.labels[label])]
        assert found, (name, label, value)
        assert all(sample.value == 0 for sample in found)


def test_the_dashboard_is_whole() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        cells = {
            (x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
    for panel in panels():
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        assert panel["datasource"]["uid"] == "${datasource}"


# --- images --------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and what follows them, without comments, lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def test_what_images_copy_is_there_and_let_in() -> None:
    let_in = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = [word for name, rest in instructions() if name == "COPY" for word in shlex.split(rest)[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in let_in, f"{source} is not in .dockerignore"
    assert set(copied) == let_in


def test_images_are_pinned_and_run_without_privileges() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            parent, _, stage = rest.partition(" AS ")
            assert parent in stages or re.search(r":\d[\w.]*-slim", parent), f"{parent} is not pinned"
            stages[stage] = list(stages.get(parent, []))
        else:
            stages[stage].append((name, rest))
    for stage in ("cpu", "ray-cpu", "cuda"):
        assert [rest for name, rest in stages[stage] if name == "USER"] == ["slipstream"]
        health = next(rest for name, rest in stages[stage] if name == "HEALTHCHECK")
        assert "/health" in health
        command = json.loads(health[health.index("[") :])
        compile(command[2], "healthcheck", "exec")
    runs = [" ".join(rest for name, rest in stages[stage] if name == "RUN") for stage in ("wheel", "cpu")]
    assert "g++" in runs[0]
    assert "HATCH_BUILD_HOOK_ENABLE_CUSTOM=true" in runs[0], "kernels are compiled there"


def test_the_pods_of_replicas_run_an_image_that_is_built_with_their_ray() -> None:
    stages = [rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"]
    manifest = (DEPLOY / "ray/kuberay.yaml").read_text()
    built = re.findall(r"docker build --target (\S+) -t (\S+) \.", manifest)
    [(stage, image)] = built
    assert stage in stages
    cluster = yaml.safe_load(manifest)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
    assert images == {image}
    assert f"--target {stage} -t {image}" in (ROOT / "docs/guides/replicas.md").read_text()
    body = (ROOT / "Dockerfile").read_text().partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
    assert "[deploy" in body
    assert "wget" in body
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert cluster["rayVersion"] == pinned["ray"]


def commands() -> list[list[str]]:
    """What the images and the composition run, without the program's name."""
    found = [json.loads(rest) for name, rest in instructions() if name == "CMD"]
    return [*found, COMPOSE["services"]["slipstream"]["command"]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_are_those_of_the_command_line(command: list[str]) -> None:
    verbs: Any = get_command(app)
    context = verbs.commands[command[0]].make_context(command[0], command[1:])
    assert context.info_name in ("serve", "deploy")


def test_variables_are_settings() -> None:
    words = dict(re.findall(r"(SLIPSTREAM_\w+)=(\S+)", " ".join(rest for _, rest in instructions())))
    words |= COMPOSE["services"]["slipstream"]["environment"]
    known = {f"SLIPSTREAM_{name.upper()}" for name in ServeConfig.__dataclass_fields__}
    for name in words:
        if name.startswith("SLIPSTREAM_"):
            assert name in known | {"SLIPSTREAM_MODEL", "SLIPSTREAM_CACHE"}, name


def test_the_composition_fits_together() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        if "build" not in service:
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source == "./models":
                continue  # the user's
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{port} is open to everybody"
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    [target] = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert port == services[host]["ports"][0].split(":")[-1]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/slipstream.yaml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1].startswith(folder) for volume in services["grafana"]["volumes"])
    assert int(services["slipstream"]["stop_grace_period"].removesuffix("s")) > ServeConfig().grace_period_s

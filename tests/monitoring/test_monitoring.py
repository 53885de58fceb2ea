"""docker/monitoring: Prometheus' configuration, rules and alerts against a real scrape, and Grafana's dashboard.

Grafana itself is not run: what it is given is checked for its form, and every query of it by Prometheus.
"""

import json
import os
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness import ROOT, Process, wait_until
from prometheus_server import FOLDER, Prometheus, send_traffic
from reference.tables import documented_metrics

from cloze.service.routes import LABELS, POST_ROUTES

DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/cloze.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES: list[tuple[str, str]] = [
    (f"{panel['title']} {target['refId']}", target["expr"]) for panel in PANELS for target in panel.get("targets", [])
]
NOTES: list[tuple[str, str]] = [(note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"]]
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
CASES = ("alerts_test.yml", "days_test.yml")
SCALER: dict[str, Any] = yaml.safe_load((ROOT / "docker/kubernetes/components/keda/scaled-object.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
NAME = re.compile(r"(?<![\w:])(?:\w+:)?(?:cloze|process)_\w+(?::\w+)?")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def filled(expression: str) -> str:
    """A query as Grafana sends it, for all models."""
    return expression.replace("$__rate_interval", "5m").replace("$model", ".*")


def names(expression: str) -> set[str]:
    """The metrics of an expression."""
    return set(NAME.findall(re.sub(r'"[^"]*"', "", expression)))


# promtool


@pytest.mark.parametrize("command", ["check config prometheus.yml", *(f"test rules {name}" for name in CASES)])
def test_promtool_accepts(promtool: str, command: str) -> None:
    done = subprocess.run([promtool, *command.split()], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_promtool_finds_every_rule(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", "rules.yml", "alerts.yml"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_promtool_finds_nothing_to_lint_in_the_metrics(promtool: str, services: list[Process]) -> None:
    text = httpx.get(f"{services[0].url}/metrics").content
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# Rules and alerts


def test_every_metric_of_every_rule_exists(prometheus: Prometheus) -> None:
    known = prometheus.names()
    for rule in [*prometheus.rules("record"), *prometheus.rules("alert")]:
        assert names(rule["query"]) <= known | {rule["name"]}, rule["name"]


def test_every_rule_is_healthy(prometheus: Prometheus) -> None:
    for rule in [*prometheus.rules("record"), *prometheus.rules("alert")]:
        assert rule["health"] == "ok", rule
    assert {rule["name"] for rule in prometheus.rules("alert")} == {rule["alert"] for rule in ALERTS}


def test_every_recording_rule_records(prometheus: Prometheus) -> None:
    recorded = prometheus.rules("record")
    assert len(recorded) > 10
    for rule in recorded:
        assert prometheus.wait_for(rule["name"])


def test_an_alert_says_how_bad_it_is_and_what_to_do(subtests: pytest.Subtests) -> None:
    for rule in ALERTS:
        with subtests.test(rule["alert"]):
            assert rule["labels"]["severity"] in ("critical", "warning")
            of = "model" if rule["alert"].startswith("ClozeSpace") else "instance"  # that of all instances together
            assert f"$labels.{of} " in rule["annotations"]["summary"]
            anchor = re.sub(r"(?<!^)(?=[A-Z])", "-", rule["alert"]).lower()
            assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{anchor}"


def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(subtests: pytest.Subtests) -> None:
    cases = [case for name in CASES for case in yaml.safe_load((FOLDER / name).read_text())["tests"]]
    for rule in ALERTS:
        with subtests.test(rule["alert"]):
            (case,) = (case for case in cases if case["name"].startswith(f"{rule['alert']},"))
            expected = [test["exp_samples"] for test in case["promql_expr_test"]]
            assert any(f'alertname="{rule["alert"]}"' in str(samples) for samples in expected)
            assert [] in expected


def test_what_an_alert_looks_at_is_there(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    """So that it is silent because all is well; those that look back have no past here."""
    for rule in ALERTS:
        if " offset " not in rule["expr"]:
            with subtests.test(rule["alert"]):
                assert prometheus.wait_for(re.split(r" (?:==|>) ", rule["expr"])[0])


def test_the_query_of_an_autoscaler_has_one_value(prometheus: Prometheus) -> None:
    for trigger in SCALER["spec"]["triggers"]:
        (series,) = prometheus.wait_for(trigger["metadata"]["query"])
        assert series["metric"] == {}, trigger["name"]
        assert float(series["value"][1]) >= 0, trigger["name"]


def test_the_rates_are_those_of_the_traffic(prometheus: Prometheus, services: list[Process]) -> None:
    instance = services[0].url.removeprefix("http://")
    one = f'{{instance="{instance}", model="one"}}'
    send_traffic(services[0].url)  # again: what the fixture has sent may be longer ago than the rates look back
    (padding,) = prometheus.wait_for(f"0 < model:cloze_padding:ratio_rate5m{one} < 1")
    (overall,) = prometheus.wait_for(f"cloze_padding_tokens_total{one} / cloze_batch_tokens_sum{one}")
    assert float(padding["value"][1]) == pytest.approx(float(overall["value"][1]), rel=0.2)
    for status in ("200", "400", "424"):
        assert prometheus.wait_for(f'status:cloze_requests:rate5m{{status="{status}"}} > 0')
    (cosine,) = prometheus.wait_for(f"cloze_space_mean_cosine{one}")
    assert -1 < float(cosine["value"][1]) < 1


def test_a_service_that_is_killed_is_seen(prometheus: Prometheus, services: list[Process]) -> None:
    killed = services[1]
    killed.close()
    instance = killed.url.removeprefix("http://")
    wait_until(lambda: prometheus.query(f'ALERTS{{alertname="ClozeDown", instance="{instance}"}}'))
    others = f'ALERTS{{alertname="ClozeDown", instance!="{instance}"}}'
    wait_until(lambda: not prometheus.query(others))  # a scrape of another may have taken too long


# The dashboard


def test_every_query_can_be_evaluated_and_has_an_answer(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for query in [*QUERIES, *NOTES]:
        with subtests.test(query[0]):
            expression = filled(query[1])
            assert names(expression) <= prometheus.names()
            if query in NOTES or "offset 1d" in expression:  # nothing may have happened yet, or a day ago
                prometheus.query(expression)
            else:
                assert prometheus.wait_for(expression)


def test_every_query_can_be_narrowed_to_one_model(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for title, query in QUERIES:
        if "$model" in query:
            with subtests.test(title):
                one, none = (
                    query.replace("$__rate_interval", "5m").replace("$model", name) for name in ("one", "none")
                )
                narrowed = prometheus.query(one) if "offset 1d" in one else prometheus.wait_for(one)  # no past yet
                assert {series["metric"].get("model", "one") for series in narrowed} <= {"one"}
                assert not [series for series in prometheus.query(none) if float(series["value"][1])]


def test_the_models_can_be_chosen(prometheus: Prometheus) -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert variable["name"] == "model"
    assert found
    metric, label = found.groups()
    wait_until(lambda: {series["metric"][label] for series in prometheus.query(metric)} == {"one", "two"})


def test_every_metric_is_looked_at() -> None:
    """On the dashboard, in a rule or in an alert; what nobody reads need not be counted."""
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    expressions = [expression for _, expression in [*QUERIES, *NOTES]]
    expressions += [rule["expr"] for group in rules for rule in group["rules"]] + [rule["expr"] for rule in ALERTS]
    read = {SUFFIX.sub("", name) for expression in expressions for name in names(expression)}
    read |= {"cloze_model_loaded"}  # the dashboard's models
    assert [name for name in documented_metrics() if name not in read] == []


def test_rules_and_dashboard_count_every_route_with_texts() -> None:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    expressions = [rule["expr"] for group in rules for rule in group["rules"]] + [query for _, query in QUERIES]
    chosen = [found for expression in expressions for found in re.findall(r'route=~"([^"]*)"', expression)]
    assert len(chosen) == 3
    for pattern in chosen:
        assert [label for label in LABELS if re.fullmatch(pattern, label)] == list(POST_ROUTES)


def test_the_dashboard_has_a_row_for_each_matter() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Batching", "Failures", "Embedding drift", "Process"]
    assert DASHBOARD["schemaVersion"] >= 39
    assert (DASHBOARD["uid"], DASHBOARD["id"]) == ("cloze", None)


def test_a_panel_is_described_and_has_a_unit() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("heatmap", "stat", "table", "timeseries")
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_panels_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(PANELS, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_grafana_is_provisioned_with_what_the_dashboard_asks_for() -> None:
    provisioning = FOLDER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/cloze.yml").read_text())["providers"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    asking = [*PANELS, *DASHBOARD["annotations"]["list"], *DASHBOARD["templating"]["list"]]
    asking += [target for panel in PANELS for target in panel.get("targets", [])]
    assert all(each["datasource"] == wanted for each in asking if each.get("type") != "row")
    assert source["url"] == "http://prometheus:9090"
    assert f"./docker/monitoring/grafana/dashboards:{provider['options']['path']}:ro" in _volumes("grafana")
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape


# The composition


def _volumes(service: str) -> list[str]:
    volumes: list[str] = COMPOSE["services"][service]["volumes"]
    return volumes


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_the_containers_are_closed(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["profiles"] == ["monitoring"]
    assert re.fullmatch(r"\w+/\w+:v?\d+\.\d+\.\d+", service["image"])
    assert all(re.match(r"\$\{\w+:-127\.0\.0\.1:\d+\}:\d+$", port) for port in service["ports"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    for volume in service["volumes"]:
        source, _, options = volume.partition(":")
        if source.startswith("."):
            assert (ROOT / source).exists()
            assert options.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


def test_prometheus_finds_its_files_and_forgets() -> None:
    service = COMPOSE["services"]["prometheus"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
    assert any(word.startswith("--storage.tsdb.retention.time=") for word in service["command"])
    assert any(word.startswith("--storage.tsdb.retention.size=") for word in service["command"])
    files = ["prometheus.yml", *yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]]
    for name in files:
        assert f"./docker/monitoring/{name}:/etc/prometheus/{name}:ro" in _volumes("prometheus")


def test_grafana_tells_nobody_and_lets_nobody_in() -> None:
    environment = COMPOSE["services"]["grafana"]["environment"]
    for name in ("REPORTING_ENABLED", "CHECK_FOR_UPDATES", "CHECK_FOR_PLUGIN_UPDATES", "FEEDBACK_LINKS_ENABLED"):
        assert environment[f"GF_ANALYTICS_{name}"] == "false"
    assert not any("ANONYMOUS" in name for name in environment)
    assert environment["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-}"


@pytest.mark.parametrize(("password", "status"), [("", 78), ("secret", 0)])
def test_grafana_does_not_start_without_a_password(password: str, status: int, tmp_path: Path) -> None:
    shell, option, script = COMPOSE["services"]["grafana"]["entrypoint"]
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "run.sh").chmod(0o755)
    script = script.replace("$$", "$").replace("/run.sh", str(tmp_path / "run.sh"))
    environ = {"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD": password}
    done = subprocess.run([shell, option, script], capture_output=True, text=True, env=environ)
    assert done.returncode == status
    assert (done.stdout == "started\n") == bool(password)
    assert ("GRAFANA_PASSWORD is not set" in done.stderr) == (not password)

"""docker/kubernetes says of the service what is true: its settings, routes, metrics, user and port."""

import re
import signal
from pathlib import Path

import httpx
import pytest
import yaml
from harness import PATIENCE, ROOT, Process, wait_until
from manifests import (
    BASE,
    GPU,
    KEDA,
    KUBERAY,
    MONITORING,
    SCALE_TO_ZERO,
    Build,
    environment,
    every_deployment,
    every_overlay,
    find,
    pods,
    settings,
)
from reference import prometheus_rule
from reference.tables import documented_metrics
from tiny_bundle import write_bundle

from cloze.encoding.errors import OptionError
from cloze.options import flag
from cloze.service.app import create_app
from cloze.service.inference.health import HUNG_AFTER
from cloze.service.settings import Settings, variable

DOCKERFILE = (ROOT / "docker" / "service.Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


# Settings


@every_overlay
def test_the_service_accepts_the_settings(build: Build, folder: Path) -> None:
    found = settings(build(folder))
    assert found.log_format == "json"
    assert found.provider == ("cuda" if folder == GPU else "auto")


@every_overlay
def test_keys_come_from_a_file_of_a_secret(build: Build, folder: Path) -> None:
    documents = build(folder)
    assert not [name for document in documents for name in document.get("data", {}) if "KEYS" in name]
    assert "Secret" not in {document["kind"] for document in documents}
    file = Path(settings(documents).api_keys.get_secret_value().removeprefix("@"))
    *_, pod = pods(documents)  # the worker, where there is a head
    (container,) = pod["spec"]["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == str(file.parent))
    (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
    assert mount["readOnly"]
    assert volume["secret"]["secretName"] == "cloze-keys"
    assert f"secret generic cloze-keys --from-literal={file.name}=" in PAGE


def test_variables_of_a_kubernetes_service_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """No pod of these manifests receives them; one of somebody else's may: the Service is called `cloze`."""
    links = {
        "CLOZE_SERVICE_HOST": "10.0.0.1",
        "CLOZE_SERVICE_PORT": "80",
        "CLOZE_SERVICE_PORT_HTTP": "80",
        "CLOZE_PORT": "tcp://10.0.0.1:80",
        "CLOZE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "CLOZE_PORT_80_TCP_PROTO": "tcp",
        "CLOZE_PORT_80_TCP_PORT": "80",
        "CLOZE_PORT_80_TCP_ADDR": "10.0.0.1",
        "CLOZE_EMBED_SERVICE_HOST": "10.0.0.2",
        "CLOZE_EMBED_PORT": "tcp://10.0.0.2:80",
    }
    found = Settings.read(["--bundle", "b"], links | {"CLOZE_THREADS": "2"})
    assert (found.port, found.threads) == (8080, 2)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in links)
    with pytest.raises(OptionError, match="CLOZE_EMBED_PORT is not a setting"):
        Settings.read(["--bundle", "b"], {"CLOZE_EMBED_PORT": "80"})


@every_overlay
def test_a_pod_can_do_little(build: Build, folder: Path) -> None:
    for pod in pods(build(folder)):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"]
        assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in DOCKERFILE
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        (tmp,) = (each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/tmp")
        assert "emptyDir" in {volume["name"]: volume for volume in spec["volumes"]}[tmp]
        assert container["resources"]["requests"] == container["resources"]["limits"]


@every_deployment
def test_a_pod_has_time_to_start_and_to_stop(build: Build, folder: Path) -> None:
    documents = build(folder)
    found, spec = settings(documents), find(documents, "Deployment")["spec"]["template"]["spec"]
    assert found.stop_delay_seconds > 0
    assert spec["terminationGracePeriodSeconds"] > found.stop_delay_seconds + found.drain_seconds
    probe = spec["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > HUNG_AFTER * found.stall_seconds


def test_ray_waits_longer_than_the_service(build: Build) -> None:
    documents = build(KUBERAY)
    found = settings(documents)
    *_, worker = pods(documents)
    assert worker["spec"]["terminationGracePeriodSeconds"] > found.drain_seconds
    config = yaml.safe_load(find(documents, "RayService")["spec"]["serveConfigV2"])
    assert config["http_options"]["request_timeout_s"] > found.request_seconds


# Routes and metrics


def test_probes_are_routes_of_the_service(build: Build, tmp_path: Path) -> None:
    documents = build(BASE)
    (container,) = find(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    paths = create_app(Settings(bundle=write_bundle(tmp_path / "tiny"))).openapi()["paths"]
    for name in ("startup", "readiness", "liveness"):
        probe = container[f"{name}Probe"]["httpGet"]
        assert "get" in paths[probe["path"]]
        assert probe["port"] == container["ports"][0]["name"]
    (endpoint,) = find(build(MONITORING), "ServiceMonitor")["spec"]["endpoints"]
    assert "get" in paths[endpoint["path"]]
    assert f"CLOZE_PORT={container['ports'][0]['containerPort']}\n" in DOCKERFILE


def test_the_service_runs_and_ends_as_the_pod_expects(build: Build, tmp_path: Path) -> None:
    documents = build(BASE)
    spec = find(documents, "Deployment")["spec"]["template"]["spec"]
    keys = tmp_path / "api-keys"
    keys.write_text("a-key-of-sixteen-characters")
    given = environment(documents) | {
        "CLOZE_BUNDLE": str(write_bundle(tmp_path / "models" / "tiny").parent),
        "CLOZE_API_KEYS": f"@{keys}",
        "CLOZE_STOP_DELAY_SECONDS": str(PATIENCE),
    }
    flags = {variable(name): flag(name) for name in Settings.model_fields}
    service = Process(*(f"{flags[name]}={value}" for name, value in given.items()))
    probes = [spec["containers"][0][f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    with httpx.Client(base_url=service.url) as http:
        assert [http.get(path).status_code for path in probes] == [200, 200, 200]
        assert http.post("/embed", json={"inputs": "a man"}).status_code == 401
        http.headers["authorization"] = f"Bearer {keys.read_text()}"
        assert http.post("/embed", json={"inputs": "a man"}).status_code == 200
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get(probes[1]).status_code == 503)
        assert http.post("/embed", json={"inputs": "a man"}).status_code == 200  # from a node that does not know yet
    assert service.end(signal.SIGTERM) == 0  # the delay ends by itself too: tests/service/test_server.py


def test_the_autoscaler_reads_metrics_that_exist(build: Build) -> None:
    documents = build(KEDA)
    job = find(documents, "Service")["metadata"]["labels"][find(documents, "ServiceMonitor")["spec"]["jobLabel"]]
    for trigger in find(documents, "ScaledObject")["spec"]["triggers"]:
        (name,) = re.findall(r"cloze_\w+", trigger["metadata"]["query"])
        assert re.sub(r"_(bucket|sum|count)$", "", name) in documented_metrics()
        assert f'{name}{{job="{job}"}}' in trigger["metadata"]["query"]
        assert float(trigger["metadata"]["threshold"]) > 0


def test_requests_wait_at_the_interceptor_for_the_pods_of_the_service(build: Build) -> None:
    documents = build(SCALE_TO_ZERO)
    route, service = find(documents, "InterceptorRoute"), find(documents, "Service")
    (trigger,) = find(documents, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["interceptorRoute"] == route["metadata"]["name"]
    assert route["spec"]["target"]["service"] == service["metadata"]["name"]
    assert route["spec"]["target"]["portName"] in [port["name"] for port in service["spec"]["ports"]]
    units = {"m": 60, "s": 1}
    seconds = {name: int(value[:-1]) * units[value[-1]] for name, value in route["spec"]["timeouts"].items()}
    allowed = find(documents, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    namespace = trigger["metadata"]["scalerAddress"].partition(":")[0].partition(".")[2]  # the interceptor's too
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}} in allowed
    assert seconds["responseHeader"] > settings(documents).request_seconds  # so that the service answers first
    assert seconds["request"] == seconds["readiness"] + seconds["responseHeader"]


def test_rules_and_alerts_are_those_of_prometheus(build: Build) -> None:
    """`make reference` writes the file."""
    assert prometheus_rule.MANIFEST.read_text(encoding="utf-8") == prometheus_rule.manifest()
    groups = [group for file in prometheus_rule.SOURCES for group in yaml.safe_load(file.read_text())["groups"]]
    documents = build(MONITORING)
    assert find(documents, "PrometheusRule")["spec"]["groups"] == groups
    job = find(documents, "Service")["metadata"]["labels"]["app.kubernetes.io/name"]
    assert set(re.findall(r'job="(\w+)"', str(groups))) == {job}

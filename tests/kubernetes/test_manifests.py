"""docker/kubernetes: every overlay builds, and every document is valid. No cluster runs them."""

import copy
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from manifests import (
    BASE,
    FOLDER,
    GPU,
    KEDA,
    KUBERAY,
    MONITORING,
    OLDEST,
    SCALE_TO_ZERO,
    Build,
    Document,
    Invalid,
    every_deployment,
    every_overlay,
    find,
    settings,
    validate,
)

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
FREE = ("labels", "matchLabels", "annotations", "data", "requests", "limits", "rayStartParams", "env_vars", "args")


@every_overlay
@pytest.mark.parametrize("version", [OLDEST, ""], ids=["oldest", "latest"])
def test_every_document_is_valid(build: Build, folder: Path, version: str) -> None:
    documents = build(folder)
    assert documents
    for document in documents:
        validate(document, version)


@pytest.mark.long
@every_overlay
def test_no_field_can_be_misspelt(build: Build, folder: Path) -> None:
    unnoticed = [
        (document["kind"], path)
        for document in build(folder)
        for path in fields(document)
        if path[-1] not in ("apiVersion", "kind") and is_valid(misspelt(document, path))
    ]
    assert unnoticed == []


@pytest.mark.parametrize(
    ("overlay", "file", "field"),
    [
        (BASE, "base/deployment.yaml", "readOnlyRootFilesystem"),
        (GPU, "components/gpu/deployment.yaml", "tolerations"),
        (KEDA, "components/keda/scaled-object.yaml", "pollingInterval"),
        (SCALE_TO_ZERO, "components/scale-to-zero/interceptor-route.yaml", "portName"),
        (MONITORING, "components/monitoring/service-monitor.yaml", "jobLabel"),
        (KUBERAY, "overlays/kuberay/ray-service.yaml", "automountServiceAccountToken"),
        (KUBERAY, "overlays/kuberay/ray-service.yaml", "import_path"),
    ],
)
def test_a_misspelt_field_in_a_file_is_found(
    build: Build, tmp_path: Path, overlay: Path, file: str, field: str
) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    changed = tmp_path / "kubernetes" / file
    text = changed.read_text()
    assert f" {field}:" in text
    changed.write_text(text.replace(f" {field}:", f" {field}s:"))
    documents = build(tmp_path / "kubernetes" / overlay.relative_to(FOLDER))
    (invalid,) = (document for document in documents if not is_valid(document))
    with pytest.raises(Invalid, match=f"{field}s"):
        validate(invalid)


def is_valid(document: Document) -> bool:
    try:
        validate(document)
    except Invalid:
        return False
    return True


def fields(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field whose name Kubernetes prescribes."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            free = key in FREE or (key == "selector" and path == ("spec",) and "matchLabels" not in value)
            if not free:
                yield from fields(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from fields(value, (*path, index))


def misspelt(document: Document, path: tuple[Any, ...]) -> Document:
    changed = copy.deepcopy(document)
    node: Any = changed
    for key in path[:-1]:
        node = node[key]
    node[f"{path[-1]}x"] = node.pop(path[-1])
    return changed


@every_deployment
def test_names_agree(build: Build, folder: Path) -> None:
    """What refers to the pods by labels, ports and names finds them."""
    documents = build(folder)
    deployment, service = find(documents, "Deployment"), find(documents, "Service")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert find(documents, kind)["spec"][field] == {"matchLabels": labels}
    (container,) = template["spec"]["containers"]
    (port,), (exposed,) = container["ports"], service["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]
    assert [rule["ports"] for rule in find(documents, "NetworkPolicy")["spec"]["ingress"]] == [[{"port": port["name"]}]]
    scalers = ("HorizontalPodAutoscaler", "ScaledObject")
    (scaler,) = (each for each in documents if each["kind"] in scalers)  # two would work against each other
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    for monitor in (document for document in documents if document["kind"] == "ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == [exposed["name"]]


def test_the_page_has_a_kustomization_that_builds(build: Build, tmp_path: Path) -> None:
    """With the component that it does not have, too: any of them can be combined."""
    (example,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", PAGE, re.DOTALL)
    here = tmp_path / "mine"
    here.mkdir()
    example = example.replace("components:\n", "components:\n  - cloze/docker/kubernetes/components/gpu\n")
    (here / "kustomization.yaml").write_text(example.replace("cloze/docker/kubernetes", os.path.relpath(FOLDER, here)))
    documents = build(here)
    for document in documents:
        validate(document)
    (container,) = find(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example/cloze:")
    assert settings(documents).provider == "cuda"
    assert settings(documents).cache_mb > 0
    assert {document["metadata"]["namespace"] for document in documents} == {"search"}
    assert {"ScaledObject", "ServiceMonitor", "PrometheusRule"} <= {document["kind"] for document in documents}

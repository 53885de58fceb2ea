"""The documents of docker/kubernetes: building, checking, finding."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml
from custom_resources import CUSTOM
from pydantic import ValidationError

from cloze.service.settings import Settings

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
OVERLAYS = (FOLDER / "base", *sorted(path for path in (FOLDER / "overlays").iterdir() if path.is_dir()))
BASE, GPU, KEDA, KUBERAY, MONITORING, SCALE_TO_ZERO = (
    *(FOLDER / "base", FOLDER / "overlays" / "gpu", FOLDER / "overlays" / "keda", FOLDER / "overlays" / "kuberay"),
    *(FOLDER / "overlays" / "monitoring", FOLDER / "overlays" / "scale-to-zero"),
)
OLDEST = "1.31"  # docs/scale.md

Document = dict[str, Any]
Build = Callable[[Path], list[Document]]
Invalid = (kubernetes_validate.ValidationError, ValidationError)

for each in ("all_versions", "schema_contents"):  # `validate` reads the folder and the large files again and again
    setattr(kubernetes_validate.utils, each, cache(getattr(kubernetes_validate.utils, each)))

every_overlay = pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
DEPLOYMENTS = [folder for folder in OVERLAYS if folder != KUBERAY]
every_deployment = pytest.mark.parametrize("folder", DEPLOYMENTS, ids=lambda folder: folder.name)


def validate(document: Document, version: str = "") -> None:
    """Raise one of `Invalid` where the document has a field that its kind does not have, or lacks one that it needs."""
    if custom := CUSTOM.get(document["kind"]):
        custom.model_validate(document)
    else:
        kubernetes_validate.validate(document, version or kubernetes_validate.latest_version(), strict=True)


def find(documents: list[Document], kind: str) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def pods(documents: list[Document]) -> Iterator[Document]:
    """The template of every pod."""
    for document in documents:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]
        elif document["kind"] == "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            yield from (group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])


def environment(documents: list[Document]) -> dict[str, str]:
    """The CLOZE_ variables that the manifests give the service."""
    found: dict[str, str] = {}
    for document in documents:
        if document["kind"] == "ConfigMap":
            found |= document["data"]
        elif document["kind"] == "RayService":
            (application,) = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
            found |= application["runtime_env"]["env_vars"]
    for pod in pods(documents):
        for container in pod["spec"]["containers"]:
            found |= {entry["name"]: entry["value"] for entry in container.get("env", [])}
    return {name: value for name, value in found.items() if name.startswith("CLOZE_")}


def settings(documents: list[Document]) -> Settings:
    """The service's own reading of them, which refuses unknown names and bad values."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CLOZE_")]:
            patch.delenv(name)
        for name, value in environment(documents).items():
            patch.setenv(name, value)
        return Settings.read([])

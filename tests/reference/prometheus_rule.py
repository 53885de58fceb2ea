"""The PrometheusRule for Kubernetes, from docker/monitoring. `make reference` writes it.

Kustomize cannot put a file into a field of a custom resource, so the manifest is generated.
"""

import textwrap
from pathlib import Path

DOCKER = Path(__file__).parents[2] / "docker"
MANIFEST = DOCKER / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
SOURCES = tuple(DOCKER / "monitoring" / name for name in ("rules.yml", "alerts.yml"))
HEAD = """\
# Written by `make reference` from docker/monitoring/rules.yml and alerts.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: cloze
  labels:
    app.kubernetes.io/name: cloze
spec:
  groups:
"""


def manifest() -> str:
    """The groups of both files, with their comments."""
    groups = (source.read_text(encoding="utf-8").partition("\ngroups:\n")[2] for source in SOURCES)
    return HEAD + "\n".join(textwrap.indent(each, "  ") for each in groups)


if __name__ == "__main__":
    MANIFEST.write_text(manifest(), encoding="utf-8")

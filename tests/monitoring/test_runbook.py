"""docs/monitoring.md says what to do for every alert, and for nothing else."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "monitoring.md"


def alerts() -> dict[str, str]:
    """Each alert's runbook."""
    groups = yaml.safe_load((ROOT / "docker" / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule["annotations"]["runbook"] for rule in rules}


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    runbook = PAGE.read_text(encoding="utf-8").partition("\n## Alerts\n")[2]
    headings = re.findall(r"^### (.+)$", runbook, re.MULTILINE)
    anchors = {f"docs/monitoring.md#{heading.lower().replace(' ', '-')}" for heading in headings}
    assert anchors == set(alerts().values())
    assert len(headings) == len(alerts())

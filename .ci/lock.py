"""Resolve every extra of pyproject.toml and write constraints.txt: what `make lock` runs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXTRAS = ("dev", "gpu")  # dev holds service, cpu and train
HEADER = "# Exact versions of all that any extra installs; every install uses this file. Made by `make lock`.\n"


def resolve(extra: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), f".[{extra}]"], check=True)  # noqa: S603 - fixed words
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in installs}
    return {name: version.partition("+")[0] for name, version in found.items() if name != "cloze"}


pins: dict[str, str] = {}
for extra in EXTRAS:
    pins |= resolve(extra)
lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
Path("constraints.txt").write_text(HEADER + "".join(lines), encoding="utf-8")

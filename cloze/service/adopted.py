"""`cloze serve MODEL`: a sentence-transformers model becomes a bundle once, and is then served from a cache.

A command of its own makes the bundle, `cloze adopt`, which loads torch; the service itself never does.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cloze.encoding.bundle import SPEC_FILE
from cloze.service.errors import SessionError

HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MODEL_FILES: Final = ("modules.json", "config.json")  # of a model of sentence-transformers, of transformers

logger = logging.getLogger(__name__)


def bundle_of(model: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the bundle of a model: itself, or for a model of sentence-transformers the one in the cache.

    `model` is the folder of a bundle or of several, of a model, or a model's name on the Hugging Face hub. What is in
    the cache is made where it is missing, and compared with the model. A folder of which a file changes is another
    model; a name of the hub stays what it was. Raises SessionError.
    """
    if model.exists():
        if (model / SPEC_FILE).is_file() or not any((model / name).is_file() for name in MODEL_FILES):
            return model  # a bundle, a folder of bundles, or nothing that is known
        folder = model.resolve()
        source, place = str(folder), Path(_digest(folder), folder.name)
    elif HUB_NAME.fullmatch(str(model)) and not model.parent.is_dir():  # else a path with a mistake in it
        source, place = str(model), Path("hub", model)
    else:
        return model
    bundle = _cache(environ) / place
    if (bundle / SPEC_FILE).is_file():
        logger.info("%s is served as the bundle that was made of it: %s", model, bundle)
        return bundle
    _adopt(source, bundle)
    return bundle


def _adopt(model: str, bundle: Path) -> None:
    """Make a bundle of a model in a process of its own, whose progress and errors are shown."""
    if find_spec("cloze.training") is None or find_spec("torch") is None:
        raise SessionError(
            f"{model} is not a bundle, and to make one of it needs torch: install `cloze[train]`, or run "
            f"`cloze adopt {model} OUT` where it is installed and serve OUT"
        )
    logger.info("a bundle is made of %s, once: %s", model, bundle)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(  # noqa: S603 - no shell, and neither argument begins with a dash
        [sys.executable, "-m", "cloze", "adopt", model, str(bundle)], check=False
    )
    if done.returncode:
        raise SessionError(
            f"no bundle could be made of {model}: the reason is above; give the folder of a bundle or of a model, or a "
            "name of the hub"
        )


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of bundles made of other models, as the XDG base directory specification says."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloze" / "bundles"


def _digest(folder: Path) -> str:
    """Hash names, sizes and times of a model's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stamps = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return blake2b(repr(stamps).encode(), digest_size=8).hexdigest()

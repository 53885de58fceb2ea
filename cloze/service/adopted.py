"""`cloze serve MODEL`: convert a sentence-transformers model to a bundle once, and then serve it from a cache.

A separate command, `cloze adopt`, makes the bundle. It may load torch; the service itself never does.
"""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cloze.encoding.bundle import SPEC_FILE, unreadable
from cloze.service.errors import SessionError

HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ENDING: Final = 10.0  # seconds for an interrupted conversion to end
CANNOT: Final = 2  # exit status of a command that has printed a one-line error
MODEL_FILES: Final = ("modules.json", "config.json")  # one marks a model of sentence-transformers, or of transformers

logger = logging.getLogger(__name__)


def bundle_of(model: Path, revision: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder to serve: `model` itself, or the cached bundle of a sentence-transformers model.

    `model` is the folder of a bundle, of several bundles or of a model, or a model's name on the Hugging Face hub,
    which may have a `revision`. A bundle that the cache lacks is made, and compared with the model. A model's folder
    gets a new bundle when one of its files changes; a hub name keeps its bundle. Raises SessionError, BundleError for a
    folder that cannot be read, and SystemExit if `cloze adopt` has printed why it could not make a bundle.
    """
    try:
        # any other path that does not exist is a mistake
        hub = not model.exists() and HUB_NAME.fullmatch(str(model)) and not model.parent.is_dir()
        if revision is not None and not hub:
            raise SessionError(f"--revision is {revision!r}, but {model} is not a name on the hub: omit --revision")
        if hub:
            source, path = str(model), Path("hub", quote(revision or "main", safe=""), model)
        elif (model / SPEC_FILE).is_file() or not any((model / name).is_file() for name in MODEL_FILES):
            return model  # a bundle, a folder of bundles, or something unknown
        else:
            folder = Path(os.path.abspath(model))  # a link keeps its own name, under which the model is served
            source, path = str(folder), Path(_digest(folder), folder.name)
    except OSError as error:
        raise unreadable(model, error) from error
    bundle = _cache(environ) / path
    if (bundle / SPEC_FILE).is_file():
        logger.info("serving %s as the bundle that was made from it: %s", model, bundle)
    else:
        _adopt(source, bundle, revision)
    return bundle


def _adopt(model: str, bundle: Path, revision: str | None) -> None:
    """Make a bundle of a model in a separate process, which shows its progress and errors."""
    logger.info("making a bundle of %s, which later starts reuse: %s", model, bundle)
    pinned = [] if revision is None else [f"--revision={revision}"]
    command = [sys.executable, "-m", "cloze", "adopt", model, str(bundle), *pinned]
    # There is no shell, and neither path begins with a dash. In its own session, it is interrupted only once.
    with subprocess.Popen(command, start_new_session=True) as process:  # noqa: S603
        try:
            status = process.wait()
        except BaseException:
            try:
                with suppress(subprocess.TimeoutExpired, ValueError):  # Windows cannot send SIGINT
                    process.send_signal(signal.SIGINT)  # so that it removes what it has written
                    process.wait(ENDING)
            finally:
                process.kill()
            raise
    if status == CANNOT:
        sys.exit(CANNOT)
    if status:
        raise SessionError(
            f"`cloze adopt {model}` ended with status {status}; run that command to see why, or serve another model"
        )


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of converted models, according to the XDG base directory specification."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloze" / "bundles"


def _digest(folder: Path) -> str:
    """Hash the names, sizes and modification times of a model's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stamps = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return blake2b(repr(stamps).encode(), digest_size=8).hexdigest()

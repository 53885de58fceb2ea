"""`cloze serve MODEL`: a sentence-transformers model becomes a bundle once, and is then served from a cache.

A command of its own makes the bundle, `cloze adopt`, which may load torch; the service itself never does.
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
ENDING: Final = 10.0  # seconds that an interrupted conversion has to end
CANNOT: Final = 2  # the status of a command that said in one line what its user can put right
MODEL_FILES: Final = ("modules.json", "config.json")  # of a model of sentence-transformers, of transformers

logger = logging.getLogger(__name__)


def bundle_of(model: Path, revision: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the bundle of a model: itself, or for a model of sentence-transformers the one in the cache.

    `model` is the folder of a bundle or of several, of a model, or a model's name on the Hugging Face hub, which may
    have a `revision`. What is in the cache is made where it is missing, and compared with the model. A folder of which
    a file changes is another model; a name of the hub stays what it was. Raises SessionError, BundleError for a folder
    that cannot be read, and SystemExit where `cloze adopt` said why it could not make a bundle.
    """
    try:
        # any other path that is not there is misspelt
        hub = not model.exists() and HUB_NAME.fullmatch(str(model)) and not model.parent.is_dir()
        if revision is not None and not hub:
            raise SessionError(f"--revision is {revision!r}, but {model} is not a name on the hub: omit --revision")
        if hub:
            source, path = str(model), Path("hub", quote(revision or "main", safe=""), model)
        elif (model / SPEC_FILE).is_file() or not any((model / name).is_file() for name in MODEL_FILES):
            return model  # a bundle, a folder of bundles, or nothing that is known
        else:
            folder = Path(os.path.abspath(model))  # a link keeps its own name, by which the model is served
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
    """Make a bundle of a model in a process of its own, whose progress and errors are shown."""
    logger.info("making a bundle of %s, which later starts reuse: %s", model, bundle)
    pinned = [] if revision is None else [f"--revision={revision}"]
    command = [sys.executable, "-m", "cloze", "adopt", model, str(bundle), *pinned]
    # no shell, and neither path begins with a dash; its own session, so that it is interrupted once
    with subprocess.Popen(command, start_new_session=True) as process:  # noqa: S603
        try:
            status = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # so that it removes what it has written
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
            process.kill()
            raise
    if status == CANNOT:
        sys.exit(CANNOT)
    if status:
        raise SessionError(
            f"`cloze adopt {model}` ended with status {status}; run that command to see why, or serve another model"
        )


def _cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of bundles made of other models, as the XDG base directory specification says."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloze" / "bundles"


def _digest(folder: Path) -> str:
    """Hash names, sizes and times of a model's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stamps = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return blake2b(repr(stamps).encode(), digest_size=8).hexdigest()

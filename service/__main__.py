"""`python -m service`: read the settings, load the bundles, serve them. `--check` stops before the last."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from pydantic import Field

from encoding.errors import ClozeError
from service.errors import BadSettings
from service.logs import configure
from service.memory import give_back
from service.settings import Settings


class Command(Settings):
    """Serve the sentence embeddings of one bundle or several over HTTP."""

    check: bool = Field(False, description="load, check and try every bundle, say what would be served, and end")


def main(arguments: Sequence[str]) -> int:
    """2 where the settings or a bundle cannot be used, said in one line."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload before there is anything to reload
    try:
        settings = Command.read(arguments)
        configure(settings.log_level, settings.log_format)
        give_back()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the service's own threads are enough
        if settings.check:
            _check(settings)
        else:
            _serve(settings)
    except ClozeError as error:
        hint = " (`python -m service --help` lists the settings)" if isinstance(error, BadSettings) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    return 0


def _serve(settings: Settings) -> None:
    from service.app import create_app  # ONNX Runtime and FastAPI take a second; --help need not
    from service.server import bind, serve

    with bind(settings.host, settings.port) as listener:
        serve(create_app(settings), settings, listener)


def _check(settings: Settings) -> None:
    from service.app import create_app
    from service.server import resolve

    resolve(settings.host, settings.port)  # the port may be taken, by the service that is to be replaced say
    models = create_app(settings).state.models
    for embedder in models:
        spec = embedder.bundle.spec
        print(
            f"{embedder.name}{' (default)' * (embedder.name == models.default)}: {spec.template!r} read at "
            f"{spec.pooling}, dimension {spec.dimension}, {embedder.session.precision} on {embedder.session.provider}"
        )
    print("ok")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """At once while the bundles load; once they are served, uvicorn drains first and then raises the signal again."""
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m service`: read the settings, load the bundle, serve it."""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from encoding.errors import ClozeError
from service.errors import BadSettings
from service.settings import LogLevel, Settings


def main(arguments: Sequence[str]) -> int:
    """2 where the settings or the bundle cannot be used, said in one line."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        settings = Settings.read(arguments)
        _log(settings.log_level)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the service's own threads are enough
        from service.app import create_app  # ONNX Runtime and FastAPI take a second; --help need not
        from service.server import bind, serve

        with bind(settings.host, settings.port) as listener:
            serve(create_app(settings), settings, listener)
    except ClozeError as error:
        hint = " (`python -m service --help` lists the settings)" if isinstance(error, BadSettings) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """At once while the bundle loads; once it is served, uvicorn drains first and then raises the signal again."""
    sys.exit(0)


def _log(level: LogLevel) -> None:
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level.upper(), format="%(asctime)sZ %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel("WARNING")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

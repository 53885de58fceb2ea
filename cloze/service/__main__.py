"""`cloze serve`: read the settings, load the bundles and serve them; with `--check`, only check them."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NoReturn

from pydantic import Field

from cloze.command import run
from cloze.encoding.errors import OptionError
from cloze.machine import mallopt
from cloze.service.adopted import bundle_of
from cloze.service.inference.threads import OWN_THREAD
from cloze.service.monitoring.logs import configure_logs, end_process
from cloze.service.settings import Settings

M_TRIM_THRESHOLD: Final = -1  # glibc's malloc.h
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
LARGE: Final = 1_048_576  # bytes


class ServeOptions(Settings):
    """Serve the sentence embeddings of one or more bundles over HTTP.

    cloze serve MODEL is short for cloze serve --bundle MODEL. MODEL may be the
    hub name of a bundle or of a sentence-transformers model.
    """

    revision: str | None = Field(None, description="Branch, tag or commit of the model on the hub.")
    check: bool = Field(False, description="Check and warm up every bundle, print what would be served, and exit.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError if the settings or a bundle cannot be used."""
    words = sys.argv[1:] if arguments is None else arguments
    open_descriptors()
    _on_stop(sys.exit)  # this also ends the command that converts a model
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing to reload yet
    named = bool(words) and not words[0].startswith("-")
    if named and any(word.partition("=")[0] == "--bundle" for word in words[1:]):
        raise OptionError(f"{words[0]} and --bundle both name what to serve; give only one of them")
    settings = ServeOptions.read(["--bundle", *words] if named else words)
    configure_logs(settings.log_level, settings.log_format)
    settings = settings.model_copy(update={"bundle": bundle_of(settings.bundle, settings.revision)})
    limit_free_memory()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the service has its own threads
    if settings.check:
        _check(settings)
    else:
        _serve(settings)


def _serve(settings: Settings) -> None:
    _on_stop(end_process)  # an exception raised in an import could be replaced by another one, or lost
    # Importing ONNX Runtime and FastAPI takes a second, so --help does not import them. Garbage collections would add
    # a tenth.
    gc.disable()
    from cloze.service.app import create_app
    from cloze.service.server import bind, serve

    gc.enable()
    gc.freeze()  # the garbage collection after each reload can skip what was imported
    with bind(settings.hostname, settings.port) as listener:
        application = create_app(settings)
        _on_stop(_leave)  # uvicorn drains first and then raises the signal again
        serve(application, settings, listener)


def _check(settings: Settings) -> None:
    _on_stop(end_process)
    from cloze.service.app import create_app
    from cloze.service.server import resolve

    resolve(settings.hostname, settings.port)  # not bound: the service that this one replaces may still run
    models = create_app(settings).state.services.models
    for model in models:
        spec = model.bundle.spec
        print(
            f"{model.name}{' (default)' * (model.name == models.default)}: {spec.template!r}, pooling {spec.pooling}, "
            f"dimension {model.dimension}, {model.session.precision} on {model.session.provider}"
        )
    print("ok")


def open_descriptors() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Otherwise the next file or socket would take its number, and the event loop would abort.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def limit_free_memory() -> None:
    """Make glibc return freed blocks of a mebibyte or more to the system, and use two arenas.

    By default glibc raises that threshold by itself, up to 32 MiB, and each thread keeps the memory of the largest
    bodies and responses that it has held.
    """
    mallopt({M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: LARGE, M_ARENA_MAX: 2})


def _leave(status: int) -> NoReturn:
    """Exit; but end at once if a reload loads a model, whose thread would abort in an interpreter that shuts down."""
    if any(thread.name == OWN_THREAD for thread in threading.enumerate()):
        end_process(status)
    sys.exit(status)


def _on_stop(end: Callable[[int], NoReturn]) -> None:
    """Call `end` with status 0 when SIGTERM or SIGINT asks the process to stop."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        end(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


if __name__ == "__main__":
    sys.exit(run(main))

"""The process's log: one line per record on stderr, as text or JSON, with the id of the request being served.

    configure_logs("info", "json")  # once, at start
    logger.info("embedded", extra={"fields": {"texts": 3, "tokens": 41}})

text  2026-01-31T09:26:53.123Z INFO service.app embedded texts=3 tokens=41 request_id=7d1c…
json  {"time": …, "level": "info", "logger": "cloze.service.app", "message": "embedded", "texts": 3, "tokens": 41, …}

A client cannot forge a line: control characters are escaped, and a traceback is indented in text and one string in
JSON. Callers must not log keys or texts.

A thread writes the lines, because stderr may be a pipe that nobody reads. The service then continues, and records that
do not fit into the queue are dropped and counted.
"""

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from random import getrandbits
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, NoReturn
from urllib.parse import quote

from cloze.service.client import Client

LogFormat = Literal["text", "json"]

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
PLAIN: Final = re.compile(r"[^\s\"=\\]+")
SHOWN: Final = 200  # characters of a path
STDERR: Final = 2
WAITING: Final = 10_000  # records
TOGETHER: Final = 256  # lines that are written at once, at most
PAUSE: Final = 0.02  # seconds between two looks at an empty queue
LAST_SECONDS: Final = 2.0  # for writing the last records when the process ends
ANYONE: Final = Client("")


@dataclass
class RequestRecord:
    """What the log line and the metrics of one request need; filled in while the request is served."""

    id: str
    path: str = ""  # as the client requested it
    started: float = 0.0  # seconds of `time.perf_counter`
    client: Client = ANYONE
    model: str | None = None  # the name of the model that is used
    template: str | None = None  # the named template that an alias chooses
    texts: int | None = None
    tokens: int | None = None
    error_type: str | None = None


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


class LogQueue(QueueHandler):
    """Puts records into the queue of a thread that writes them; one that does not fit is dropped and counted."""

    dropped = 0
    on_drop: ClassVar[Callable[[], object]] = staticmethod(lambda: None)  # called for each dropped record

    def __init__(self, form: logging.Formatter) -> None:
        records: Queue[Any] = Queue(WAITING)
        super().__init__(records)
        self._writer = LogWriter(self, records, form)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Store in the record what the other thread cannot see, or would see changed."""
        vars(record).update(msg=record.getMessage(), args=None, fields=_fields(record))
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1
            LogQueue.on_drop()

    def close(self) -> None:
        """Write the remaining records, for LAST_SECONDS at most."""
        self._writer.finish()
        super().close()


class LogWriter(QueueListener):
    """The thread that writes the records, and reports how many were dropped before them.

    It writes to the descriptor, because Python's own file or a handler would stay locked forever if nobody reads. It
    waits for several records, because waking up for each would cost a busy service more than writing the lines.
    """

    def __init__(self, log_queue: LogQueue, records: "Queue[Any]", form: logging.Formatter) -> None:
        super().__init__(records)
        self._log_queue, self._records, self._form = log_queue, records, form
        self._said, self._lines = 0, list[str]()

    def dequeue(self, block: bool) -> logging.LogRecord:
        if self._records.empty():
            self._write()
            time.sleep(PAUSE)
        return super().dequeue(block)

    def handle(self, record: logging.LogRecord) -> None:
        self._lines.append(self._form.format(record))
        if lost := self._log_queue.dropped - self._said:
            self._said += lost
            message = f"{lost} log records were dropped: stderr was not read"
            notice = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
            self._lines.append(self._form.format(notice))
        if len(self._lines) >= TOGETHER:
            self._write()

    def _write(self) -> None:
        unwritten = "".join(f"{line}\n" for line in self._lines).encode(errors="backslashreplace")
        self._lines.clear()
        with suppress(OSError):  # stderr is closed, or its reader disconnected
            while unwritten:
                unwritten = unwritten[os.write(STDERR, unwritten) :]

    def finish(self) -> None:
        if (thread := self._thread) is not None:
            with suppress(Full):  # then nobody reads
                self.enqueue_sentinel()
            thread.join(LAST_SECONDS)
            if not thread.is_alive():
                self._write()


def configure_logs(level: str, form: LogFormat) -> None:
    """Log to stderr from `level` up; Python warnings and uncaught exceptions become records as well.

    uvicorn's own information is logged at debug only. Nothing it logs contains what a client sent.
    """
    log_queue = LogQueue(JSON() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[log_queue], force=True)
    logging.getLogger("uvicorn.error").setLevel("NOTSET" if level == "debug" else "WARNING")
    logging.captureWarnings(True)
    for name in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks", "_srcfile"):
        setattr(logging, name, None)  # no format shows them (Python's Logging HOWTO, "Optimization")
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def end_process(status: int) -> NoReturn:
    """End the process at once, after writing what was logged."""
    logging.shutdown()
    os._exit(status)


def accept_id(header: str | None) -> str:
    """Keep the client's `x-request-id` if it has 1 to 128 visible ASCII characters; make an id otherwise."""
    return header if header is not None and REQUEST_ID.fullmatch(header) else f"{getrandbits(128):032x}"


def shown(path: str) -> str:
    """Quote a path for a log line, since a blank in it could forge a field, and shorten a long one."""
    return quote(path)[:SHOWN]


class Text(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE key=value …`, and a traceback indented below."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name} {_escape(record.getMessage())}"
        line += "".join(f" {_escape(name)}={_value(value)}" for name, value in _fields(record).items())
        trace = [line for part in _parts(self, record) for line in part.splitlines()]
        return "\n  ".join([line, *map(_escape, trace)])


class JSON(logging.Formatter):
    """One object per line, in ASCII; a field cannot replace the keys that every line has."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if parts := _parts(self, record):
            line["exception"] = "\n".join(parts)
        fields = {name: _finite(value) for name, value in _fields(record).items() if name not in line}
        return json.dumps(line | fields, default=str)


def _time(record: logging.LogRecord) -> str:
    """UTC, with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what was given as `extra={"fields": …}`, and the id of the request being served."""
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    request = current_request.get()
    return {**fields, "request_id": request.id} if request else dict(fields)


def _parts(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the record's exception and stack as the interpreter prints them."""
    trace = formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
    stack = formatter.formatStack(record.stack_info) if record.stack_info else None
    return [part for part in (trace, stack) if part]


def _escape(text: str) -> str:
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _value(value: Any) -> str:
    """The value as text, quoted if it could be read as more than one value."""
    text = str(value)
    return text if PLAIN.fullmatch(text) and not CONTROL.search(text) else json.dumps(text)


def _finite(value: Any) -> Any:
    """The value, or NaN and infinity as strings, because JSON has neither."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _uncaught(error_type: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(error_type, KeyboardInterrupt | SystemExit):
        return
    logging.getLogger("cloze").critical("uncaught exception", exc_info=(error_type, error, trace))

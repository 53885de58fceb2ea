"""Lines as text and as JSON, the request's id in each, and what a client cannot do to them."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from patience import PATIENCE

from cloze.service.monitoring.logs import JSON, RequestRecord, Text, accept_id, current_request


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord(
        "cloze.service.app", logging.WARNING, "app.py", 1, message, arguments, more.pop("exc_info", None)
    )
    made.created, made.msecs = 1769851613.0379, 37.9
    vars(made).update(more)
    return made


def failed() -> Any:
    try:
        raise ValueError("bad\n2026-01-31T00:00:00.000Z INFO forged line\x1b[2J")
    except ValueError:
        return sys.exc_info()


def test_text() -> None:
    line = Text().format(record("loaded %s", "tiny", fields={"seconds": 0.5, "path": "a b", "empty": "", "none": None}))
    said = 'loaded tiny seconds=0.5 path="a b" empty="" none=None'
    assert line == f"2026-01-31T09:26:53.037Z WARNING cloze.service.app {said}"


def test_json() -> None:
    fields = {"texts": 3, "share": float("nan"), "bundle": {1, 2}.__class__, "level": "forged", "message": "forged"}
    line = JSON().format(record("loaded %s", "tiny", fields=fields))
    assert json.loads(line, parse_constant=pytest.fail) == {
        "time": "2026-01-31T09:26:53.037Z",
        "level": "warning",
        "logger": "cloze.service.app",
        "message": "loaded tiny",
        "texts": 3,
        "share": "nan",
        "bundle": "<class 'set'>",
    }


def test_control_characters_are_escaped(subtests: pytest.Subtests) -> None:
    for evil in ["a\nb", "a\r\nb", "\x1b[31m", "\x00", "\x85", "\u2028", "\x7f", "\ud800"]:
        with subtests.test(evil=evil):
            text = Text().format(record("path %s", evil, fields={"id": evil, f"k{evil}": 1}))
            lines = JSON().format(record("path %s", evil, fields={"id": evil}))
            assert text.isprintable()
            assert lines.isprintable() or evil == "\x7f"
            assert json.loads(lines)["id"] == evil


def test_a_value_cannot_add_a_field() -> None:
    line = Text().format(record("asked", fields={"path": '/x status=200 a="b\\'}))
    assert line.endswith(r'asked path="/x status=200 a=\"b\\"')


def test_a_traceback_forges_no_line_in_text() -> None:
    first, *rest = Text().format(record("failed", exc_info=failed())).split("\n")
    assert first.endswith("cloze.service.app failed")
    assert rest
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert "  2026-01-31T00:00:00.000Z INFO forged line\\x1b[2J" in rest


def test_a_traceback_is_one_string_in_json() -> None:
    line = JSON().format(record("failed", exc_info=failed(), stack_info="Stack:\n  here"))
    trace = json.loads(line)["exception"]
    assert "\n" not in line
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("Stack:\n  here")


@pytest.mark.parametrize("formatter", [Text(), JSON()])
def test_the_request_id_is_in_every_line_of_its_tasks(formatter: logging.Formatter) -> None:
    async def inner() -> str:
        return formatter.format(record("inner"))

    async def request(name: str) -> str:
        current_request.set(RequestRecord(name))
        return await asyncio.create_task(inner())

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(asyncio.create_task(request(f"id-{number}")) for number in range(3)))

    for number, line in enumerate(asyncio.run(all_at_once())):
        assert re.search(rf"request_id\W+id-{number}\b", line)
    assert "request_id" not in formatter.format(record("outside"))


def test_a_clients_id_is_kept(subtests: pytest.Subtests) -> None:
    for kept in ["a", "7d1c-4f:/+=", "x" * 128]:
        with subtests.test(kept=kept):
            assert accept_id(kept) == kept


def test_any_other_id_is_replaced(subtests: pytest.Subtests) -> None:
    for refused in [None, "", "x" * 129, "a b", "a\n", "\xe9", "a\x7f"]:
        with subtests.test(refused=refused):
            made = accept_id(refused)
            assert re.fullmatch("[0-9a-f]{32}", made)
            assert made != accept_id(refused)


PROGRAM = """
import logging, sys, threading, warnings
from cloze.service.monitoring.logs import RequestRecord, configure_logs, current_request
configure_logs(sys.argv[1], "json")
configure_logs(sys.argv[1], "json")  # a second time adds nothing
current_request.set(RequestRecord("abc"))
logging.getLogger("cloze.service.a").debug("one")
logging.getLogger("cloze.service.a").info("two", extra={"fields": {"n": 1}})
logging.getLogger("uvicorn.error").info("three")
logging.getLogger("uvicorn.error").warning("four")
warnings.warn("five")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("six")
"""


@pytest.mark.parametrize(("level", "messages"), [("debug", ["one", "two", "three", "four"]), ("info", ["two", "four"])])
def test_a_process_logs_nothing_but_json(level: str, messages: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, timeout=PATIENCE)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert done.stdout == ""
    assert [line["message"] for line in lines[:-3]] == messages
    warned, thread, main = lines[-3:]
    assert "UserWarning: five" in warned["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert "RuntimeError: six" in main["exception"]
    assert main["request_id"] == "abc"
    assert "request_id" not in thread


FLOOD = """
import logging, sys, time
from cloze.service.monitoring.logs import LogQueue, configure_logs
configure_logs("info", "text")
counted = []
LogQueue.on_drop = lambda: counted.append(1)
logger = logging.getLogger("cloze.service.a")
for number in range(12_000):
    logger.info("record %d of a flood, long enough that a pipe holds only few of them", number)
print(len(counted), flush=True)
if sys.stdin.readline():  # now the other side reads
    while logging.getLogger().handlers[0].queue.qsize():
        time.sleep(0.01)
    logger.info("the last one")
"""


def flood() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", FLOOD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_log_that_nobody_reads_stops_nothing_and_is_counted() -> None:
    with flood() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        dropped = int(process.stdout.readline())
        assert 0 < dropped < 2_000  # the queue and the pipe hold the others
        process.stdin.write("read\n")
        process.stdin.close()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait(PATIENCE) == 0
    assert sum("of a flood" in line for line in lines) == 12_000 - dropped
    assert sum(f"{dropped} log records were dropped: stderr was not read" in line for line in lines) == 1
    assert "the last one" in lines[-1]


def test_a_process_whose_log_nobody_reads_ends() -> None:
    with flood() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(PATIENCE) == 0

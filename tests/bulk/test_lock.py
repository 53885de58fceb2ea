"""The lock of an output folder: who is refused, which locks are stale, and what becomes of a lock that was lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest
from harness import PATIENCE, wait_until
from pyarrow import fs

from cloze.command import run
from cloze.service.bulk.__main__ import main
from cloze.service.bulk.lock import LOCK, Lock, LockError, Owner

LOCAL = fs.LocalFileSystem()
SHARED = fs.SubTreeFileSystem("/", LOCAL)  # stands for every file system that cannot create a file exclusively
HOLD = """
import sys
from pyarrow import fs
from cloze.service.bulk.lock import Lock
with Lock(fs.LocalFileSystem(), sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
HERE = Owner.current()
GONE = HERE._replace(token="another")  # as a lock's owner, with what makes it stale

on_linux = pytest.mark.skipif(not HERE.boot, reason="only Linux shows whether a process is the same")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that end by an event are endless, others are none."""
    for name, seconds in {"RENEW": PATIENCE, "STALE": PATIENCE, "SETTLE": 0, "POLL": 0.001}.items():
        monkeypatch.setattr(f"cloze.service.bulk.lock.{name}_SECONDS", seconds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "part.parquet").write_bytes(b"PAR1")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("filesystem", [LOCAL, SHARED])
def test_a_second_job_is_refused_by_name(folder: Path, filesystem: fs.FileSystem) -> None:
    refusal = rf"{folder} is being written by another job, process {os.getpid()} on {HERE.host}; wait until"
    without = contents(folder)
    with Lock(filesystem, str(folder)):
        before = contents(folder)
        with pytest.raises(LockError, match=refusal), Lock(filesystem, str(folder)):
            pass
        assert contents(folder) == before
    assert contents(folder) == without


@pytest.mark.parametrize("filesystem", [LOCAL, SHARED])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_lock_is_released(folder: Path, filesystem: fs.FileSystem, error: type[BaseException] | None) -> None:
    before = contents(folder)
    with ExitStack() as stack:
        if error:
            stack.enter_context(pytest.raises(error))
        stack.enter_context(Lock(filesystem, str(folder)))
        assert len(contents(folder)) == 1 + len(before)
        if error:
            raise error
    assert contents(folder) == before


def test_the_command_of_a_second_job_ends_with_one_line(
    folder: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "texts.txt").write_text("a man\n")
    with Lock(LOCAL, str(folder)):
        before = contents(folder)
        assert run(partial(main, [str(folder / "texts.txt"), str(folder), "--bundle", str(bundle)])) == 2
        assert contents(folder) == before
    assert capsys.readouterr().err.startswith(f"error: {folder} is being written by another job, process {os.getpid()}")


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@on_linux
@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_job_is_started_again_at_once(
    folder: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], reaped: bool
) -> None:
    with pytest.raises(LockError, match=f"process {holder.pid} on "), Lock(LOCAL, str(folder)):
        pass
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    with Lock(LOCAL, str(folder)):
        assert capsys.readouterr().err == ""


@on_linux
def test_a_job_that_is_stopped_keeps_its_lock(folder: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(LockError, match=f"process {holder.pid} on "), Lock(LOCAL, str(folder)):
        pass


@on_linux
def test_a_process_id_that_is_used_again_is_another_process(folder: Path) -> None:
    (folder / LOCK).write_bytes(GONE._replace(started="1").dump())
    with Lock(LOCAL, str(folder)):
        assert Owner.parse((folder / LOCK).read_bytes()) != GONE


ELSEWHERE = [  # processes with the id of this one, which runs
    GONE._replace(host="pod-b"),
    GONE._replace(namespace="pid:[1]"),
    GONE._replace(boot="1"),
    GONE._replace(boot="", namespace="", started=""),
]


@pytest.mark.parametrize(
    ("filesystem", "content"),
    [*((LOCAL, content) for content in (*(owner.dump() for owner in ELSEWHERE), b"", b"{")), (SHARED, b"{")],
)
def test_a_lock_that_is_not_renewed_is_stale(
    folder: Path,
    filesystem: fs.FileSystem,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cloze.service.bulk.lock.STALE_SECONDS", 0.01)
    (folder / LOCK).write_bytes(content)
    with Lock(filesystem, str(folder)) as lock:
        lock.check()
        owner = Owner.parse((folder / LOCK).read_bytes())
        assert owner is not None
        assert owner[:5] == HERE[:5]
    assert "job.lock is the lock of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("filesystem", "elsewhere"), [*((LOCAL, owner) for owner in ELSEWHERE), (SHARED, ELSEWHERE[0])]
)
def test_a_lock_that_is_renewed_is_not_stale(
    folder: Path, filesystem: fs.FileSystem, elsewhere: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.bulk.lock.RENEW_SECONDS", 0.01)
    with pytest.MonkeyPatch.context() as there:
        there.setattr(Owner, "current", lambda: elsewhere)
        other = Lock(filesystem, str(folder))
    with other, pytest.raises(LockError, match=f"another job, {elsewhere}"), Lock(filesystem, str(folder)):
        pass


def test_a_lock_that_is_released_meanwhile_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / LOCK).write_bytes(ELSEWHERE[0].dump())
    monkeypatch.setattr("cloze.service.bulk.lock.sleep", lambda seconds: (folder / LOCK).unlink())
    with Lock(LOCAL, str(folder)) as lock:
        lock.check()


def test_of_two_jobs_that_write_their_locks_at_once_one_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = HERE._replace(token="later")
    monkeypatch.setattr("cloze.service.bulk.lock.sleep", lambda seconds: (folder / LOCK).write_bytes(later.dump()))
    with pytest.raises(LockError, match=f"another job, {later}"), Lock(SHARED, str(folder)):
        pass
    assert (folder / LOCK).read_bytes() == later.dump()


@on_linux
def test_of_many_jobs_one_takes_a_stale_lock(folder: Path) -> None:
    jobs, rounds = 8, 25
    barrier = Barrier(jobs)
    held = list[int]()

    def start(number: int) -> None:
        if number == 0:
            (folder / LOCK).write_bytes(GONE._replace(started="1").dump())
        barrier.wait(PATIENCE)
        try:
            with Lock(LOCAL, str(folder)):
                held.append(number)
                barrier.wait(PATIENCE)  # no lock is released before every job has tried
        except LockError:
            barrier.wait(PATIENCE)

    for number in range(1, rounds + 1):
        threads = [Thread(target=start, args=[job]) for job in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(held) == number


LOST = [(GONE.dump(), f"is now the lock of {GONE}"), (None, "was deleted")]


def lose(lock: Lock, path: Path, content: bytes | None) -> None:
    """Let another job take the lock, and wait until its owner has seen that."""

    def taken() -> str:
        """Again and again, since a renewal that has begun may put its own lock in place of the other."""
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)
        return lock.lost

    wait_until(taken)


@pytest.mark.parametrize("filesystem", [LOCAL, SHARED])
@pytest.mark.parametrize(("content", "reason"), LOST, ids=range(len(LOST)))
def test_a_job_whose_lock_was_lost_stops(
    folder: Path, filesystem: fs.FileSystem, content: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.bulk.lock.RENEW_SECONDS", 0.01)
    done = list[int]()

    def job() -> None:
        with Lock(filesystem, str(folder)) as lock:
            for part in lock.guard(range(3)):
                done.append(part)
                lose(lock, folder / LOCK, content)

    with pytest.raises(LockError, match=rf"job\.lock {reason}, so this job has stopped; the complete parts are kept"):
        job()
    assert done == [0]
    left = (folder / LOCK).read_bytes() if (folder / LOCK).exists() else None
    assert left == content


@pytest.mark.parametrize(("raised", "expected"), [(ValueError, LockError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_lost_lock_explains_the_error_that_follows(
    folder: Path, raised: type[BaseException], expected: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.bulk.lock.RENEW_SECONDS", 0.01)

    def job() -> None:
        with Lock(LOCAL, str(folder)) as lock:
            lose(lock, folder / LOCK, GONE.dump())
            raise raised

    with pytest.raises(expected):
        job()


def test_half_a_renewal_is_not_the_loss_of_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloze.service.bulk.lock.RENEW_SECONDS", 0.01)
    with Lock(LOCAL, str(folder)) as lock:
        (folder / LOCK).write_bytes(b"")  # as on a full disk
        wait_until(lambda: Owner.parse((folder / LOCK).read_bytes()))
        lock.check()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LockError, match=r"notes\.txt cannot be written: .*; choose another folder"):
        Lock(LOCAL, str(tmp_path / "notes.txt")).__enter__()

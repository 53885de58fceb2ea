"""One job at a time in an output folder: the file `job.lock` names the process that writes there.

The owner renews its lock every RENEW_SECONDS. A lock is stale at once if its process has ended, which a job can see
only on the same host, in the same boot and namespace of process ids. Any other lock is stale if it does not change for
STALE_SECONDS while a waiting job watches it. The clocks of two hosts are never compared.
"""

import json
import os
import socket
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, TypeVar

from pyarrow import fs

from cloze.encoding.errors import ClozeError

LOCK: Final = "job.lock"
RENEW_SECONDS: Final = 5.0
STALE_SECONDS: Final = 60.0  # a busy host or a slow network may miss several renewals
SETTLE_SECONDS: Final = 2.0  # longer than another job takes from looking for a lock to writing its own
POLL_SECONDS: Final = 1.0

T = TypeVar("T")


class LockError(ClozeError):
    """Another job writes into the folder, or the folder cannot be locked."""


class Owner(NamedTuple):
    """The process that holds a lock. `boot`, `namespace` and `started` are empty if the system does not have them."""

    host: str
    boot: str  # the kernel's id of this boot
    namespace: str  # of process ids: each container may have its own process 1
    pid: int
    started: str  # ticks from the boot to the start of the process, because process ids are reused
    token: str
    renewals: int = 0

    @classmethod
    def current(cls) -> "Owner":
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace, (_, started) = os.readlink("/proc/self/ns/pid"), _stat(os.getpid())
        except OSError:  # not Linux
            boot = namespace = started = ""
        return cls(socket.gethostname(), boot, namespace, os.getpid(), started, uuid.uuid4().hex)

    @classmethod
    def parse(cls, content: bytes) -> "Owner | None":
        """Return None for a lock that is not complete, such as one that is being written."""
        try:
            return cls(**json.loads(content))
        except (TypeError, ValueError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def dump(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    def is_visible_to(self, other: "Owner") -> bool:
        """Whether `other` would see this process if it runs."""
        return bool(self.boot) and self[:3] == other[:3]

    def runs(self) -> bool:
        """Whether the process runs, if it is visible here."""
        try:
            os.kill(self.pid, 0)
            state, started = _stat(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # another user's process, which may be hidden
            return True
        return state not in "ZX" and started == self.started  # Z: ended, but not yet reaped


class Lock:
    """The lock of one folder, held within a `with` block. A thread renews it."""

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self._filesystem, self._root, self._path = filesystem, root, f"{root}/{LOCK}"
        self._owner = Owner.current()
        self.lost = ""  # why the lock is no longer this job's
        self._ended = Event()
        self._renewer = Thread(target=self._renew_until_end, daemon=True)

    def __enter__(self) -> "Lock":
        """Take the lock. Raises LockError if another job has it, or if the folder cannot be written."""
        try:
            self._take()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise LockError(f"{self._root} cannot be written: {error}; choose another folder") from error
            raise
        self._renewer.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock. Raises LockError if the lock was lost, which then explains the block's own error."""
        self._ended.set()
        self._renewer.join()
        self._release()
        if isinstance(error, Exception) and not isinstance(error, LockError):
            self.check()

    def check(self) -> None:
        """Raise LockError if the lock is no longer this job's."""
        if self.lost:
            raise LockError(
                f"{self._path} {self.lost}, so this job has stopped; the complete parts are kept: start it again when "
                "no other job writes there"
            )

    def guard(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items as long as the lock is this job's. Raises LockError."""
        for item in items:
            self.check()
            yield item

    def _take(self) -> None:
        while True:
            content = self._read()
            if content is None:
                if self._create():
                    return
            elif self._is_stale(content):
                self._remove(content)

    def _is_stale(self, content: bytes) -> bool:
        """Whether the lock is stale; False if it has changed owner or is gone. Raises LockError if its owner runs."""
        owner = Owner.parse(content)
        if owner is not None and owner.is_visible_to(self._owner):
            if owner.runs():
                raise self._refusal(owner)
            return True
        print(
            f"{self._path} is the lock of {owner or 'an unknown process'}; waiting at most {STALE_SECONDS:g} s to see "
            "whether it is renewed",
            file=sys.stderr,
        )
        end = monotonic() + STALE_SECONDS
        while (current := self._read()) == content:
            if monotonic() >= end:
                return True
            sleep(POLL_SECONDS)
        renewed = Owner.parse(current or b"")
        if owner is not None and renewed is not None and renewed.token == owner.token:
            raise self._refusal(owner)
        return False

    def _refusal(self, owner: Owner) -> LockError:
        return LockError(
            f"{self._root} is being written by another job, {owner}; wait until it has ended, or choose another folder"
        )

    def _create(self) -> bool:
        """Create the lock. Return False if a job that started at the same moment has it."""
        self._filesystem.create_dir(self._root, recursive=True)
        if not isinstance(self._filesystem, fs.LocalFileSystem):
            self._write()
            sleep(SETTLE_SECONDS)
            return self._is_own(self._read())
        try:
            file = open(self._path, "xb")  # noqa: SIM115
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._owner.dump())
        except OSError:
            os.remove(self._path)
            raise
        return True

    def _remove(self, stale: bytes) -> None:
        """Remove a stale lock, unless another job has already replaced it."""
        with suppress(FileNotFoundError):
            if not isinstance(self._filesystem, fs.LocalFileSystem):
                if self._read() == stale:
                    self._filesystem.delete_file(self._path)
                return
            with open(self._path, "r+b") as file:
                _hold_back_others(file)
                if file.read() == stale and os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    os.remove(self._path)

    def _renew_until_end(self) -> None:
        while not self.lost and not self._ended.wait(RENEW_SECONDS):
            with suppress(OSError):  # the next renewal may succeed
                self._renew()

    def _renew(self) -> None:
        content = self._read()
        owner = Owner.parse(content or b"")
        if content is None:
            self.lost = "was deleted"
        elif owner is not None and owner.token != self._owner.token:
            self.lost = f"is now the lock of {owner}"
        else:
            self._owner = self._owner._replace(renewals=self._owner.renewals + 1)
            self._write()

    def _release(self) -> None:
        with suppress(OSError):
            if self._is_own(self._read()):
                self._filesystem.delete_file(self._path)

    def _is_own(self, content: bytes | None) -> bool:
        owner = Owner.parse(content or b"")
        return owner is not None and owner.token == self._owner.token

    def _read(self) -> bytes | None:
        try:
            with self._filesystem.open_input_file(self._path) as file:
                content: bytes = file.read()
        except FileNotFoundError:
            return None
        return content

    def _write(self) -> None:
        with self._filesystem.open_output_stream(self._path) as stream:
            stream.write(self._owner.dump())


def _hold_back_others(file: BinaryIO) -> None:
    """Make other jobs wait here until the file is closed, so that only one of them compares and removes it."""
    with suppress(ImportError, OSError):  # a system or a file system without such locks
        from fcntl import LOCK_EX, flock

        flock(file, LOCK_EX)


def _stat(pid: int) -> tuple[str, str]:
    """Return the state of a process, and the ticks from the boot to its start."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")
    state, *others = fields.split()
    return state, others[18]

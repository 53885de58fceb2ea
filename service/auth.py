"""API keys: who sends a request, and whether it may.

`Keys` knows which keys there are and whose they are; it holds digests only, so that neither a repr nor a traceback
can show a key. `Guard` says what a request's path asks for: nothing, a key, or an admin key. It leaves the client's
name in `scope["state"]["client"]`, where fairness and the log find it: the key's name, or else the peer's address.

    guard = Guard(Keys.load(keys, key_file), Keys.load(admin_keys, admin_key_file), public=("/", "/health*"))
    guard.admit(scope)  # in Door, before the application; raises Unauthorized

Where no key is configured the service is open; what lies under /admin/ stays closed even so.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from starlette.datastructures import Headers
from starlette.types import Scope

from service.errors import BadSettings, Unauthorized

__all__ = ["Guard", "Keys", "peer"]

SHORTEST: Final = 16  # characters of a key
ADMIN: Final = "/admin/"
VISIBLE: Final = re.compile(r"[!-~]+")  # what a header carries unchanged, without blanks
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Keys:
    """Digests of the keys, each with its client's name. Several keys may share one, while they are exchanged."""

    names: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()

    @classmethod
    def load(cls, keys: str, file: Path | None) -> Self:
        """Take the keys of the setting, separated by commas, and of the file.

        The file has one key a line, or `name key`; blank lines and those that begin with # are skipped. A key without
        a name is named by its place among all keys, `key-1`. Raises BadSettings, which never holds a key.
        """
        names: list[str] = []
        digests: list[bytes] = []
        for place, name, key in [*_of_setting(keys), *_of_file(file)]:
            _check(place, name, key)
            digest = _digest(key)
            if digest in digests:
                raise BadSettings(f"{place} is the same as another key; take it out, or give the client its own")
            names.append(name or f"key-{len(names) + 1}")
            digests.append(digest)
        return cls(tuple(names), tuple(digests))

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self.names)})"

    def client(self, header: str | None) -> str:
        """Name the client that an `Authorization` header stands for: `Bearer KEY`, or the bare key.

        Raises Unauthorized, which never holds what was sent. Every key is compared, whether or not one has matched.
        """
        if header is None:
            raise Unauthorized("no API key was sent; send the header 'authorization: Bearer KEY'")
        sent, found = _digest(_credentials(header)), None
        for name, digest in zip(self.names, self.digests, strict=True):
            if hmac.compare_digest(sent, digest):
                found = name
        if found is None:
            raise Unauthorized("the API key is not known; ask the service's operator for one")
        return found


class Guard:
    """Which paths need which key.

    `public` paths need none if they are read (GET, HEAD); an entry that ends in `*` stands for all that begin so.
    """

    def __init__(self, keys: Keys, admin: Keys, public: Sequence[str]) -> None:
        self.keys = keys
        self.admin = admin
        self._public = frozenset(path for path in public if not path.endswith("*"))
        self._public_under = tuple(path.removesuffix("*") for path in public if path.endswith("*"))

    def admit(self, scope: Scope) -> None:
        """Leave the client's name in the scope's state, or raise Unauthorized."""
        scope.setdefault("state", {})["client"] = self._client(scope)

    def _client(self, scope: Scope) -> str:
        sent = Headers(scope=scope).getlist("authorization")
        if len(sent) > 1:
            raise Unauthorized(f"{len(sent)} authorization headers were sent; send one")  # a proxy may read the other
        header = sent[0] if sent else None
        if scope["path"].startswith(ADMIN):
            if not self.admin:
                raise Unauthorized("no admin key is configured; set CLOZE_ADMIN_KEYS or CLOZE_ADMIN_KEY_FILE")
            return self.admin.client(header)
        if self.keys and not self._is_public(scope):
            return self.keys.client(header)
        return peer(scope)

    def _is_public(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] in ("GET", "HEAD") and (path in self._public or path.startswith(self._public_under))


def peer(scope: Scope) -> str:
    """The address that a request came from; a Unix socket has none."""
    return str(scope["client"][0]) if scope.get("client") else "local"


def _of_setting(keys: str) -> Iterator[tuple[str, str, str]]:
    """Place, name and key of each; a stray comma is no key."""
    if keys and not keys.replace(",", " ").strip():
        raise BadSettings("the API keys are set and hold no key; write at least one, or unset them")
    for number, key in enumerate(keys.split(","), 1):
        if key.strip():
            yield f"API key {number} of the setting", "", key.strip()


def _of_file(file: Path | None) -> Iterator[tuple[str, str, str]]:
    if file is None:
        return
    empty = True
    for number, line in enumerate(_read(file).splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        empty = False
        words = line.split()
        name, key = words if len(words) == 2 else ("", line)
        yield f"the API key in line {number} of {file}", name, key
    if empty:
        raise BadSettings(f"{file} holds no API key; write one a line, or unset the setting")


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise BadSettings(f"cannot read the API keys in {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise BadSettings(f"{file} is no text in UTF-8; write one API key a line") from None  # the error holds the keys


def _check(place: str, name: str, key: str) -> None:
    if name and not NAME.fullmatch(name):
        raise BadSettings(f"{place}: its name may have 1 to 64 letters, digits, '.', '_' and '-'")
    if not VISIBLE.fullmatch(key):
        raise BadSettings(f"{place} holds a blank or a character that is not visible ASCII; a header cannot carry it")
    if len(key) < SHORTEST:
        raise BadSettings(f"{place} has {len(key)} characters; at least {SHORTEST} are needed: `openssl rand -hex 32`")


def _credentials(header: str) -> str:
    scheme, _, key = header.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else header.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

"""API keys: who sends a request, and whether the request is allowed.

`Keys` holds digests only, so that neither a repr nor a traceback can show a key. `Authentication` decides what a path
needs: nothing, an API key or an admin key.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Self

from starlette.datastructures import Headers
from starlette.types import Scope

from cloze.encoding.errors import OptionError
from cloze.service.client import Client, Priority
from cloze.service.errors import Unauthorized

SHORTEST: Final = 16  # characters of a key
ADMIN: Final = "/admin/"
VISIBLE: Final = re.compile(r"[!-~]+")  # what a header can carry unchanged
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys(dict[bytes, Client]):
    """The clients, by the digests of their keys. Two keys may share a name while one replaces the other.

    The requests of a client in the class bulk are always bulk, whatever priority they ask for.
    """

    @classmethod
    def load(cls, setting: str) -> Self:
        """Read the keys of a setting, separated by commas; `@FILE` stands for the keys in a file.

        The file has one key per line, `name key` or `name key bulk`; blank lines and lines that begin with # are
        ignored. A key without a name is named by its position, `key-1`. Raises OptionError, which never contains a key.
        """
        keys, read = cls(), list(_read_setting(setting))
        names = {name for _, name, _, _ in read}
        for label, name, key, priority in read:
            _check(label, name, key)
            digest = _digest(key)
            if digest in keys:
                raise OptionError(f"{label} is the same as another key; remove it, or give the client its own")
            position = f"key-{len(keys) + 1}"
            if not name and position in names:
                raise OptionError(
                    f"{label} has no name, and another key already has its default name, {position}; give it a name"
                )
            keys[digest] = Client(name or position, priority)
        return keys

    def __repr__(self) -> str:
        return f"Keys({', '.join(client.name for client in self.values())})"

    def client(self, header: str | None) -> Client:
        """Name the client of an `Authorization` header: `Bearer KEY`, or the key alone.

        Raises Unauthorized, which never contains what was sent. Every key is compared, whether or not one has matched.
        """
        if header is None:
            raise Unauthorized("no API key was sent; send the header 'authorization: Bearer KEY'")
        scheme, _, key = header.strip().partition(" ")
        sent, found = _digest(key.strip() if scheme.lower() == "bearer" else header.strip()), None
        for digest, client in self.items():
            if hmac.compare_digest(sent, digest):
                found = client
        if found is None:
            raise Unauthorized("the API key is not known; ask the service's operator for one")
        return found


@dataclass(frozen=True)
class Authentication:
    """Which paths need which key.

    Paths that match a pattern in `public` need no key for GET and HEAD; `*` matches any text. Without API keys the
    service is open; paths under /admin/ always need an admin key.
    """

    keys: Keys
    admin: Keys
    public: Sequence[str]

    def client(self, scope: Scope, path: str) -> Client | None:
        """Return the client whose key the request has; None if the request needs no key. Raises Unauthorized.

        `path` is the path that the client requested, which decides which key is needed.
        """
        sent = Headers(scope=scope).getlist("authorization")
        if len(sent) > 1:
            raise Unauthorized(f"{len(sent)} authorization headers were sent; send one")  # a proxy may read the other
        header = sent[0] if sent else None
        if path.startswith(ADMIN):
            if not self.admin:
                raise Unauthorized("no admin key is configured; set CLOZE_ADMIN_KEYS")
            return self.admin.client(header)
        read = scope["method"] in ("GET", "HEAD")
        if self.keys and not (read and any(fnmatchcase(path, pattern) for pattern in self.public)):
            return self.keys.client(header)
        return None


def _read_setting(setting: str) -> Iterator[tuple[str, str, str, Priority]]:
    """Yield for each key its label in errors, its name, the key and its class. Stray commas are ignored."""
    words = [word.strip() for word in setting.split(",") if word.strip()]
    if setting and not words:
        raise OptionError("the setting of the API keys contains no key; write at least one, or unset it")
    for number, word in enumerate(words, 1):
        if word.startswith("@"):
            yield from _read_file(Path(word[1:]))
        else:
            yield f"API key {number} of the setting", "", word, "interactive"


def _read_file(file: Path) -> Iterator[tuple[str, str, str, Priority]]:
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise OptionError(
            f"the API keys in {file} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except UnicodeDecodeError:
        raise OptionError(f"{file} is not UTF-8 text; write one API key per line") from None  # the error shows the keys
    keys = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"]
    if not keys:
        raise OptionError(f"{file} contains no API key; write one per line, or unset the setting")
    for number, words in keys:
        priority: Priority = "interactive"
        if len(words) == 3 and words[2] == "bulk":
            words, priority = words[:2], "bulk"
        if len(words) > 2:
            raise OptionError(
                f"line {number} of {file} has {len(words)} words; write `KEY`, `NAME KEY` or `NAME KEY bulk`"
            )
        name, key = words if len(words) == 2 else ("", words[0])
        yield f"the API key in line {number} of {file}", name, key, priority


def _check(label: str, name: str, key: str) -> None:
    if name and not NAME.fullmatch(name):
        raise OptionError(f"{label}: its name is not valid; write 1 to 64 letters, digits, '.', '_' and '-'")
    if not VISIBLE.fullmatch(key):
        raise OptionError(f"{label} contains a character that is not visible ASCII; a header cannot carry it")
    if len(key) < SHORTEST:
        raise OptionError(f"{label} has {len(key)} characters; at least {SHORTEST} are needed: `openssl rand -hex 32`")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

"""Keys from text and file, the headers that clients send, and what each path asks for."""

import traceback
from pathlib import Path
from typing import Any

import pytest

from cloze.encoding.errors import OptionError
from cloze.service.client import Client
from cloze.service.errors import Unauthorized
from cloze.service.http.auth import Authentication, Keys

ONE, TWO, THREE, FOUR = (f"{each}-secret-key-0123456789" for each in ("one", "two", "three", "four"))
PUBLIC = ("/", "/health*", "/metrics", "/assets/*")


def scope(path: str, key: str | None = None, method: str = "GET", **more: Any) -> dict[str, Any]:
    headers = [(b"authorization", key.encode())] if key is not None else []
    return {"type": "http", "method": method, "path": path, "headers": headers, "client": ("10.0.0.7", 5123), **more}


def admit(authentication: Authentication, sent: dict[str, Any]) -> str | None:
    client = authentication.client(sent, sent["path"])
    return client and client.name


def test_setting_and_file_are_one_set_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\ufeff# our clients\n\n  search\t {TWO}  \n{THREE}\nnightly {FOUR} bulk")
    keys = Keys.load(f" {ONE} ,@{file}")
    clients = [Client("key-1"), Client("search"), Client("key-3"), Client("nightly", "bulk")]
    assert list(keys.values()) == clients
    assert [keys.client(key) for key in (ONE, TWO, THREE, FOUR)] == clients
    assert keys


def test_no_keys_is_false() -> None:
    assert not Keys.load("")


def test_sixteen_characters_are_enough() -> None:
    assert Keys.load("x" * 16).client("x" * 16) == Client("key-1")


def test_bearer_in_any_case_or_the_bare_key(subtests: pytest.Subtests) -> None:
    for header in [f"Bearer {ONE}", f"bearer {ONE}", f"BEARER   {ONE} ", ONE, f" {ONE}"]:
        with subtests.test(header=header):
            assert Keys.load(f"{TWO},{ONE}").client(header).name == "key-2"


def test_what_is_sent_instead_is_refused_and_not_said(subtests: pytest.Subtests) -> None:
    for header in [
        None,
        "",
        "Bearer",
        f"Basic {ONE}",
        f"Bearer Bearer {ONE}",
        f"Bearer {ONE}x",
        f"{ONE},{TWO}",
        ONE.upper(),
        "Bearer \xe9\udc80",
    ]:
        with subtests.test(header=header):
            with pytest.raises(Unauthorized) as caught:
                Keys.load(f"{ONE},{TWO}").client(header)
            assert "secret" not in str(caught.value).lower()


def test_every_key_is_compared_though_the_first_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloze.service.http import auth

    compared: list[bytes] = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    keys = Keys.load(f"{ONE},{TWO},{THREE}")
    assert keys.client(ONE).name == "key-1"
    assert compared == list(keys)


@pytest.mark.parametrize(
    ("keys", "text", "message"),
    [
        (",", None, "contains no key"),
        ("x" * 15, None, "API key 1 of the setting has 15 characters; at least 16"),
        (f"{ONE},{TWO[:9]} {TWO[9:]}", None, "API key 2 of the setting contains a character"),
        (f"{ONE}\xe9", None, "not visible ASCII"),
        (f"{ONE},{TWO},{ONE}", None, "API key 3 of the setting is the same as another"),
        (ONE, f"# none\nsearch {ONE}", "line 2 of .*keys is the same as another"),
        (
            "",
            f"key-2 {ONE}\n{TWO}",
            "line 2 of .*keys has no name, and another key already has its default name, key-2",
        ),
        (
            "",
            f"{ONE}\nkey-1 {TWO}",
            "line 1 of .*keys has no name, and another key already has its default name, key-1",
        ),
        ("", "", "contains no API key"),
        ("", "# nothing yet\n\n", "contains no API key"),
        ("", f"search {ONE} {TWO}", "line 1 of .*keys has 3 words; write `KEY`, `NAME KEY` or `NAME KEY bulk`"),
        ("", f"{ONE}\nsea/rch {TWO}", "line 2 of .*keys: its name is not valid"),
        ("", f"{ONE}\udcff", "is not UTF-8 text"),
    ],
)
def test_keys_that_cannot_be_used(keys: str, text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OptionError, match=message) as caught:
        Keys.load(f"{keys},@{file}" if text is not None else keys)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(key in shown for key in (ONE, TWO))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the API keys in .*missing cannot be read \(No such file or directory\)"):
        Keys.load(f"@{tmp_path / 'missing'}")


def test_no_key_is_kept() -> None:
    keys = Keys.load(f"{ONE},{TWO}")
    assert repr(keys) == "Keys(key-1, key-2)"
    assert "secret" not in repr(vars(keys))


def test_a_client_may_have_two_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"search {ONE}\nsearch {TWO}")
    keys = Keys.load(f"@{file}")
    assert keys.client(ONE) == keys.client(TWO) == Client("search")


def test_public_paths_need_no_key(subtests: pytest.Subtests) -> None:
    for path, method in [
        ("/", "GET"),
        ("/health", "GET"),
        ("/health/ready", "HEAD"),
        ("/metrics", "GET"),
        ("/assets/plot.js", "GET"),
    ]:
        with subtests.test(path=path):
            assert admit(Authentication(Keys.load(ONE), Keys(), PUBLIC), scope(path, method=method)) is None


def test_all_else_needs_a_key(subtests: pytest.Subtests) -> None:
    for path, method in [
        ("/", "POST"),
        ("/health", "POST"),
        ("/embed", "POST"),
        ("/info", "GET"),
        ("/metricsx", "GET"),
        ("//", "GET"),
    ]:
        with subtests.test(path=path):
            authentication = Authentication(Keys.load(ONE), Keys(), PUBLIC)
            with pytest.raises(Unauthorized, match="no API key was sent"):
                admit(authentication, scope(path, method=method))
            assert admit(authentication, scope(path, f"Bearer {ONE}", method)) == "key-1"


def test_without_keys_no_client_has_a_name() -> None:
    assert admit(Authentication(Keys(), Keys(), PUBLIC), scope("/embed", method="POST")) is None


def test_admin_paths_need_an_admin_key() -> None:
    authentication = Authentication(Keys.load(ONE), Keys.load(TWO), PUBLIC)
    for key in (None, ONE):
        with pytest.raises(Unauthorized):
            admit(authentication, scope("/admin/reload", key, "POST"))
    assert admit(authentication, scope("/admin/reload", TWO, "POST")) == "key-1"
    with pytest.raises(Unauthorized):
        admit(authentication, scope("/embed", TWO, "POST"))


def test_two_keys_at_once_are_refused() -> None:
    """A proxy may have looked at the other one."""
    sent = scope("/embed", ONE, "POST")
    sent["headers"] = [*sent["headers"], *sent["headers"]]
    with pytest.raises(Unauthorized, match="2 authorization headers"):
        admit(Authentication(Keys.load(ONE), Keys(), PUBLIC), sent)


def test_admin_paths_are_closed_where_there_is_no_admin_key() -> None:
    with pytest.raises(Unauthorized, match="CLOZE_ADMIN_KEYS"):
        admit(Authentication(Keys(), Keys(), PUBLIC), scope("/admin/reload", ONE, "POST"))

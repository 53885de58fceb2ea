"""Settings from the environment and the command line, and the words of their errors."""

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from encoding.bundle import PRECISIONS
from service.errors import BadSettings
from service.settings import PrecisionChoice, Settings, table, variable


def read(arguments: str = "--bundle b", **environ: str) -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        return Settings.read(arguments.split())


def test_defaults() -> None:
    settings = read()
    assert settings.bundle == Path("b")
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert (settings.precision, settings.provider, settings.threads) == ("auto", "auto", 0)
    assert settings.truncate
    assert settings.max_inputs >= 10_000


def test_environment() -> None:
    settings = read("", CLOZE_BUNDLE="here", CLOZE_PORT="9", CLOZE_TRUNCATE="false", CLOZE_PRECISION="int8")
    assert settings == Settings(bundle=Path("here"), port=9, truncate=False, precision="int8")


def test_the_command_line_comes_before_the_environment() -> None:
    assert read("--bundle b --port 1 --max-batch-tokens 7 --no-truncate", CLOZE_PORT="2") == Settings(
        bundle=Path("b"), port=1, max_batch_tokens=7, truncate=False
    )


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().port = 1  # type: ignore[misc]


def test_precisions_are_those_of_a_bundle() -> None:
    assert get_args(PrecisionChoice) == ("auto", *PRECISIONS)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ("", {}, "bundle is not set: write --bundle or CLOZE_BUNDLE"),
        ("--bundle b --port 70000", {}, "--port (CLOZE_PORT) is '70000': input should be less than or equal to 65535"),
        ("--bundle b --port x", {}, "--port (CLOZE_PORT) is 'x': input should be a valid integer"),
        ("--bundle b", {"CLOZE_PORT": ""}, "--port (CLOZE_PORT) is '': input should be a valid integer"),
        ("--bundle b", {"CLOZE_PROVIDER": "tpu"}, "--provider (CLOZE_PROVIDER) is 'tpu': should be one of auto, cuda"),
        ("--bundle b --max-inputs 0", {}, "--max-inputs (CLOZE_MAX_INPUTS) is '0': input should be greater"),
        ("--bundle b", {"CLOZE_TRUNCATE": "maybe"}, "--truncate (CLOZE_TRUNCATE) is 'maybe': input should be a valid"),
        ("--bundle b --prt 1", {}, "unrecognized arguments: --prt 1"),
        ("--bundle b extra", {}, "unrecognized arguments: extra"),
        ("--bundle b", {"CLOZE_PROT": "1"}, "CLOZE_PROT is no setting; the nearest is CLOZE_PORT"),
        ("--bundle b", {"CLOZE_THREAD": "1"}, "the nearest is CLOZE_THREADS"),
        ("--bundle b --queue-seconds 0", {}, "--queue-seconds (CLOZE_QUEUE_SECONDS) is '0': input should be greater"),
        ("--bundle b", {"CLOZE_LOG_FORMAT": "xml"}, "(CLOZE_LOG_FORMAT) is 'xml': should be one of text, json"),
        ("--bundle b", {"CLOZE_API_KEY": "secret"}, "CLOZE_API_KEY is no setting; the nearest is CLOZE_API_KEYS"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(arguments: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(message)) as caught:
        read(arguments, **environ)
    assert "\n" not in str(caught.value)


SECRET = "secret-0123456789abcdef"


@pytest.mark.parametrize("name", ["bundle", "api_key_file", "admin_key_file"])
@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_path_is_not_the_working_directory(name: str, blank: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(BadSettings, match=rf"{flag} \(CLOZE_{name.upper()}\) is '{blank}': should be a path"):
        Settings.read(["--bundle", "a", flag, blank], {})


@pytest.mark.parametrize(
    "origin", ["example.com", "https://a.example/", "https://a.example/app", "https://A.example", "https://", "a b"]
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    with pytest.raises(BadSettings, match="is no origin; write scheme, host and port alone"):
        Settings.read(["--bundle", "a", "--cors-origins", f"http://localhost:3000, {origin}"], {})


@pytest.mark.parametrize("origins", ["", "*", "https://a.example, http://[::1]:80,", "chrome-extension://abc"])
def test_origins(origins: str) -> None:
    assert Settings.read(["--bundle", "a", "--cors-origins", origins], {}).cors_origins == origins


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(BadSettings) as caught:
        Settings.read(["--bundle", "a", "--max-inputs", "1" * 5000], {})
    assert len(str(caught.value)) < 500


def test_keys_are_taken_and_never_shown() -> None:
    settings = read(f"--bundle b --api-keys {SECRET}", CLOZE_ADMIN_KEYS=SECRET)
    assert settings.api_keys.get_secret_value() == settings.admin_keys.get_secret_value() == SECRET
    for shown in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert SECRET not in shown
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=SECRET)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (f"--bundle b --api-keys {SECRET} --port x", {}),
        (f"--bundle b --api-keys {SECRET} --prt 1", {}),
        (f"--bundle b --api-key {SECRET}", {}),
        (f"--bundle b --api-key={SECRET}", {}),
        (f"--bundle b --admin-key={SECRET}", {}),
        (f"--bundle b --apikeys {SECRET}", {}),
        (f"--bundle b --API_KEYS={SECRET}", {}),
        (f"--bundle b --api-keys {SECRET} {SECRET}", {}),
        (f"--bundle b --api-key-file {SECRET} --keys {SECRET} --port 1", {}),
        (f"--api-keys {SECRET}", {}),
        ("--bundle b", {"CLOZE_API_KEY": SECRET}),
        ("--bundle b --port x", {"CLOZE_API_KEYS": SECRET}),
    ],
)
def test_no_error_shows_a_key(arguments: str, environ: dict[str, str]) -> None:
    with pytest.raises(BadSettings) as caught:
        read(arguments, **environ)
    assert SECRET not in str(caught.value)


def test_the_documented_table_is_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    found = re.search(
        r"<!-- settings -->\n(.*?)\n<!-- end of settings -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found, "docs/operators.md has lost its settings markers"
    assert found[1] == table(), "paste the output of `python -m service.settings` between the markers"


def test_the_table_has_every_setting() -> None:
    rows = {row.split(" | ")[0]: row for row in table().splitlines()[2:]}
    assert list(rows) == [f"| `{variable(name)}`" for name in Settings.model_fields]
    assert all(
        row.count(" | ") == 4 and "PydanticUndefined" not in row and "Secret" not in row for row in rows.values()
    )
    assert rows["| `CLOZE_API_KEYS`"].split(" | ")[1:4] == ["`--api-keys`", "text", "none"]
    assert rows["| `CLOZE_BUNDLE`"].split(" | ")[1:4] == ["`--bundle`", "path", "required"]
    assert rows["| `CLOZE_QUEUE_SECONDS`"].split(" | ")[2:4] == ["number > 0", "`30`"]
    assert rows["| `CLOZE_TRUNCATE`"].split(" | ")[2:4] == ["true, false", "`true`"]

"""Settings from the environment and the command line, and the words of their errors."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import ValidationError
from reference.tables import documented, settings_table

from cloze.encoding.bundle import PRECISIONS
from cloze.encoding.errors import OptionError
from cloze.service.settings import PrecisionChoice, Settings, variable


def read(arguments: str = "--bundle b", **environ: str) -> Settings:
    return Settings.read(arguments.split(), environ)


def test_defaults() -> None:
    settings = read("")
    assert settings.bundle == Path("cloze-mini")
    assert (settings.hostname, settings.port) == ("127.0.0.1", 8080)
    assert (settings.precision, settings.provider, settings.threads) == ("auto", "auto", 0)
    assert settings.auto_truncate
    assert settings.max_client_batch_size >= 10_000


def test_environment() -> None:
    settings = read("", CLOZE_BUNDLE="here", CLOZE_PORT="9", CLOZE_AUTO_TRUNCATE="false", CLOZE_PRECISION="int8")
    assert settings == Settings(bundle=Path("here"), port=9, auto_truncate=False, precision="int8")


def test_the_command_line_comes_before_the_environment() -> None:
    assert read("--bundle b --port 1 --max-batch-tokens 7 --no-auto-truncate", CLOZE_PORT="2") == Settings(
        bundle=Path("b"), port=1, max_batch_tokens=7, auto_truncate=False
    )


def test_names_of_variables_have_no_case() -> None:
    assert read(cloze_bundle="here", Cloze_Port="9").port == 9


def test_the_values_are_those_of_the_given_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_PORT", "9")
    monkeypatch.setenv("CLOZE_API_KEYS", SECRET)
    given = Settings.read(["--bundle", "b"], {"CLOZE_HOSTNAME": "::"})
    assert (given.hostname, given.port, given.api_keys.get_secret_value()) == ("::", 8080, "")
    assert Settings.read(["--bundle", "b"]).port == 9  # the process's own, if none is given


def test_settings_that_a_program_makes_are_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_BUNDLE", "here")
    monkeypatch.setenv("CLOZE_PORT", "9")
    assert Settings() == Settings(bundle=Path("cloze-mini"), port=8080)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().port = 1  # type: ignore[misc]


def test_precisions_are_those_of_a_bundle() -> None:
    assert get_args(PrecisionChoice) == ("auto", *PRECISIONS)


def test_a_bad_value_is_named(subtests: pytest.Subtests) -> None:
    for arguments, environ, message in [
        ("--bundle b --port 70000", {}, "--port (CLOZE_PORT) is '70000': input should be less than or equal to 65535"),
        ("--bundle b --port x", {}, "--port (CLOZE_PORT) is 'x': input should be a valid integer"),
        ("--bundle b", {"CLOZE_AUTO_TRUNCATE": "maybe"}, "(CLOZE_AUTO_TRUNCATE) is 'maybe': input should be a valid"),
        ("--bundle b --prt 1", {}, "unrecognized arguments: --prt 1"),
        ("--bundle b", {"CLOZE_PROT": "1"}, "CLOZE_PROT is not a setting; the nearest is CLOZE_PORT"),
        ("--bundle b", {"CLOZE_API_KEY": "secret"}, "CLOZE_API_KEY is not a setting; the nearest is CLOZE_API_KEYS"),
    ]:
        with subtests.test(arguments=arguments):
            with pytest.raises(OptionError, match=re.escape(message)) as caught:
                read(arguments, **environ)
            assert "\n" not in str(caught.value)


SECRET = "secret-0123456789abcdef"


def test_a_blank_path_is_not_the_working_directory(subtests: pytest.Subtests) -> None:
    for blank in ["", "  "]:
        message = rf"--bundle \(CLOZE_BUNDLE\) is '{blank}': should be a path"
        with subtests.test(blank=blank), pytest.raises(OptionError, match=message):
            Settings.read(["--bundle", blank], {})


def test_what_no_browser_sends_is_no_origin(subtests: pytest.Subtests) -> None:
    message = "is not an origin; write scheme, host and port only"
    for origin in ("example.com", "https://a.example/", "https://A.example", "https://", "a b"):
        with subtests.test(origin=origin), pytest.raises(OptionError, match=message):
            Settings.read(["--bundle", "a", "--cors-allow-origin", f"http://localhost:3000, {origin}"], {})


def test_origins(subtests: pytest.Subtests) -> None:
    for origins in ["", "*", "https://a.example, http://[::1]:80,", "chrome-extension://abc"]:
        with subtests.test(origins=origins):
            assert Settings.read(["--bundle", "a", "--cors-allow-origin", origins], {}).cors_allow_origin == origins


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(OptionError) as caught:
        Settings.read(["--bundle", "a", "--max-client-batch-size", "1" * 5000], {})
    assert len(str(caught.value)) < 500


def test_a_key_that_is_not_utf_8_is_not_shown() -> None:
    for words in (["--api-keys=\udcff" + SECRET], ["--api-keys", "\udcff" + SECRET]):
        with pytest.raises(OptionError, match=r"^a word of the command line is not UTF-8; rename the file"):
            Settings.read(words, {})


def test_keys_are_taken_and_never_shown() -> None:
    settings = read(f"--bundle b --api-keys {SECRET}", CLOZE_ADMIN_KEYS=SECRET)
    assert settings.api_keys.get_secret_value() == settings.admin_keys.get_secret_value() == SECRET
    for shown in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert SECRET not in shown
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=SECRET, port=SECRET)
    assert SECRET not in str(caught.value)


def test_no_error_shows_a_key(subtests: pytest.Subtests) -> None:
    for arguments, environ in [
        (f"--bundle b --api-keys {SECRET} --port x", {}),
        (f"--bundle b --api-keys {SECRET} --prt 1", {}),
        (f"--bundle b --api-key {SECRET}", {}),
        (f"--bundle b --apikeys {SECRET}", {}),
        (f"--bundle b --API_KEYS={SECRET}", {}),
        (f"--bundle b --api-keys {SECRET} {SECRET}", {}),
        (f"--bundle= --api-keys {SECRET}", {}),
        ("--bundle b", {"CLOZE_API_KEY": SECRET}),
        ("--bundle b --port x", {"CLOZE_API_KEYS": SECRET}),
    ]:
        with subtests.test(arguments=arguments):
            with pytest.raises(OptionError) as caught:
                read(arguments, **environ)
            assert SECRET not in str(caught.value)


def test_compose_names_every_setting() -> None:
    composed = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))
    own = {"hostname", "port"}  # of the published port
    expected = {variable(name) for name in Settings.model_fields if name not in own}
    assert composed["services"]["service"]["environment"].keys() == expected | {"FORWARDED_ALLOW_IPS"}


def test_the_documented_table_is_the_code() -> None:
    assert documented("settings") == settings_table(), "run `make reference`"


def test_the_table_has_every_setting() -> None:
    rows = {row.split(" | ")[0]: row for row in settings_table().splitlines()[2:]}
    assert list(rows) == [f"| `{variable(name)}`" for name in Settings.model_fields]
    assert all(
        row.count(" | ") == 4 and "PydanticUndefined" not in row and "Secret" not in row for row in rows.values()
    )
    assert rows["| `CLOZE_API_KEYS`"].split(" | ")[1:4] == ["`--api-keys`", "text", "none"]
    assert rows["| `CLOZE_BUNDLE`"].split(" | ")[1:4] == ["`--bundle`", "path", "`cloze-mini`"]
    assert rows["| `CLOZE_QUEUE_SECONDS`"].split(" | ")[2:4] == ["number > 0", "`30`"]
    assert rows["| `CLOZE_AUTO_TRUNCATE`"].split(" | ")[2:4] == ["true, false", "`true`"]

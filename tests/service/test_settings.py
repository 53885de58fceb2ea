"""Settings from the environment and the command line, and the words of their errors."""

import re
from pathlib import Path
from typing import get_args

import pytest

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
    ],
)  # fmt: skip
def test_a_bad_value_is_named(arguments: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(BadSettings, match=re.escape(message)) as caught:
        read(arguments, **environ)
    assert "\n" not in str(caught.value)


def test_the_documented_table_is_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "service.md"
    found = re.search(
        r"<!-- settings -->\n(.*?)\n<!-- end of settings -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found, "docs/service.md has lost its settings markers"
    assert found[1] == table(), "paste the output of `python -m service.settings` between the markers"


def test_the_table_has_every_setting() -> None:
    assert all(f"`{variable(name)}`" in table() for name in Settings.model_fields)

"""The service's settings: the environment, the command line and the table in docs/operators.md, from one definition."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from service.errors import BadSettings
from service.logs import LogFormat

__all__ = ["LogLevel", "PrecisionChoice", "ProviderChoice", "Settings", "table"]

PREFIX = "CLOZE_"
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#]+|\*")  # as browsers send it: lower case, and no path

KINDS: Final[dict[Any, str]] = {
    int: "integer",
    float: "number",
    bool: "true, false",
    Path: "path",
    Path | None: "path",
    str: "text",
    SecretStr: "text",
}

PrecisionChoice = Literal["auto", "fp32", "fp16", "int8"]
ProviderChoice = Literal["auto", "cuda", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """What an operator sets; frozen."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        cli_prog_name="python -m service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        hide_input_in_errors=True,  # it may be a key
    )

    bundle: Path = Field(description="folder of one bundle, or of several, each then served under its folder's name")
    model: str = Field("", description="model that answers where a request names none; needed where there are several")
    precision: PrecisionChoice = Field("auto", description="graph to run; auto takes the fastest here")
    provider: ProviderChoice = Field("auto", description="where to run it; auto takes CUDA if there is one")
    threads: int = Field(
        0, ge=0, le=1024, description="threads that run graphs on the CPU; 0 takes the CPUs the process may use"
    )
    threads_per_batch: int = Field(
        0,
        ge=0,
        le=1024,
        description="threads of one batch; as many run at once as threads allow; 0 takes half of threads, 1 to 4",
    )
    tokenizer_threads: int = Field(
        0, ge=0, le=64, description="threads that tokenise and write answers; 0 takes half the CPUs, 2 to 4"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one and logs it")
    max_batch_tokens: int = Field(
        0, ge=0, description="padded tokens of one batch, longest text × texts; 0 takes what suits the hardware"
    )
    cache_mb: int = Field(
        0, ge=0, description="MiB of vectors to cache, so that repeated texts are not computed again; 0 disables it"
    )
    max_tokens_in_flight: int = Field(
        1_000_000, ge=1, description="tokens accepted and not yet answered; a request beyond is refused whole with 429"
    )
    max_requests: int = Field(1024, ge=1, description="requests at work at once; one beyond is refused with 429")
    max_inputs: int = Field(16_384, ge=1, description="texts in one request; more are refused with 422")
    max_text_characters: int = Field(
        1_000_000, ge=1, description="characters, or token ids, of one text; a longer one is refused with 422"
    )
    max_body_bytes: int = Field(16_777_216, ge=1, description="bytes of one request's body; more are refused with 413")
    max_header_bytes: int = Field(16_384, ge=512, description="bytes of one request's head; more are refused with 431")
    token_ids: bool = Field(False, description="take token ids of the model's own vocabulary for a text")
    truncate: bool = Field(True, description="cut a text that is too long where the request does not say")
    request_seconds: float = Field(300, gt=0, description="time a request has in all; then it is answered 504")
    queue_seconds: float = Field(30, gt=0, description="time until a request's first batch; then it is answered 504")
    header_seconds: float = Field(10, gt=0, description="time a client has to send a request's head; then 408")
    body_seconds: float = Field(60, gt=0, description="time a client has to send a request's body; then 408")
    send_seconds: float = Field(60, gt=0, description="time a client may leave its answer unread; then it is cut off")
    stall_seconds: float = Field(30, gt=0, description="time of one batch after which the service is not ready")
    fault_seconds: float = Field(
        60, gt=0, description="time that a batch may hang beyond that, or the model fail; then the process ends"
    )
    drain_seconds: int = Field(30, ge=1, description="time that accepted requests have to end after SIGTERM")
    stop_delay_seconds: float = Field(
        0, ge=0, description="time after SIGTERM in which requests are still taken while ready is off"
    )
    api_keys: SecretStr = Field(SecretStr(""), description="keys, separated by commas; one is needed to use the API")
    api_key_file: Path | None = Field(None, description="file of such keys, one a line, a name may stand before it")
    admin_keys: SecretStr = Field(SecretStr(""), description="keys for /admin, which is off where there is none")
    admin_key_file: Path | None = Field(None, description="file of such keys")
    cors_origins: str = Field("", description="origins whose pages may call, separated by commas; * is any")
    playground: bool = Field(True, description="serve the page at /")
    docs: bool = Field(True, description="serve /docs and /openapi.json")
    otlp_endpoint: str = Field("", description="OTLP over HTTP, where traces are sent; needs `cloze[otel]`")
    log_level: LogLevel = Field("info", description="least level to log; info logs each POST, never its texts")
    log_format: LogFormat = Field("text", description="a line for people, or one JSON object a line")

    @field_validator("bundle", "api_key_file", "admin_key_file", mode="before")
    @classmethod
    def _no_blank_path(cls, value: Any) -> Any:
        """Path("") is the working directory, which nobody means."""
        if isinstance(value, str) and not value.strip():
            raise PydanticCustomError("blank", "should be a path; write one, or leave it out")
        return value

    @property
    def origins(self) -> list[str]:
        return _split(self.cors_origins)

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        """An origin with a path, or without its scheme, would never match."""
        for origin in _split(value):
            if not ORIGIN.fullmatch(origin):
                raise PydanticCustomError(
                    "origin",
                    "{origin} is no origin; write scheme, host and port alone, https://example.com, or * for any",
                    {"origin": origin},
                )
        return value

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Take the command line first, then the environment, then the defaults.

        Raises BadSettings, one line that names the setting, its value and what is allowed.
        """
        _refuse_unknown(environ, [variable(name) for name in Settings.model_fields])
        try:
            return cls(_cli_parse_args=list(arguments))
        except ValidationError as error:
            raise BadSettings("; ".join(map(_explain, error.errors()))) from None  # the error holds every value
        except SettingsError as error:
            reason = str(error).removeprefix("error parsing CLI: ")
            raise BadSettings(_without_keys(reason, arguments)) from None


def _split(words: str) -> list[str]:
    """Words separated by commas; a stray comma is no word."""
    return [word.strip() for word in words.split(",") if word.strip()]


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def table() -> str:
    """The settings as a Markdown table."""
    rows = ["| Variable | Option | Value | Default | Meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        cells = (f"`{variable(name)}`", f"`{flag(name)}`", _allowed(field), _default(field), str(field.description))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    empty = field.default is None or not str(field.default)
    return "none" if empty else f"`{str(field.default).lower()}`"


def _allowed(field: FieldInfo) -> str:
    if words := _words(field):
        return ", ".join(f"`{word}`" for word in words)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[key]} {getattr(rule, key)}" for rule in field.metadata for key in signs if hasattr(rule, key)]
    return " ".join([KINDS[field.annotation], ", ".join(limits)]).strip()


def _words(field: FieldInfo) -> tuple[str, ...]:
    """The words that a Literal allows; none for any other type."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _explain(detail: ErrorDetails) -> str:
    name = str(detail["loc"][0])
    if detail["type"] == "missing":
        meaning = Settings.model_fields[name].description
        return f"{name} is not set: write {flag(name)} or {variable(name)}, the {meaning}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    if words := _words(Settings.model_fields[name]):
        message = f"should be one of {', '.join(words)}"
    return f"{flag(name)} ({variable(name)}) is {detail['input']!r:.200}: {message}"


def _without_keys(reason: str, arguments: Sequence[str]) -> str:
    """What was not recognised, without values where one may be a key: `--api-key KEY` for `--api-keys KEY`."""
    kind, _, found = reason.partition(": ")
    if kind != "unrecognized arguments" or not any("key" in argument.lower() for argument in arguments):
        return reason
    shown = (word.partition("=")[0] if word.startswith("--") else "***" for word in found.split())
    return f"{kind}: {' '.join(shown)}"


def _refuse_unknown(environ: Mapping[str, str], known: Sequence[str]) -> None:
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0)[0]
            raise BadSettings(f"the environment variable {name} is no setting; the nearest is {nearest}")


if __name__ == "__main__":
    print(table())

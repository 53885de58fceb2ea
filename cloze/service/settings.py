"""The service's settings: environment, command line and the table in docs/settings.md, from one definition."""

import difflib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import SettingsConfigDict

from cloze.encoding.bundle import DEFAULT
from cloze.encoding.errors import OptionError
from cloze.options import Options, flag
from cloze.service.monitoring.logs import LogFormat

PREFIX = "CLOZE_"
# the address and the ports of a service, in variables that Kubernetes names like those of Docker's links
SERVICE_LINK: Final = re.compile(
    r"(?i)CLOZE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
PORT: Final = re.compile(r"(?i)CLOZE_(\w+_)?PORT$")
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#]+|\*")  # as browsers send it: lower case, and no path

logger = logging.getLogger(__name__)

PrecisionChoice = Literal["auto", "fp32", "fp16", "int8"]
ProviderChoice = Literal["auto", "cuda", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(Options):
    """The settings of the service. Frozen."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        cli_show_env_vars=True,
        hide_input_in_errors=True,  # the input may be a key
    )

    bundle: Path = Field(
        Path(DEFAULT),
        description="Folder of a bundle, or of several bundles, each served under its folder's name; or a "
        "sentence-transformers model (a folder or a hub name), which is converted once; or a bundle's name on the "
        "hub. cloze-mini: the model that comes with Cloze.",
    )
    model: str = Field(
        "", description="Default model, for requests that do not name one. Required if there are several bundles."
    )
    alias: str = Field(
        "",
        description="Further names of models, separated by commas: NAME=MODEL, or NAME=MODEL:TEMPLATE for one of the "
        "model's named templates.",
    )
    bridge: str = Field(
        "",
        description="File written by `cloze bridge`. The model that it was fitted for then returns vectors in the "
        "old model's space.",
    )
    precision: PrecisionChoice = Field("auto", description="Graph to run. auto: the fastest on this machine.")
    provider: ProviderChoice = Field("auto", description="Where to run the graph. auto: CUDA where it is available.")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads that run graphs. 0: one for each available CPU.")
    hostname: str = Field("127.0.0.1", min_length=1, description="Address to listen on. 0.0.0.0: every interface.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on. 0: a free port, which is logged.")
    max_batch_tokens: int = Field(
        0, ge=0, description="Maximum number of tokens in a batch, padding included. 0: chosen for the hardware."
    )
    gpu_mem_limit: int = Field(
        0, ge=0, description="GPU memory that ONNX Runtime may use for each model, in bytes. 0: no limit."
    )
    cache_mb: int = Field(
        0, ge=0, description="Size of the cache of vectors, in MiB. A cached text is not computed again. 0: no cache."
    )
    max_bytes_in_flight: int = Field(
        268_435_456,
        ge=1,
        description="Limit on the bytes of all requests in flight, bodies and responses. A request beyond it gets 429.",
    )
    max_tokens_in_flight: int = Field(
        1_000_000, ge=1, description="Limit on the tokens of all requests in flight. A request beyond it gets 429."
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, description="Limit on the number of POST requests in flight. A request beyond it gets 429."
    )
    max_client_batch_size: int = Field(
        16_384,
        ge=1,
        description="Maximum number of texts in a request, a search query included. A larger request gets 422.",
    )
    payload_limit: int = Field(
        16_777_216, ge=1, description="Maximum size of a request's body, in bytes. A larger body gets 413."
    )
    token_ids: bool = Field(
        False, description="Also accept token ids of the model's own vocabulary, in place of texts."
    )
    auto_truncate: bool = Field(
        True, description="Truncate texts that are too long, unless the request says otherwise."
    )
    request_seconds: float = Field(
        300, gt=0, description="Time limit for a request, in seconds. A slower request gets 504."
    )
    queue_seconds: float = Field(
        30,
        gt=0,
        description="Time limit until a request's first batch starts, in seconds. A request that waits longer gets "
        "504.",
    )
    body_seconds: float = Field(
        60, gt=0, description="Time limit for receiving a request's body, in seconds. A slower request gets 408."
    )
    stall_seconds: float = Field(
        30,
        gt=0,
        description="Seconds after which a running batch makes the service not ready. The process exits after three "
        "times as long, or when a model has failed for twice as long.",
    )
    drain_seconds: int = Field(
        30, ge=1, description="Time limit for the requests in flight to finish after SIGTERM, in seconds."
    )
    stop_delay_seconds: float = Field(
        0, ge=0, description="Seconds after SIGTERM in which the service is not ready but still accepts requests."
    )
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="API keys, separated by commas. @FILE: the keys in a file, one per line. None: requests need no "
        "key.",
    )
    admin_keys: SecretStr = Field(
        SecretStr(""), description="API keys for /admin, in the same format. None: /admin is disabled."
    )
    cors_allow_origin: str = Field(
        "", description="Origins whose web pages may call the service, separated by commas. *: any origin."
    )
    ui: bool = Field(True, description="Serve the playground at / and the API reference at /docs.")
    otlp_endpoint: str = Field(
        "", description="URL of the OTLP/HTTP collector that receives traces. Requires the extra `otel`."
    )
    log_level: LogLevel = Field(
        "info", description="Minimum level to log. info includes a record of every POST, without its texts."
    )
    log_format: LogFormat = Field("text", description="One line of text, or one JSON object, per log record.")

    @field_validator("bundle", mode="before")
    @classmethod
    def _no_blank_path(cls, value: Any) -> Any:
        """Refuse an empty path, which would be the working directory."""
        if isinstance(value, str) and not value.strip():
            raise PydanticCustomError("blank", "should be a path; write one, or leave it out")
        return value

    @property
    def aliases(self) -> dict[str, str]:
        """Return what each alias stands for: MODEL, or MODEL:TEMPLATE."""
        return dict(map(_name_and_model, _split(self.alias)))

    @field_validator("alias")
    @classmethod
    def _are_names(cls, value: str) -> str:
        names = set[str]()
        for alias in _split(value):
            name, model = _name_and_model(alias)
            if not name or not model or name.startswith("/"):
                raise PydanticCustomError(
                    "alias",
                    "{alias} is not NAME=MODEL or NAME=MODEL:TEMPLATE, as text-embedding-3-small=cloze-mini",
                    {"alias": repr(alias)},
                )
            if name in names:
                raise PydanticCustomError("alias", "{name} is an alias for two models; give it one", {"name": name})
            names.add(name)
        return value

    @property
    def origins(self) -> list[str]:
        return _split(self.cors_allow_origin)

    @field_validator("cors_allow_origin")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        """Refuse an origin with a path or without a scheme, which would never match."""
        for origin in _split(value):
            if not ORIGIN.fullmatch(origin):
                raise PydanticCustomError(
                    "origin",
                    "{origin} is not an origin; write scheme, host and port only, as https://example.com, or * for any",
                    {"origin": origin},
                )
        return value

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Read the command line, which has precedence, `environ` and the defaults. Raises OptionError."""
        return cls.parse(arguments, "cloze serve", _values(environ))

    @classmethod
    def called(cls, name: str) -> str:
        return f"{flag(name)} ({variable(name)})" if name in Settings.model_fields else flag(name)


def _split(words: str) -> list[str]:
    """Split words separated by commas; a stray comma is ignored."""
    return [word.strip() for word in words.split(",") if word.strip()]


def _name_and_model(alias: str) -> tuple[str, str]:
    name, _, model = alias.partition("=")
    return name.strip(), model.strip()


def variable(name: str) -> str:
    return PREFIX + name.upper()


def _values(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of settings by their names. Raises OptionError for a CLOZE_ variable that is not a setting.

    Variables that Kubernetes sets in every container of a namespace with a service called `cloze`, or `cloze-...`, are
    ignored, with a warning.
    """
    variables = {name for name in environ if name.upper().startswith(PREFIX)}
    links = {name for name in variables if SERVICE_LINK.match(name) or (PORT.match(name) and "://" in environ[name])}
    if links:
        logger.warning(
            "ignored %s, which Kubernetes sets for a service named cloze; set enableServiceLinks: false to avoid this",
            ", ".join(sorted(links)),
        )
    settings = {name: name.upper().removeprefix(PREFIX).lower() for name in variables - links}
    for name in sorted(name for name, setting in settings.items() if setting not in Settings.model_fields):
        nearest = difflib.get_close_matches(settings[name], Settings.model_fields, n=1, cutoff=0)[0]
        raise OptionError(f"the environment variable {name} is not a setting; the nearest is {variable(nearest)}")
    return {setting: environ[name] for name, setting in settings.items()}

"""Use a running service as the encoder of a job: POST /embed in the class bulk, so interactive requests go first."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import SecretStr
from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from cloze.encoding.bundle import GRAPHS, Bundle, Precision
from cloze.encoding.errors import ClozeError, OptionError
from cloze.service.errors import BackendFailed

CONNECTIONS: Final = 8  # requests at once
REQUEST_TOKENS: Final = 4096  # tokens of one request, padding included
RETRIED: Final = (408, 429, 502, 503, 504)
BUSY_ATTEMPTS: Final = 200  # a server that reports being busy may be busy for a long time
LOST_ATTEMPTS: Final = 10  # without Retry-After the pauses are 0, 2, 4, 8 to 60 seconds
BISECTED: Final = (413, 422, 424)  # a text cannot be embedded, or the request has too many texts
CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 600.0
RESUME: Final = "complete parts are kept: start the same command again"


class RemoteError(ClozeError):
    """The server did not return vectors of this model."""


class Remote:
    """Gets the vectors of a bundle from a service that serves it. Thread-safe."""

    def __init__(self, url: str, key: SecretStr, bundle: Bundle, prompt_name: str | None = None) -> None:
        """Ask the service what it serves; `url` may end in /models/NAME.

        Raises OptionError if it does not answer, if it does not serve one of the bundle's graphs, or if the model's
        name is an alias for another template.
        """
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"server is {url!r:.200}, which is not a URL; write http://HOST:PORT")
        self.url = url.rstrip("/")
        self._bundle, self._prompt_name = bundle, prompt_name
        self._options = {"truncate": True, "normalize": False, "prompt_name": prompt_name}
        headers = {"accept": "application/octet-stream", "content-type": "application/json", "x-priority": "bulk"}
        if key:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        retries = Retry(
            total=None,
            connect=LOST_ATTEMPTS,
            read=LOST_ATTEMPTS,
            other=LOST_ATTEMPTS,
            redirect=0,
            status=BUSY_ATTEMPTS,
            status_forcelist=RETRIED,
            allowed_methods=None,
            backoff_factor=1,
            backoff_max=60,
            raise_on_status=False,
        )
        timeout = Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self._pool = PoolManager(maxsize=CONNECTIONS, headers=headers, retries=retries, timeout=timeout)
        self._in_space = headers | {"if-match": bundle.spec.space}
        info = self._info()
        self.precision = self._served(info)
        self.most_texts = int(info["max_client_batch_size"])  # of one request

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Texts -> vectors (n, d), not normalised.

        Raises BackendFailed if one of the texts cannot be embedded or they are too many for one request, and
        RemoteError if the server does not return vectors.
        """
        try:
            body = orjson.dumps({"inputs": texts, **self._options})
            response = self._pool.request("POST", f"{self.url}/embed", body=body, headers=self._in_space)
            lost = response.status == 424 and len(texts) == 1 and not self._healthy()
        except HTTPError as error:
            raise RemoteError(f"{self.url} cannot be reached ({error}); {RESUME} when it answers") from error
        if response.status in BISECTED and not lost:
            raise BackendFailed(_reason(response))
        shape = (len(texts), self._bundle.spec.dimension)
        if response.status != 200 or response.headers.get("x-embedding-shape") != "{},{}".format(*shape):
            advice = f"{RESUME} when it answers" if response.status in RETRIED else f"correct this; {RESUME}"
            raise RemoteError(f"{self.url}/embed answered {response.status}: {_reason(response)}; {advice}")
        return np.frombuffer(response.data, "<f4").reshape(shape)

    def check(self) -> None:
        """Raise RemoteError, or OptionError, if the service has begun to serve another graph since the start."""
        try:
            response = self._pool.request("GET", f"{self.url}/info")  # with the same retries as for texts
        except HTTPError as error:
            raise RemoteError(f"{self.url} cannot be reached ({error}); {RESUME} when it answers") from error
        if (precision := self._served(self._facts(response))) != self.precision:
            raise RemoteError(
                f"{self.url} now runs {precision}, but ran {self.precision} before; {RESUME} when it runs "
                f"{self.precision}"
            )

    def _healthy(self) -> bool:
        """Whether the model still works: the service tries the template alone."""
        return self._pool.request("GET", f"{self.url}/health", retries=False).status == 200

    def _info(self) -> dict[str, Any]:
        """Return the service's description of the model. Raises OptionError."""
        try:
            response = self._pool.request("GET", f"{self.url}/info", retries=False)
        except HTTPError as error:
            raise OptionError(f"{self.url} cannot be reached ({error}); start the server first") from error
        return self._facts(response)

    def _facts(self, response: BaseHTTPResponse) -> dict[str, Any]:
        try:
            info: dict[str, Any] = orjson.loads(response.data)
            _ = info["model_sha"], info["embedding_space"], info["max_input_length"], int(info["max_client_batch_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{self.url}/info answered {response.status}: {_reason(response)}; give the address and the key of a "
                "service of Cloze"
            ) from error
        return info

    def _served(self, info: dict[str, Any]) -> Precision:
        """Return the precision of the graph that is served. Raises OptionError if it is not one of the bundle's."""
        bundle, spec = self._bundle, self._bundle.spec
        precisions = [each for each in bundle.precisions if spec.files[GRAPHS[each]] == info["model_sha"]]
        if not precisions or (info["embedding_space"], info["max_input_length"]) != (spec.space, spec.max_tokens):
            raise OptionError(
                f"{self.url} does not serve the model and graph of {bundle.path}: its vector space is "
                f"{info['embedding_space']} and its limit {info['max_input_length']} tokens, but the bundle has "
                f"{spec.space} and {spec.max_tokens}; give the bundle that is served, and serve it without a bridge"
            )
        if self._prompt_name is None and info["template"]["text"] != spec.template:
            raise OptionError(
                f"{self.url} is an alias that stands for another template of the model; name the model itself, or a "
                "template with --prompt-name"
            )
        return precisions[0]


def _reason(response: BaseHTTPResponse) -> str:
    """The server's own message, in one short line."""
    try:
        message = orjson.loads(response.data)["error"]
    except (ValueError, KeyError, TypeError):
        message = response.reason
    return " ".join(str(message).split())[:200]

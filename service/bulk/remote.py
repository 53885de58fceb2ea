"""A running service as the encoder of a job: POST /embed in the class bulk, so that interactive requests go first."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import SecretStr
from urllib3 import HTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from encoding.bundle import GRAPHS, Bundle, Precision
from encoding.errors import ClozeError, OptionError
from service.errors import BackendFailed

CONNECTIONS: Final = 8  # requests at once
REQUEST_TOKENS: Final = 4096  # of one request, as in a batch: its longest text times its texts
ATTEMPTS: Final = 10  # with pauses of 1, 2, 4 to 60 seconds, or as long as the server asks
BUSY: Final = (429, 502, 503, 504)
OF_TEXTS: Final = (413, 422, 424)  # some text of the request cannot be embedded, or they are too many
CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 600.0
AGAIN: Final = "complete parts are kept: start the same command again when it answers"


class RemoteError(ClozeError):
    """The server gives no vectors of this model."""


class Remote:
    """Vectors of a bundle from a service that serves it. Thread-safe."""

    def __init__(self, url: str, key: SecretStr, bundle: Bundle, prompt_name: str | None = None) -> None:
        """`url` may end in /models/NAME. Nothing is asked yet."""
        self.url = url.rstrip("/")
        self._bundle, self._options = bundle, {"prompt_name": prompt_name, "normalize": False}
        headers = {
            "accept": "application/octet-stream",
            "content-type": "application/json",
            "if-match": bundle.spec.space,
            "x-priority": "bulk",
        }
        if key:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        again = Retry(
            ATTEMPTS, backoff_factor=1, backoff_max=60, status_forcelist=BUSY, allowed_methods=None,
            raise_on_status=False,
        )  # fmt: skip
        timeout = Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self._pool = PoolManager(maxsize=CONNECTIONS, headers=headers, retries=again, timeout=timeout)

    def precision(self) -> Precision:
        """Return the precision of the graph that is served. Raises OptionError where it is not one of the bundle's."""
        headers = {name: value for name, value in self._pool.headers.items() if name != "if-match"}
        try:
            response = self._pool.request("GET", f"{self.url}/info", headers=headers, retries=False)
        except HTTPError as error:
            raise OptionError(f"{self.url} cannot be reached ({error}); start the server first") from error
        try:
            info = orjson.loads(response.data)
            graph, space = info["model_sha"], info["embedding_space"]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{self.url}/info answered {response.status}: {_reason(response)}; give the address, and the key, of a "
                "service of Cloze"
            ) from error
        spec = self._bundle.spec
        found = [precision for precision in self._bundle.precisions if spec.files[GRAPHS[precision]] == graph]
        if not found or space != spec.space:
            raise OptionError(
                f"{self.url} serves another model or graph than {self._bundle.path} (space {space}, not {spec.space}); "
                "give the bundle that is served, and serve it without a bridge"
            )
        return found[0]

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Texts -> vectors (n, d), not normalised.

        Raises BackendFailed where one of the texts cannot be embedded, or they are too many for one request, and
        RemoteError where the server does not answer with vectors.
        """
        body = orjson.dumps({"inputs": texts, "truncate": True, **self._options})
        try:
            response = self._pool.request("POST", f"{self.url}/embed", body=body)
        except HTTPError as error:
            raise RemoteError(f"{self.url} cannot be reached ({error}); {AGAIN}") from error
        if response.status in OF_TEXTS:
            raise BackendFailed(_reason(response))
        shape = (len(texts), self._bundle.spec.dimension)
        if response.status != 200 or response.headers.get("x-embedding-shape") != "{},{}".format(*shape):
            raise RemoteError(f"{self.url}/embed answered {response.status}: {_reason(response)}; {AGAIN}")
        return np.frombuffer(response.data, "<f4").reshape(shape)


def _reason(response: HTTPResponse | Any) -> str:
    """The server's own message, in one short line."""
    try:
        message = orjson.loads(response.data)["error"]
    except (ValueError, KeyError, TypeError):
        message = response.reason
    return " ".join(str(message).split())[:200]

"""Embed texts over HTTP with a running server: Cloze, or one with the same /info and /embed, such as TEI."""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

from cloze.training.bar import bar
from cloze.training.errors import ServerError

BUSY: Final = (429, 502, 503, 504)
LONGEST_WAIT: Final = 60.0  # seconds between two attempts
ABSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout)
ATTEMPTS: Final = 8
REACHING: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
DECIDING: Final = (  # keys of /info that affect the vectors; TEI has its pooling in model_type
    *("model_id", "model_sha", "bridge_sha", "model_dtype", "model_type", "max_input_length"),
    *("template", "embedding_space", "version"),
)
WAIT: Final = httpx.Timeout(120, connect=10)  # seconds
LARGEST_BATCH: Final = 32  # texts per request, if the server accepts as many


class ServerEncoder:
    """A server's /embed. Requests are in the class bulk, so that a Cloze server answers interactive requests first.

    Requests that a busy server refuses are sent again after the time in Retry-After.

    Raises ServerError if the server cannot be reached, refuses a request or stays busy. Tests replace `transport` and
    `wait`.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = transport
        self._headers = {"x-priority": "bulk"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._wait = wait
        self.info: Any = None
        with client_of(self.url, self._headers, self._transport) as client:
            self.info = self._request(client, "GET", "/info")
        if not isinstance(self.info, dict) or "model_id" not in self.info:
            raise ServerError(f"{self.url}/info does not describe a model; give the address of an embedding server")

    @property
    def templates(self) -> Mapping[str, str]:
        """The model's named templates; empty for servers without them."""
        templates = self.info.get("templates")
        return templates if isinstance(templates, dict) else {}

    @property
    def digest(self) -> str:
        """The digest of what /info says about the vectors, and of the address if /info has no digest of the model."""
        known = {name: self.info.get(name) for name in DECIDING}
        known["templates"] = self.templates
        if not known["model_sha"]:
            known["url"] = self.url
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> NDArray[np.float32]:
        """Texts -> vectors (n, d) float32, in the texts' order, with the named template `prompt` if it is given.

        Texts of similar length share a request.
        """
        options: dict[str, Any] = {"truncate": True} | ({"prompt_name": prompt} if prompt else {})
        size = min(int(self.info.get("max_client_batch_size") or LARGEST_BATCH), LARGEST_BATCH)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        embeddings: list[list[float]] = [[]] * len(texts)
        starts = range(0, len(order), size)
        with client_of(self.url, self._headers, self._transport) as client:
            for start in bar(starts, desc="embedding", unit=" requests"):
                rows = order[start : start + size]
                inputs = [texts[row] for row in rows]
                vectors = self._request(client, "POST", "/embed", {"inputs": inputs} | options)
                if not isinstance(vectors, list) or len(vectors) != len(rows):
                    raise ServerError(
                        f"{self.url}/embed did not return a vector for each of {len(rows)} texts; is it an embedding "
                        "server?"
                    )
                for row, vector in zip(rows, vectors, strict=True):
                    embeddings[row] = vector
        try:
            array = np.array(embeddings, dtype=np.float32)
        except (TypeError, ValueError):
            array = np.empty(0, dtype=np.float32)
        if len(texts) and (array.ndim != 2 or not np.isfinite(array).all()):
            raise ServerError(
                f"{self.url}/embed did not return lists of numbers of one length; is it an embedding server?"
            )
        return array

    def _request(self, client: httpx.Client, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                response = client.request(method, self.url + route, json=body)
            except httpx.TransportError as error:
                if self.info is None and isinstance(error, ABSENT):  # the server is not busy, but absent
                    raise ServerError(unreachable(self.url, error)) from error
                problem, pause = f"cannot be reached ({error})", 2.0**attempt
            except httpx.InvalidURL as error:
                raise ServerError(f"{self.url} is not an address ({error}); write http://HOST:PORT") from error
            else:
                if response.is_success:
                    return self._read(response, route)
                if response.status_code not in BUSY:
                    raise ServerError(f"{self.url}{route} answered {response.status_code}: {_reason(response)}")
                problem, pause = f"answered {response.status_code}: {_reason(response)}", _pause(response, attempt)
            if attempt + 1 < ATTEMPTS:
                pause = min(pause, LONGEST_WAIT)
                print(f"{self.url}{route} {problem}; again in {pause:.0f} s", file=sys.stderr)
                self._wait(pause)
        raise ServerError(
            f"{self.url}{route} {problem}, {ATTEMPTS} times; finished sets are kept: run the same command again when "
            "the server answers"
        )

    def _read(self, response: httpx.Response, route: str) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{self.url}{route} did not return JSON; is it an embedding server?") from error


def client_of(url: str, headers: dict[str, str], transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """A client for a server's address. A proxy of the environment is used only for other machines.

    Raises ServerError if the proxy or the certificates of the environment cannot be used.
    """
    try:
        return httpx.Client(
            timeout=WAIT,
            headers=headers,
            transport=transport,
            trust_env=not _on_this_machine(url),
            verify=url.startswith("https:"),
        )
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        names = " ".join(f"{name}={value}" for name, value in _environment().items())
        raise ServerError(
            f"requests to {url} fail: {error}; check the proxy in the environment: {names or 'there is none'}"
        ) from error


def unreachable(url: str, error: httpx.TransportError) -> str:
    """A message that no server answered at an address, and what to do."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is not an address ({error}); write http://HOST:PORT"
    used = {} if _on_this_machine(url) else _environment()
    proxy = "".join(f", or correct {name}={value}" for name, value in used.items() if "proxy" in name.lower())
    return f"{url} cannot be reached ({error}); start the server first{proxy}"


def _on_this_machine(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # not an address
        return False
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost" or host.endswith(".localhost")


def _environment() -> dict[str, str]:
    """The environment's proxy and certificate variables, without passwords."""
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.lower() in REACHING and os.environ[name]}
    return {name: re.sub(r"//[^/@]*@", "//", value) for name, value in variables.items()}


def _pause(response: httpx.Response, attempt: int) -> float:
    """Seconds to wait: Retry-After, or else twice as long after each attempt."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date
        return 2.0**attempt


def _reason(response: httpx.Response) -> str:
    """The server's own message, in one short line."""
    try:
        content = response.json()
        message = content.get("error", content) if isinstance(content, dict) else content
    except ValueError:
        message = response.text
    return " ".join(str(message).split())[:200] or "no message"

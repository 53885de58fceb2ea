"""The response to a request with texts: its body in parts, written in a worker thread, and what the request cost."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

from cloze.service.http.request import SPACE_HEADER, RequestContext
from cloze.service.inference.model import Embeddings, Model
from cloze.service.inference.vectors import Raw

BYTES: Final = "application/octet-stream"
JSON: Final = "application/json"
SMALL: Final = 4096  # numbers that are written in a fraction of a millisecond
PART: Final = 262_144  # bytes of a body that are sent at once, minimum


class PartsResponse(Response):
    """A body in parts. Each is freed when the client has taken it, and no part is copied into a larger one."""

    def __init__(self, parts: Iterable[bytes], media_type: str, headers: dict[str, str]) -> None:
        self.parts = deque(parts)
        length = str(sum(map(len, self.parts)))
        super().__init__(media_type=media_type, headers=headers | {"content-length": length})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self.parts:
            part = self.parts.popleft()
            await send({"type": "http.response.body", "body": part, "more_body": bool(self.parts)})
            if self.parts:
                await asyncio.sleep(0)  # a client that reads fast does not keep others waiting


async def respond(
    task: Callable[[], Iterable[bytes] | Raw], context: RequestContext, model: Model, embeddings: Embeddings
) -> Response:
    """Respond with the JSON or raw rows that `task` writes, in a worker thread unless that would take longer."""

    def write() -> tuple[list[bytes], dict[str, str]]:
        content = task()
        if not isinstance(content, Raw):
            return list(_joined(content)), {}
        shape = {"x-embedding-type": content.dtype, "x-embedding-shape": "{},{}".format(*content.shape)}
        return list(_joined(content.parts)), shape

    if embeddings.vectors.size <= SMALL:
        parts, shape = write()
    else:
        parts, shape = await context.services.executors.workers.run(context.record.client, write)
    return PartsResponse(parts, BYTES if shape else JSON, report(embeddings, context, model) | shape)


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts, with small ones joined."""
    small, size = list[bytes](), 0
    for part in parts:
        small.append(part)
        size += len(part)
        if size >= PART:
            yield b"".join(small)
            small, size = [], 0
    if small:
        yield b"".join(small)


def report(embeddings: Embeddings, context: RequestContext, model: Model) -> dict[str, str]:
    """Return headers: the vector space, those of text-embeddings-inference in whole milliseconds, and Server-Timing.

    Queue and inference are means over the request's texts. Compute is tokenising and the graph; total is the time so
    far.
    """
    total = perf_counter() - context.record.started
    ms = {name: 1000 * seconds for name, seconds in (embeddings.timing._asdict() | {"total": total}).items()}
    return {
        SPACE_HEADER: model.space,
        "x-compute-type": model.session.provider,
        "x-compute-time": f"{ms['tokenize'] + ms['inference']:.0f}",
        "x-compute-characters": str(embeddings.characters),
        "x-compute-tokens": str(embeddings.tokens),
        "x-truncated-texts": str(embeddings.truncated),
        "x-total-time": f"{ms['total']:.0f}",
        "x-tokenization-time": f"{ms['tokenize']:.0f}",
        "x-queue-time": f"{ms['queue']:.0f}",
        "x-inference-time": f"{ms['inference']:.0f}",
        "server-timing": ", ".join(f"{name};dur={value:.2f}" for name, value in ms.items()),
    }

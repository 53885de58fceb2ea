"""The door that all models share: a request comes in whole, or not at all.

Asyncio only: nothing here is safe between threads.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from service.errors import Overloaded, Unavailable

__all__ = ["Admission", "allowed"]

MEMORY: Final = 10.0  # seconds of work that the average rate looks back on
LONGEST: Final = 60  # seconds, the most that a client is asked to wait


def allowed(limit: int, *, known: bool) -> int:
    """How much may be at work with what comes: a tenth, rounded up, is kept for clients that have nothing there yet."""
    return limit - (limit + 9) // 10 if known and limit > 1 else limit


class _Rate:
    """Tokens per second of work, an exponential average; what is released counts over the time since the last."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = 0.0

    def add(self, tokens: int, now: float) -> None:
        """Tokens released after so many seconds of work in all."""
        decay, weight = self._since(now)
        gap = now - self._at
        self._tokens = self._tokens * decay + (tokens * weight / gap if gap else tokens)
        self._seconds = self._seconds * decay + weight
        self._at = now

    def seconds(self, tokens: int, now: float) -> float:
        """What so many tokens take; 0.0 where nothing is known."""
        if not self._tokens:
            return 0.0
        decay, weight = self._since(now)
        known = self._tokens * decay
        return tokens * (self._seconds * decay + weight) / known if known else math.inf

    def _since(self, now: float) -> tuple[float, float]:
        """What the time before the last release weighs, of 1, and the time since, in seconds."""
        decay = math.exp((self._at - now) / MEMORY)
        return decay, MEMORY * (1 - decay)


class Admission:
    """Bounds the tokens in flight, from admission to the answer's vectors.

    A tenth of `limit` is kept for clients that have nothing in flight, so that one client cannot hold the whole
    door. A request larger than the limit by itself is admitted when nothing else is in flight.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._clients: Counter[str] = Counter()  # tokens in flight; no client without any
        self._tokens = 0
        self._rate = _Rate()
        self._worked = 0.0  # seconds with something in flight, up to `_seen`
        self._seen = clock()
        self._closed = False

    @property
    def tokens(self) -> int:
        """Tokens in flight."""
        return self._tokens

    def check(self, client: str = "") -> None:
        """Raise what `admit` would raise for a request of one token."""
        self._refuse(1, "at least 1", client)

    @contextmanager
    def admit(self, tokens: int, client: str = "") -> Iterator[None]:
        """Count the tokens as in flight within. Raises Overloaded, and Unavailable once `close` was called."""
        self._refuse(tokens, str(tokens), client)
        self._work()
        self._tokens += tokens
        self._clients[client] += tokens
        try:
            yield
        finally:
            self._release(tokens, client)

    def retry_after(self) -> int:
        """Whole seconds until what is in flight is through at the recent rate; at least 1."""
        return max(1, math.ceil(min(LONGEST, self._rate.seconds(self._tokens, self._work()))))

    def close(self) -> None:
        """Admit nothing more; what is in flight goes on."""
        self._closed = True

    def _refuse(self, tokens: int, brings: str, client: str) -> None:
        if self._closed:
            raise Unavailable("the service is stopping; send the request to another instance")
        known = client in self._clients
        most = allowed(self.limit, known=known)
        if not self._tokens or self._tokens + tokens <= most:
            return
        seconds = self.retry_after()
        raise Overloaded(
            f"{self._tokens} tokens are in flight and the request brings {brings}, at most {most} may be"
            f"{' for a client that has some in flight' if known else ''}; send it again in {seconds} s",
            retry_after=seconds,
        )

    def _release(self, tokens: int, client: str) -> None:
        self._rate.add(tokens, self._work())
        self._tokens -= tokens
        self._clients[client] -= tokens
        if not self._clients[client]:
            del self._clients[client]

    def _work(self) -> float:
        """Seconds up to now in which something was in flight."""
        now = self._clock()
        if self._tokens:
            self._worked += now - self._seen
        self._seen = now
        return self._worked

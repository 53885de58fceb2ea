"""Admission: limits on the requests, the bytes and the tokens in flight, shared by all models.

Asyncio only: not thread-safe.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from cloze.service.client import Client
from cloze.service.errors import Overloaded, Unavailable

MEMORY: Final = 10.0  # seconds of work over which the rate is averaged
LONGEST: Final = 60  # seconds, the longest Retry-After


class _Rate:
    """Tokens per second of work, an exponential average."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = 0.0

    def add(self, tokens: int, now: float) -> None:
        """Count tokens that were finished at `now`, in seconds of work."""
        memory = self._memory(now)
        self._tokens = self._tokens * memory + tokens
        self._seconds = self._seconds * memory + now - self._at
        self._at = now

    def seconds(self, tokens: int, now: float) -> float:
        """Return the seconds that `tokens` take; 0.0 while nothing is known."""
        memory = self._memory(now)
        counted = self._tokens * memory
        if not counted:
            return math.inf if self._tokens else 0.0
        return tokens * (self._seconds * memory + now - self._at) / counted

    def _memory(self, now: float) -> float:
        """Return the weight of what was counted at the last call, at most 1."""
        return math.exp((self._at - now) / MEMORY)


@dataclass
class _InFlight:
    """An amount in flight, in total and by client. A client with nothing in flight is removed.

    `shared` is the limit for a client that has some in flight: a tenth, rounded up, is kept for other clients.
    """

    limit: int
    unit: str
    total: int = 0
    clients: dict[Client, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared = self.limit - (self.limit + 9) // 10 if self.limit > 1 else self.limit

    def change(self, amount: int, client: Client) -> None:
        self.total += amount
        if remaining := self.clients.get(client, 0) + amount:
            self.clients[client] = remaining
        else:
            self.clients.pop(client, None)


@dataclass
class _Held:
    """What one request has in flight. An amount beyond its limit counts as `shared`, so a tenth is left for others."""

    of: _InFlight
    client: Client
    amount: int = 0

    def __post_init__(self) -> None:
        self.most = self.of.shared if self.client.priority == "bulk" else self.of.limit

    @property
    def beyond(self) -> bool:
        return self.amount > self.most

    @property
    def counted(self) -> int:
        return min(self.amount, self.most)

    def change(self, amount: int) -> None:
        before = self.counted
        self.amount += amount
        if self.beyond:
            self.most = self.of.shared  # until its end, because others may have arrived
        self.of.change(self.counted - before, self.client)


class Admission:
    """Decides whether a request is admitted: by count and by the bytes of its body before the body is read, by tokens
    while it is tokenised. The bytes of its response count until the client has read it.

    A tenth of each limit is kept for interactive clients that have nothing in flight, so that neither one client nor
    all bulk clients together can use up the limit. A request with more bytes or tokens than the limit is admitted if no
    others are in flight, and also leaves that tenth.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = _InFlight(max_requests, "requests")
        self._tokens = _InFlight(max_tokens, "tokens")
        self._bytes = _InFlight(max_bytes, "bytes")
        self._clock = clock
        self._rate = _Rate()
        self._worked = 0.0  # seconds with tokens in flight, up to `_seen`
        self._seen = clock()
        self._unfinished = 0  # tokens, including those beyond the limit that do not count as in flight
        self._closed = False

    @property
    def tokens_in_flight(self) -> int:
        return self._tokens.total

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes.total

    @contextmanager
    def request(self, client: Client) -> Iterator[Callable[[int], None]]:
        """Count a request as in flight within the block, and the bytes that the block gives to the yielded function.

        Raises Overloaded if the request, one token or those bytes do not fit.
        """
        self._check(self._requests, 1, client)
        self._check(self._tokens, 1, client)
        self._requests.change(1, client)
        held = _Held(self._bytes, client)

        def hold(count: int) -> None:
            if count and not held.beyond:
                self._fit(self._bytes, count, client, held.counted)
            held.change(count)

        try:
            yield hold
        finally:
            held.change(-held.amount)
            self._requests.change(-1, client)

    @contextmanager
    def tokens(self, client: Client) -> Iterator[Callable[[int], None]]:
        """Count tokens as in flight within the block. It gives the change, up or down, to the yielded function.

        That function raises Overloaded if they do not fit.
        """
        self._check(self._tokens, 0, client)
        held = _Held(self._tokens, client)

        def hold(more: int) -> None:
            if not more:
                return
            if more > 0 and not held.beyond:  # fewer always fit
                self._fit(self._tokens, more, client, held.counted)
            self._work()
            held.change(more)
            self._unfinished += more

        try:
            yield hold
        finally:
            self._rate.add(held.amount, self._work())
            self._unfinished -= held.amount
            held.change(-held.amount)

    def close(self) -> None:
        """Refuse all new requests with Unavailable; requests in flight finish."""
        self._closed = True

    def _check(self, in_flight: _InFlight, amount: int, client: Client) -> None:
        if self._closed:
            raise Unavailable("the service is stopping; send the request to another instance")
        self._fit(in_flight, amount, client)

    def _fit(self, in_flight: _InFlight, amount: int, client: Client, own_amount: int = 0) -> None:
        """Raise Overloaded if the amount does not fit; `own_amount` is what its request already has in flight."""
        if in_flight.total + amount <= in_flight.shared or in_flight.total == own_amount:
            return
        bulk, known = client.priority == "bulk", in_flight.clients.get(client, 0) > own_amount
        limit = in_flight.shared if bulk or known else in_flight.limit
        if in_flight.total + amount <= limit:
            return
        remaining = self._rate.seconds(self._unfinished, self._work())
        seconds = max(1, math.ceil(min(LONGEST, remaining)))
        whom = " for bulk requests" if bulk else " for a client that already has some in flight" if known else ""
        raise Overloaded(
            f"{in_flight.total} {in_flight.unit} are in flight and the request adds {amount}; the limit is "
            f"{limit}{whom}; send it again in {seconds} s",
            retry_after=seconds,
        )

    def _work(self) -> float:
        """Return the seconds up to now in which tokens were in flight."""
        now = self._clock()
        if self._tokens.total:
            self._worked += now - self._seen
        self._seen = now
        return self._worked

"""The door: who is let in beside whom, and when the others may come again."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cloze.service.client import Client
from cloze.service.errors import Overloaded, Unavailable
from cloze.service.inference.admission import Admission


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


BYTES = 1000
A, B, C, REFUSED = map(Client, ("a", "b", "c", "refused"))


@contextmanager
def in_flight(admission: Admission, count: int, client: Client) -> Iterator[Callable[[int], None]]:
    """So many tokens in flight within the block, which may hold more or fewer."""
    with admission.tokens(client) as hold:
        hold(count)
        yield hold


def enter(admission: Admission, client: Client) -> None:
    """Ask what a request is asked before its body is read: is there room for it, and for one token?"""
    with admission.request(client):
        pass


def retry_after(admission: Admission, tokens: int = 10**9, client: Client = REFUSED) -> int:
    with pytest.raises(Overloaded) as caught, in_flight(admission, tokens, client):
        pass
    seconds = int(caught.value.headers["retry-after"])
    assert f"send it again in {seconds} s" in str(caught.value)
    return seconds


def test_tokens_are_in_flight_within_the_block() -> None:
    admission = Admission(1024, 100, BYTES)
    assert admission.tokens_in_flight == 0
    with in_flight(admission, 30, A):
        assert admission.tokens_in_flight == 30
        with in_flight(admission, 70, B):
            assert admission.tokens_in_flight == 100
        assert admission.tokens_in_flight == 30
    assert admission.tokens_in_flight == 0


def test_a_request_that_fails_gives_its_tokens_back() -> None:
    admission = Admission(1024, 100, BYTES)
    with pytest.raises(ZeroDivisionError), in_flight(admission, 30, A):
        raise ZeroDivisionError
    assert admission.tokens_in_flight == 0


def test_a_request_beyond_the_limit_is_refused_whole_and_changes_nothing() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 95, A):
        message = "95 tokens are in flight and the request adds 6; the limit is 100; send it again in 1 s"
        with pytest.raises(Overloaded, match=message), in_flight(admission, 6, B):
            pytest.fail("it came in")
        assert admission.tokens_in_flight == 95
        with in_flight(admission, 5, B):
            assert admission.tokens_in_flight == 100


@pytest.mark.parametrize("client", [A, Client("a", "bulk")])
def test_a_request_larger_than_the_limit_is_admitted_alone_and_leaves_a_tenth(client: Client) -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 1000, client) as hold:
        assert admission.tokens_in_flight == 90
        with in_flight(admission, 10, B), pytest.raises(Overloaded), in_flight(admission, 1, C):
            pass
        with pytest.raises(Overloaded, match="limit is 90"), in_flight(admission, 1, client):
            pass
        with in_flight(admission, 10, B):
            hold(100)  # no more of it counts
        hold(-1080)
        assert admission.tokens_in_flight == 20
    assert admission.tokens_in_flight == 0
    with in_flight(admission, 1, B), pytest.raises(Overloaded, match="adds 1000"), in_flight(admission, 1000, A):
        pass


def test_a_tenth_is_kept_for_clients_that_have_nothing_in_flight() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 80, A):
        with pytest.raises(Overloaded, match="the limit is 90 for a client that already has some in flight"):
            in_flight(admission, 11, A).__enter__()
        with in_flight(admission, 10, A), in_flight(admission, 10, B):
            assert admission.tokens_in_flight == 100
        with in_flight(admission, 15, B), pytest.raises(Overloaded):
            enter(admission, B)
    with in_flight(admission, 100, A):
        assert admission.tokens_in_flight == 100  # nothing was in flight: the tenth too


def test_what_was_admitted_is_not_judged_again() -> None:
    admission = Admission(1024, 100, 100)
    with admission.request(Client("a", "bulk")) as hold:
        hold(85)
        with admission.request(B) as other:
            other(15)
            hold(0)


def test_a_request_that_was_beyond_the_limit_leaves_the_tenth_until_its_end() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 500, A) as hold, in_flight(admission, 10, B):
        hold(-400)  # of cached texts
        assert admission.tokens_in_flight == 100


def test_of_bulk_requests_a_tenth_is_left_whatever_they_bring() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 95, Client("a", "bulk")), in_flight(admission, 10, B):
        assert admission.tokens_in_flight == 100


def test_a_client_is_told_to_wait_for_all_of_a_large_request() -> None:
    clock = Clock()
    admission = Admission(1024, 100, BYTES, clock)
    with in_flight(admission, 100, A):
        clock.now += 1
    with in_flight(admission, 1000, A):
        assert retry_after(admission) == 10


def test_a_tenth_is_rounded_up() -> None:
    """So that a small limit keeps a place too, unless it is the only one."""
    for limit, known in [(1, 1), (2, 1), (9, 8), (10, 9), (11, 9), (100, 90), (1024, 921)]:
        admission = Admission(1024, limit, BYTES)
        with in_flight(admission, known, A):
            with in_flight(admission, limit - known, B):
                assert admission.tokens_in_flight == limit
            with pytest.raises(Overloaded, match=f"the limit is {known} for a client that already has some"):
                in_flight(admission, limit - known + 1, A).__enter__()


def test_a_request_holds_more_and_fewer_as_it_learns_how_many_it_has() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 0, A) as hold:
        hold(60)
        with (
            in_flight(admission, 40, B),
            pytest.raises(Overloaded, match="100 tokens are in flight and the request adds"),
        ):
            hold(10)
        hold(1000)  # alone
        hold(-1050)
        assert admission.tokens_in_flight == 10
        with in_flight(admission, 85, B) as held:
            hold(-5)  # beyond the shared limit, fewer still fit
            held(5)
        assert admission.tokens_in_flight == 5
    assert admission.tokens_in_flight == 0


def test_a_client_without_a_name_is_a_client() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 90, Client("")):
        with pytest.raises(Overloaded):
            enter(admission, Client(""))
        enter(admission, A)


def test_a_request_is_refused_where_one_token_would_be() -> None:
    admission = Admission(1024, 10, BYTES)
    enter(admission, A)
    with in_flight(admission, 9, A):
        with pytest.raises(Overloaded, match="9 tokens are in flight and the request adds 1; the limit is 9"):
            enter(admission, A)
        enter(admission, B)
        with in_flight(admission, 1, B), pytest.raises(Overloaded, match="the limit is 10; send"):
            enter(admission, C)


def test_a_closed_door_refuses_everyone_and_what_is_in_flight_goes_on() -> None:
    admission = Admission(1024, 100, BYTES)
    with in_flight(admission, 30, A):
        admission.close()
        assert admission.tokens_in_flight == 30
        with pytest.raises(Unavailable, match="the service is stopping; send the request to another instance"):
            enter(admission, B)
        with pytest.raises(Unavailable), in_flight(admission, 1, B):
            pass
    assert admission.tokens_in_flight == 0


def test_a_client_is_told_to_come_again_in_a_second_where_nothing_is_known() -> None:
    clock = Clock()
    admission = Admission(1024, 100, BYTES, clock)
    with in_flight(admission, 100, A):
        assert retry_after(admission) == 1
        clock.now += 1000
        assert retry_after(admission) == 1


def test_a_client_is_told_what_is_in_flight_by_the_recent_rate(subtests: pytest.Subtests) -> None:
    for took, seconds in [(1e-3, 1), (0.9, 1), (2.5, 3), (9.5, 10), (19.5, 20), (59.5, 60), (100, 60)]:
        with subtests.test(took=took):
            clock = Clock()
            admission = Admission(1024, 1000, BYTES, clock)
            for _ in range(5):
                with in_flight(admission, 1000, A):
                    clock.now += took
            with in_flight(admission, 1000, A):
                assert retry_after(admission) == seconds


def test_the_rate_forgets() -> None:
    """After 100 s at 10 tokens a second and 10 s at 1000, the average is near 1000 (1 − 1/e) = 632."""
    clock = Clock()
    admission = Admission(1024, 10_000, BYTES, clock)
    for _ in range(100):
        with in_flight(admission, 10, A):
            clock.now += 1
    for _ in range(100):
        with in_flight(admission, 100, A):
            clock.now += 0.1
    with in_flight(admission, 10_000, A):
        assert retry_after(admission) == 16  # 10,000 / 639


def test_time_without_work_does_not_count() -> None:
    clock = Clock()
    admission = Admission(1024, 1000, BYTES, clock)
    with in_flight(admission, 1000, A):
        clock.now += 4.5
    clock.now += 100_000
    with in_flight(admission, 1000, A):
        assert retry_after(admission) == 5


def test_work_that_does_not_end_makes_the_wait_the_longest(subtests: pytest.Subtests) -> None:
    for seconds in [100, 10_000, 1e9]:
        with subtests.test(seconds=seconds):
            clock = Clock()
            admission = Admission(1024, 1000, BYTES, clock)
            with in_flight(admission, 1000, A):
                clock.now += 1
            with in_flight(admission, 1000, A):
                clock.now += seconds
                assert retry_after(admission) == 60


def test_tokens_released_in_no_time_ask_for_the_shortest_wait() -> None:
    admission = Admission(1024, 1000, BYTES, Clock())
    with in_flight(admission, 1000, A):
        pass
    with in_flight(admission, 1000, A):
        assert retry_after(admission) == 1


@pytest.mark.parametrize("limit", [1, 9, 100, 1000])
def test_whoever_comes_and_goes(limit: int) -> None:
    """Against the rule written out; in the end nothing is in flight and no client is known."""
    dice, clock = random.Random(limit), Clock()
    kept = {1: 1, 9: 8, 100: 90, 1000: 900}  # but for newcomers
    admission = Admission(1024, limit, BYTES, clock)
    inside: list[tuple[Client, int, ExitStack]] = []
    refused = 0
    for _ in range(500):
        clock.now += dice.random()
        if inside and dice.random() < 0.4:
            inside.pop(dice.randrange(len(inside)))[2].close()
        client, tokens, stack = Client(dice.choice("abcd")), dice.randint(1, limit), ExitStack()
        flight = Counter[Client]()
        for name, count, _ in inside:
            flight[name] += count
        total = flight.total()
        assert admission.tokens_in_flight == total
        if not total or total + tokens <= (kept[limit] if flight[client] else limit):
            stack.enter_context(in_flight(admission, tokens, client))
            inside.append((client, tokens, stack))
        else:
            refused += 1
            assert 1 <= retry_after(admission, tokens, client) <= 60
    assert refused
    for _, _, stack in inside:
        stack.close()
    assert admission.tokens_in_flight == 0
    assert not admission._tokens.clients


def test_requests_are_counted_as_tokens_are() -> None:
    """A tenth of the places is kept for clients that hold none."""
    admission = Admission(10, 100, BYTES)
    with ExitStack() as held:
        for _ in range(9):
            held.enter_context(admission.request(A))
        message = (
            "9 requests are in flight and the request adds 1; the limit is 9 for a client that already has some in"
        )
        with pytest.raises(Overloaded, match=message):
            enter(admission, A)
        with admission.request(B), pytest.raises(Overloaded, match=r"10 requests are in flight .* limit is 10; send"):
            enter(admission, C)
    enter(admission, A)
    assert not admission._requests.clients


def test_bulk_requests_leave_a_tenth_to_the_others() -> None:
    admission = Admission(10, 100, BYTES)
    with ExitStack() as held:
        for number in range(9):
            held.enter_context(admission.request(Client(str(number), "bulk")))
        with pytest.raises(Overloaded, match="the limit is 9 for bulk requests; send it again"):
            enter(admission, Client("new", "bulk"))
        enter(admission, Client("0"))
    with in_flight(admission, 80, Client("a", "bulk")):
        with pytest.raises(Overloaded, match="the limit is 90 for bulk requests"):
            in_flight(admission, 11, Client("b", "bulk")).__enter__()
        with in_flight(admission, 20, A):
            assert admission.tokens_in_flight == 100


def test_bytes_are_in_flight_until_the_end_of_the_request() -> None:
    """A body is counted by its head or as it arrives, an answer when it is there; one client leaves a tenth."""
    admission = Admission(10, 100, BYTES)
    with admission.request(A) as hold:
        hold(600)
        hold(300)
        assert admission.bytes_in_flight == 900
        with admission.request(A) as second:
            message = (
                "900 bytes are in flight and the request adds 1; the limit is 900 for a client that already has some in"
            )
            with pytest.raises(Overloaded, match=message):
                second(1)
        with admission.request(B) as other:
            other(100)
            assert admission.bytes_in_flight == BYTES
            with admission.request(C) as third, pytest.raises(Overloaded, match="the limit is 1000; send it again"):
                third(1)
        assert admission.bytes_in_flight == 900
    assert admission.bytes_in_flight == 0
    assert not admission._bytes.clients
    with admission.request(A) as hold:
        hold(10)
        admission.close()
        hold(BYTES)  # nothing else is in flight, and a request in flight gets its answer

"""The fair queue: whose turn it is, and who joins; shares that can be counted by hand, then random arrivals."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cloze.service.client import Client, Priority
from cloze.service.inference.queue import FairQueue, PriorityQueue, Waiting

Queue = FairQueue[Waiting]


def arrive(
    queue: Queue | PriorityQueue[Waiting], name: str, *costs: int, priority: Priority = "interactive"
) -> list[Waiting]:
    entries = [Waiting(cost, Client(name, priority), 1) for cost in costs]
    for entry in entries:
        queue.add(entry)
    return entries


def batch_of(queue: Queue | PriorityQueue[Waiting], max_cost: int, max_padding: int) -> list[Waiting]:
    """The entries of the next batch, of one item each."""
    taken = queue.take(max_cost, max_padding)
    assert {count for _, count in taken} <= {1}
    return [entry for entry, _ in taken]


def take(queue: Queue | PriorityQueue[Waiting], max_cost: int) -> str:
    """The clients of the next batch, the seed's first."""
    return "".join(entry.client.name for entry in batch_of(queue, max_cost, max_cost))


def seeds(queue: Queue, count: int) -> str:
    """The clients of the next batches of one item each."""
    return "".join(take(queue, 1) for _ in range(count))


def held(queue: Queue) -> int:
    """How much the queue stores."""
    assert len(queue._by_tag) == len(queue._by_cost) == len(queue)
    return len(queue._by_tag) + len(queue._by_cost) + len(queue._clients)


@pytest.mark.parametrize("served", [0, 1, 100])
def test_one_item_is_in_the_next_batch_whatever_another_client_has_waiting(served: int) -> None:
    queue = Queue()
    arrive(queue, "a", *[1] * 10_000)
    assert [take(queue, 8) for _ in range(served)] == ["a" * 8] * served
    arrive(queue, "b", 1)
    assert take(queue, 8).count("b") == 1


def test_two_greedy_clients_take_turns_whoever_came_first() -> None:
    queue = Queue()
    arrive(queue, "a", *[1] * 10_000)
    assert seeds(queue, 100) == "a" * 100
    arrive(queue, "b", *[1] * 10_000)
    turns = seeds(queue, 1000)
    assert {turns[start : start + 20].count("a") for start in range(980)} == {10}


def test_three_greedy_clients_have_a_third_each_of_every_window() -> None:
    queue = Queue()
    for client, items in (("a", 3000), ("b", 1000), ("c", 2000)):
        arrive(queue, client, *[1] * items)
    turns = seeds(queue, 2700)
    assert all(sorted(turns[start : start + 3]) == ["a", "b", "c"] for start in range(2697))


def test_several_requests_of_one_client_share_its_turn() -> None:
    queue = Queue()
    for _ in range(50):
        arrive(queue, "a", *[1] * 10)
    arrive(queue, "b", *[1] * 500)
    assert Counter(seeds(queue, 200)) == {"a": 100, "b": 100}


def test_turns_are_shared_by_cost() -> None:
    """Ten items of cost 1 for one of cost 10, in every eleven turns; neither is ever more than ten ahead."""
    queue = Queue()
    arrive(queue, "a", *[1] * 1000)
    arrive(queue, "b", *[10] * 100)
    turns = seeds(queue, 1100)
    assert {turns[start : start + 11].count("b") for start in range(0, 1100, 11)} == {1}
    for end in range(1100):
        assert abs(turns[:end].count("a") - 10 * turns[:end].count("b")) <= 10


def test_of_one_cost_the_batch_itself_is_shared() -> None:
    queue = Queue()
    arrive(queue, "a", *[1] * 1000)
    arrive(queue, "b", *[1] * 1000)
    batches = [take(queue, 8) for _ in range(250)]
    assert all(batch.count("a") == batch.count("b") == 4 for batch in batches)
    assert len(queue) == 0


def test_what_fills_a_batch_is_paid_for() -> None:
    """a fills its batches (8 of cost 1), b cannot (one of cost 5); their tokens stay one batch and one item apart."""
    queue = Queue()
    arrive(queue, "a", *[1] * 1000)
    arrive(queue, "b", *[5] * 200)
    tokens = Counter[str]()
    for _ in range(300):
        for entry in batch_of(queue, 8, 8):
            tokens[entry.client.name] += entry.cost
        assert abs(tokens["a"] - tokens["b"]) <= 8 + 5
    assert tokens["a"] > 900
    assert tokens["b"] > 900


def test_a_client_saves_nothing_up_while_it_has_nothing_to_ask() -> None:
    queue = Queue()
    arrive(queue, "b", 1)
    arrive(queue, "a", *[1] * 1000)
    seeds(queue, 500)
    arrive(queue, "b", *[1] * 100)
    assert Counter(seeds(queue, 50)) == {"a": 25, "b": 25}


@pytest.mark.parametrize("served", [0, 10])
def test_what_a_client_cancels_is_not_charged(served: int) -> None:
    """Its later items have the turns that they would have had without it, and what ran is paid for."""
    queue = Queue()
    arrive(queue, "b", *[1] * 1000)
    large = Waiting(1, Client("a"), 500)
    queue.add(large)
    kept = arrive(queue, "a", *[1] * 20)
    seeds(queue, 2 * served)
    queue.remove(large)
    assert Counter(seeds(queue, 20)) == {"a": 10, "b": 10}
    queue.remove(kept[10])
    arrive(queue, "a", 1)
    assert Counter(seeds(queue, 20)) == {"a": 10, "b": 10}
    assert set(seeds(queue, 20)) == {"b"}


def test_who_comes_last_among_many_is_served_within_the_bound() -> None:
    """C (1 + d / m) with 20 clients, d = m: at most 40 batches of one item."""
    queue = Queue()
    for client in "abcdefghijklmnopqrs":
        arrive(queue, client, *[3] * 100)
    seeds(queue, 190)
    arrive(queue, "z", 3)
    assert 1 < seeds(queue, 41).index("z") + 1 <= 40


def test_items_of_one_client_and_cost_keep_their_order() -> None:
    queue = Queue()
    entries = arrive(queue, "a", *[3, 2, 1, 2] * 50)
    taken = [entry for _ in range(200) for entry in batch_of(queue, 6, 6)]
    for cost in (1, 2, 3):
        assert [entry for entry in taken if entry.cost == cost] == [entry for entry in entries if entry.cost == cost]


def test_a_removed_entry_is_not_taken_and_may_be_removed_twice() -> None:
    queue = Queue()
    gone, stays = arrive(queue, "a", 2, 3)
    queue.remove(gone)
    queue.remove(gone)
    assert (len(queue), queue.cost) == (1, 3)
    assert batch_of(queue, 100, 100) == [stays]
    queue.remove(stays)
    assert (len(queue), queue.cost) == (0, 0)
    assert batch_of(queue, 100, 100) == []


def test_what_has_left_is_forgotten() -> None:
    queue = Queue()
    for number in range(2000):
        entries = arrive(queue, f"client {number}", 1 + number % 300, 1 + number % 7)
        if number % 2:
            batch_of(queue, 50, 50)
        for entry in entries:
            queue.remove(entry)
        assert held(queue) <= 20
    batch_of(queue, 50, 50)
    assert held(queue) == 0
    stays = arrive(queue, "stays", *[5] * 100)
    for _ in range(200):
        for entry in arrive(queue, "goes", *range(1, 50)):
            queue.remove(entry)
    assert sum(len(batch_of(queue, 5, 5)) for _ in range(50)) == 50
    assert held(queue) <= 6 * len(stays)


@pytest.mark.parametrize(
    ("max_padding", "batches"),
    [
        (0, [[10, 10], [9], [12], [7], [20]]),
        (1, [[10, 10, 9], [12], [7], [20]]),
        (3, [[10, 10, 9], [12], [7], [20]]),
        (6, [[10, 10, 9, 7], [12], [20]]),  # 12 would make it 12 × 4 - 41
        (7, [[10, 10, 9, 12], [7], [20]]),
        (12, [[10, 10, 9, 12, 7], [20]]),
        (51, [[10, 10, 9, 12, 7], [20]]),
        (52, [[10, 10, 9, 12, 7, 20]]),
    ],
)
def test_no_more_of_a_batch_is_padding_than_is_allowed(max_padding: int, batches: list[list[int]]) -> None:
    queue = Queue()
    arrive(queue, "a", 10, 9, 12, 7, 20, 10)
    taken = [[entry.cost for entry in batch_of(queue, 1000, max_padding)] for _ in range(len(batches) + 1)]
    assert taken == [*batches, []]


def nearest(waiting: list[Waiting], batch: list[Waiting], max_cost: int, max_padding: int) -> Waiting | None:
    """What a full look at all that waits would add next."""
    seed = batch[0].cost

    def fits(entry: Waiting) -> bool:
        costs = [each.cost for each in (*batch, entry)]
        padded = max(costs) * len(costs)
        return padded <= max_cost and padded - sum(costs) <= max_padding

    return min(filter(fits, waiting), key=lambda entry: (abs(entry.cost - seed), entry.cost < seed), default=None)


@given(seed=some.integers(0, 2**32))
def test_whatever_arrives_and_leaves(seed: int) -> None:
    """Nothing is lost; the least tag is the seed and its nearest fill; no wait passes C (1 + d / m)."""
    dice = random.Random(seed)
    clients, costs = range(dice.choice([1, 2, 3, 10])), range(dice.choice([1, 3]), dice.choice([4, 30, 300]))
    max_cost, max_padding = dice.choice([1, 8, 100, 1000]), dice.choice([0, 3, 30, 1000])
    queue, time, batches = Queue(), 0, 0
    waiting: dict[Waiting, int] = {}  # the batch by which it is due; insertion is arrival
    for step in range(200):
        for _ in range(dice.choice([0, 1, 1, 3, 40]) if step < 100 else 0):
            [entry] = arrive(queue, str(dice.choice(clients)), dice.choice(costs))
            waiting[entry] = batches + len(clients) * (1 + (entry.tag - time) // costs[0])
        for entry in [entry for entry in waiting if dice.random() < 0.02]:
            queue.remove(entry)
            del waiting[entry]
        assert (len(queue), queue.cost) == (len(waiting), sum(entry.cost for entry in waiting))
        batch = batch_of(queue, max_cost, max_padding)
        if not batch:
            assert not waiting
            continue
        batches, time = batches + 1, batch[0].tag
        assert time == min(entry.tag for entry in waiting)
        assert len(batch) == 1 or max(entry.cost for entry in batch) * len(batch) <= max_cost
        for place, entry in enumerate(batch):
            if place:
                expected = nearest(list(waiting), batch[:place], max_cost, max_padding)
                assert expected is not None
                assert entry.cost == expected.cost
                assert entry.tag == min(each.tag for each in waiting if each.cost == entry.cost)
            assert waiting.pop(entry) >= batches
        assert nearest(list(waiting), batch, max_cost, max_padding) is None
        for before, after in pairwise(entry for entry in batch[1:] if entry.cost == batch[0].cost):
            assert before.tag <= after.tag
    while batch_of(queue, max_cost, max_padding):
        pass
    assert (len(queue), queue.cost) == (0, 0)
    assert held(queue) == 0


@given(seed=some.integers(0, 2**32))
def test_an_entry_of_many_items_is_as_many_entries_of_one(seed: int) -> None:
    """Batch for batch the same items of the same clients, whatever arrives and leaves meanwhile."""
    dice = random.Random(seed)
    max_cost, max_padding = dice.choice([1, 8, 100, 1000]), dice.choice([0, 3, 30, 1000])
    together, apart = Queue(), Queue()
    waiting = list[tuple[Waiting, list[Waiting]]]()
    for step in range(100):
        for _ in range(dice.choice([0, 1, 3, 10]) if step < 50 else 0):
            cost, client, count = dice.randint(1, 12), Client(dice.choice("abc")), dice.choice([1, 2, 7, 30])
            waiting.append((Waiting(cost, client, count), [Waiting(cost, client, 1) for _ in range(count)]))
            together.add(waiting[-1][0])
            for entry in waiting[-1][1]:
                apart.add(entry)
        for entry, entries in [each for each in waiting if dice.random() < 0.02]:
            for queue, leaving in ((together, [entry]), (apart, entries)):
                for each in leaving:
                    queue.remove(each)
        assert (len(together), together.cost) == (len(apart), apart.cost)
        taken = Counter[tuple[Client, int]]()
        for entry, count in together.take(max_cost, max_padding):
            taken[entry.client, entry.cost] += count
        assert taken == Counter((entry.client, entry.cost) for entry in batch_of(apart, max_cost, max_padding))


def test_of_two_saturated_classes_bulk_gets_one_token_in_65() -> None:
    queue = PriorityQueue[Waiting]()
    arrive(queue, "i", *[1] * 64_000)
    arrive(queue, "b", *[1] * 64_000, priority="bulk")
    turns = "".join(take(queue, 8) for _ in range(65 * 100))
    assert (turns.count("i"), turns.count("b")) == (8 * 64 * 100, 8 * 100)
    assert max(map(len, turns.split("b" * 8))) <= 8 * 65


def test_classes_share_tokens_and_not_texts() -> None:
    """One long interactive text a batch, or eight short ones of bulk: the same tokens."""
    queue = PriorityQueue[Waiting]()
    arrive(queue, "i", *[8] * 6500)
    arrive(queue, "b", *[1] * 8000, priority="bulk")
    turns = "".join(take(queue, 8) for _ in range(65 * 100))
    assert (turns.count("i"), turns.count("b")) == (64 * 100, 8 * 100)


@pytest.mark.parametrize("together", [True, False])
def test_an_interactive_entry_is_the_next_batch_among_64_bulk_clients(together: bool) -> None:
    """Also while the clients of a class have equal tags, and while an interactive client keeps asking."""
    queue = PriorityQueue[Waiting]()
    for number in range(64):
        arrive(queue, "b", *[7 + (0 if together else number)] * 100, priority="bulk")
        arrive(queue, f"b{number}", *[7] * 100, priority="bulk")
    for _ in range(500):
        [entry] = arrive(queue, "i", 7)
        assert batch_of(queue, 100, 100) == [entry]
        assert {each.client.priority for each in batch_of(queue, 100, 100)} == {"bulk"}


def test_a_class_saves_nothing_up_while_nothing_of_it_waits() -> None:
    queue = PriorityQueue[Waiting]()
    arrive(queue, "b", *[1] * 1000, priority="bulk")
    assert [take(queue, 8) for _ in range(60)] == ["b" * 8] * 60
    arrive(queue, "i", *[1] * 1000)
    assert [take(queue, 8)[0] for _ in range(66)] == ["i"] * 65 + ["b"]


@given(seed=some.integers(0, 2**32))
def test_whatever_arrives_in_both_classes_is_taken_once_and_in_its_class(seed: int) -> None:
    dice = random.Random(seed)
    queue, waiting = PriorityQueue[Waiting](), set[Waiting]()
    for _ in range(500):
        for _ in range(dice.choice([0, 1, 5])):
            priority: Priority = dice.choice(["interactive", "bulk"])
            waiting.update(arrive(queue, dice.choice("abc"), dice.randint(1, 30), priority=priority))
        for entry in [entry for entry in waiting if dice.random() < 0.02]:
            queue.remove(entry)
            waiting.remove(entry)
        assert (len(queue), queue.cost) == (len(waiting), sum(entry.cost for entry in waiting))
        batch = batch_of(queue, 60, 20)
        assert bool(batch) == bool(waiting)
        assert len({entry.client.priority for entry in batch}) <= 1
        assert waiting.issuperset(batch)
        waiting.difference_update(batch)

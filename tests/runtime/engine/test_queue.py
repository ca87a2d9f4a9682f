"""Who is next, and how long an idle engine waits for company."""

from collections.abc import Sequence
from threading import Timer
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime import SamplingParams
from dspark.runtime.decoding.acceptance import Sampler
from dspark.runtime.engine.queue import PASSED_OVER, RequestQueue
from dspark.runtime.engine.request import Priority, Request

PRIORITIES: st.SearchStrategy[Priority] = st.sampled_from(("interactive", "batch"))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), PRIORITIES, st.integers(1, 9)),
        st.tuples(st.just("pop"), st.integers(1, 9), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 40), st.none()),
    ),
    max_size=60,
)


def request(priority: Priority = "interactive", size: int = 1) -> Request:
    params = SamplingParams(max_new_tokens=1)
    return Request([0] * size, Sampler(params, [0], 4), frozenset(), None, priority=priority)


def anything(_: Request) -> bool:
    return True


def pop_all(queue: RequestQueue) -> list[Request]:
    popped = []
    while (each := queue.pop(anything)) is not None:
        popped.append(each)
    return popped


# --- who is next ---


@given(st.lists(PRIORITIES, max_size=40))
def test_first_come_first_served_within_a_priority(priorities: Sequence[Priority]) -> None:
    queue = RequestQueue()
    pushed = [request(priority) for priority in priorities]
    for each in pushed:
        queue.push(each)
    popped = pop_all(queue)
    assert set(popped) == set(pushed)
    assert len(popped) == len(pushed)
    for priority in ("interactive", "batch"):
        assert [each for each in popped if each.priority == priority] == [
            each for each in pushed if each.priority == priority
        ]


def test_three_interactive_requests_go_ahead_of_a_batch_one() -> None:
    queue = RequestQueue()
    for priority in ("batch", "batch", *["interactive"] * 8):
        queue.push(request(priority))  # type: ignore[arg-type]
    order = "".join(each.priority[0] for each in pop_all(queue))
    assert order == "iiibiiibii"


def test_a_batch_request_is_not_starved_by_interactive_ones_that_keep_coming() -> None:
    queue = RequestQueue()
    patient = [request("batch") for _ in range(3)]
    for each in patient:
        queue.push(each)
    taken = []
    for _ in range(50):
        queue.push(request())
        queue.push(request())
        taken.append(queue.pop(anything))
    places = [taken.index(each) + 1 for each in patient]
    assert places == [4, 8, 12]


def test_interactive_requests_are_not_starved_by_batch_ones_that_keep_coming() -> None:
    queue = RequestQueue()
    for _ in range(20):
        queue.push(request("batch"))
    queue.push(one := request())
    assert queue.pop(anything) is one


@given(EVENTS)
def test_against_a_history_written_down(events: Sequence[tuple]) -> None:
    """Checks the rules on what happened, event by event, instead of predicting it."""
    queue = RequestQueue()
    waiting: list[Request] = []
    overtaken = 0  # interactive requests taken in a row while a batch one waited
    for kind, first, second in events:
        batch = [each for each in waiting if each.priority == "batch"]
        interactive = [each for each in waiting if each.priority == "interactive"]
        if kind == "push":
            each = request(first, second)
            queue.push(each)
            waiting.append(each)
        elif kind == "remove" and waiting:
            victim = waiting[first % len(waiting)]
            assert queue.remove(victim)
            assert not queue.remove(victim)
            waiting.remove(victim)
        elif kind == "pop":
            room = first

            def fits(each: Request, room: int = room) -> bool:
                return len(each.prompt_ids) <= room

            popped = queue.pop(fits)
            if popped is None:
                heads = [group[0] for group in (batch, interactive) if group]
                assert not heads or any(not fits(head) for head in heads)
                if interactive and not (batch and overtaken == PASSED_OVER):
                    assert not fits(interactive[0])  # nobody overtakes who is next
            else:
                assert fits(popped)
                assert popped in (batch[:1] + interactive[:1])
                if popped.priority == "batch" and interactive:
                    assert overtaken == PASSED_OVER
                overtaken = overtaken + 1 if popped.priority == "interactive" and batch else 0
                assert overtaken <= PASSED_OVER
                waiting.remove(popped)
        assert len(queue) == len(waiting)


def test_a_large_request_that_is_next_is_not_overtaken() -> None:
    queue = RequestQueue()
    queue.push(large := request(size=9))
    queue.push(small := request(size=1))
    for _ in range(10):
        assert queue.pop(lambda each: len(each.prompt_ids) < 9) is None
    assert pop_all(queue) == [large, small]


# --- how long an idle engine waits ---


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("waiting", "age", "held"), [(0, 0.0, 0.0), (1, 0.0, 2.0), (1, 1.5, 0.5), (2, 3.0, 0.0), (3, 0.0, 0.0)]
)
def test_held_until_enough_wait_or_the_oldest_waited_long_enough(waiting: int, age: float, held: float) -> None:
    clock = Clock()
    queue = RequestQueue(3, 2.0, clock)
    for index in range(waiting):
        queue.push(request("batch" if index else "interactive"))
        clock.now += age if not index else 0.0
    assert max(queue._held_for(), 0.0) == held


def test_nothing_is_held_by_default() -> None:
    queue = RequestQueue()
    queue.push(request())
    start = monotonic()
    queue.wait()
    assert monotonic() - start < 0.05


def test_the_delay_ends_the_wait() -> None:
    queue = RequestQueue(2, 0.05)
    start = monotonic()
    queue.push(request())
    queue.wait()
    assert 0.05 <= monotonic() - start < 1.0


@pytest.mark.parametrize("event", ["another comes", "the only one is taken back"])
def test_another_thread_ends_the_wait(event: str) -> None:
    queue = RequestQueue(2, 30.0)
    queue.push(one := request())
    timer = Timer(0.05, lambda: queue.push(request()) if event == "another comes" else queue.remove(one))
    timer.start()
    start = monotonic()
    queue.wait()
    assert monotonic() - start < 5.0
    timer.join()

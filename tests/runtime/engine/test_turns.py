"""One at a time, and nobody is left waiting."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

from dspark.runtime.engine.turns import Turns


def test_one_thread_has_the_turn() -> None:
    turns = Turns()
    assert turns.take()
    assert not turns.take()
    turns.end()
    assert turns.take_or_wait()
    assert not turns.take()


def test_who_waits_sees_the_end_even_if_the_turn_is_taken_again_at_once() -> None:
    turns, coming = Turns(), Event()
    taken: list[bool] = []

    def come() -> None:
        coming.set()
        taken.append(turns.take_or_wait())

    for _ in range(50):
        assert turns.take()
        coming.clear()
        other = Thread(target=come)
        other.start()
        coming.wait(10)
        while other.is_alive():  # it may come just between two turns
            turns.end()
            if not turns.take():
                other.join(10)  # it has the turn
                break
            other.join(0.001)
        assert not other.is_alive()
        turns.end()
    assert len(taken) == 50
    assert taken.count(False) > 25


def test_turns_never_overlap() -> None:
    turns, inside, overlaps = Turns(), 0, 0

    def work(_: int) -> int:
        nonlocal inside, overlaps
        done = 0
        while done < 200:
            if turns.take_or_wait():
                inside += 1
                overlaps += inside != 1
                inside -= 1
                turns.end()
                done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [200] * 4
    assert overlaps == 0
